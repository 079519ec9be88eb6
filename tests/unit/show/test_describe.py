"""A wrapped model as a table, and the first line of its repr()."""

import copy
import dataclasses
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.helpers import linears
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, trace
from torchgpipe.schedule import interleaved, one_f_one_b
from torchgpipe.show.describe import Description, DescriptionRow, shortened


def wrap(module=None, balance=(2, 1), **options):
    module = module or linears(3, 4, 5, 2)
    return GPipe(module, balance, devices=["cpu"] * len(balance), **options)


def lines(wrapper):
    return str(wrapper.describe()).split("\n")


def test_gpipe():
    module = nn.Sequential(
        OrderedDict(first=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 2000))
    )
    model = wrap(module, chunks=8, checkpoint=["always", "never"])
    assert lines(model) == [
        "partition  layers       parameters     bytes  device  checkpoint",
        "0          first, norm          24     136 B  cpu     always",
        "1          head             10,000  39.1 KiB  cpu     never",
        "total: 3 layers, 10,024 parameters, 39.2 KiB, chunks: 8",
    ]
    # Parameters, and the norm's statistics and count.
    assert model.describe().rows[0].bytes == 4 * 24 + 4 * 8 + 8


def test_description_is_of_now():
    model = wrap(chunks=2)
    before = model.describe()
    assert [row.checkpoint for row in before.rows] == ["except_last"] * 2
    model.chunks, model.checkpoint = 4, "never"
    after = model.describe()
    assert (before.chunks, after.chunks) == (2, 4)
    assert [row.checkpoint for row in after.rows] == ["never"] * 2
    assert after == model.describe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.chunks = 1


def test_shared_parameters_count_once_in_all():
    layer = nn.Linear(4, 4)
    found = wrap(nn.Sequential(layer, nn.Tanh(), layer), [2, 1]).describe()
    assert [row.parameters for row in found.rows] == [20, 20]
    assert (found.parameters, found.bytes) == (20, 80)


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (4, "0, 1, 2, 3"), (5, "0, 1, ..., 4")]
)
def test_many_names(count, text):
    assert shortened([str(k) for k in range(count)]) == text


def test_times_and_memory_make_columns():
    rows = (
        DescriptionRow("0", ("a",), 2, 8, "cpu", "always", 0.0012, 0.002, 2048),
        DescriptionRow("1", ("b",), 2, 8, "cpu", "never", 0.5),
    )
    assert [x[31:] for x in str(Description(rows, 4, 16, 2)).split("\n")] == [
        "bytes  device  checkpoint  forward ms  backward ms   memory",
        "  8 B  cpu     always           1.200        2.000  2.0 KiB",
        "  8 B  cpu     never          500.000",
        "16 B, chunks: 2",
    ]
    row = DescriptionRow("0", ("a",), 2, 8, "cpu", "always", 0.001, 0.002, 2048, 0.001, 1024)
    shown = Description((row,), 2, 8, 2, measured=0.004, predicted=0.003)
    assert str(shown).split("\n")[0].endswith("  recompute ms  backward ms   memory  planned")
    assert str(shown).split("\n")[1].endswith("         1.000        2.000  2.0 KiB  1.0 KiB")
    assert str(shown).split("\n")[-1] == "step: 4.000 ms measured, 3.000 ms predicted"


def test_after_a_trace():
    x = torch.rand(8, 3)
    model = wrap(chunks=4, checkpoint=["always", "never"])
    before = model.describe()
    with trace(model):
        model(x).sum().backward()
    found = model.describe()
    assert before.measured is None
    assert found.measured > 0
    assert all(row.forward > 0 and row.backward > 0 for row in found.rows)
    assert [row.recompute is not None for row in found.rows] == [True, False]
    # Nobody counts the memory of the CPU.
    assert [row.memory for row in found.rows] == [None] * 2
    with trace(model):
        pass
    assert model.describe() == found
    with trace(model), torch.no_grad():
        model(x)
    assert [row.backward for row in model.describe().rows] == [None] * 2
    # Copies have no figures.
    assert copy.deepcopy(model).describe().measured is None


def test_a_prediction_is_shown_for_its_settings():
    model = GPipe(linears(3, 4, 5, 2), [2, 1], devices=["cpu", "meta"], chunks=2)
    model._stages.predict(2.0, {torch.device("cpu"): 4096}, model)
    assert lines(model)[-1] == "step: 2.000 ms predicted"
    assert lines(model)[1].endswith("except_last  4.0 KiB")
    model.chunks = 4
    assert model.describe().predicted is None
    model.chunks = 2
    training = ScheduledLoss(model, F.mse_loss, "1f1b")
    assert training.describe().predicted is None
    model._stages.predict(1.0, {}, model, "1f1b")
    assert training.describe().predicted == 0.001
    assert model.describe().predicted is None
    # Partitions on the CPU compute one after another, as no plan knows.
    model = wrap()
    model._stages.predict(2.0, {}, model)
    assert model.describe().predicted is None


def test_scheduled_loss():
    model = wrap(chunks=2)
    training = ScheduledLoss(model, nn.CrossEntropyLoss(torch.ones(2)), "zbh1")
    assert lines(training) == [
        "partition  layers   parameters  bytes  device  checkpoint",
        "0          0, 1             41  164 B  cpu     except_last",
        "1          2, loss          12   56 B  cpu     except_last",
        "total: 4 layers, 53 parameters, 220 B, chunks: 2, schedule: zbh1",
    ]
    # Functions are no part of a stage.
    assert ScheduledLoss(model, F.cross_entropy).describe().rows == model.describe().rows


def test_text_of_a_schedule():
    schedule = one_f_one_b(2, 2)
    found = lines(ScheduledLoss(wrap(chunks=2), F.mse_loss, schedule))
    assert found[-3].endswith(", chunks: 2, schedule:")
    assert "\n".join(found[-2:]) == str(schedule)


def test_device_map():
    module = nn.Sequential(linears(3, 3, 3), nn.Linear(3, 1), nn.BatchNorm1d(1))
    model = MappedGPipe(module, {"0.0": "cpu", "0.1": "meta", "": "cpu"}, chunks=4)
    assert lines(model) == [
        "layers     parameters  bytes  device  checkpoint",
        "0.0, 1, 2          18   88 B  cpu     except_last",
        "0.1                12   48 B  meta    except_last",
        "total: 4 layers, 30 parameters, 136 B, chunks: 4",
    ]
    assert model.describe().parameters == sum(x.numel() for x in module.parameters())


@pytest.mark.parametrize(
    ("make", "name", "first"),
    [
        (
            lambda: wrap(chunks=4, checkpoint=["never", "always"]),
            "GPipe",
            "devices=['cpu', 'cpu'], chunks=4, checkpoint=['never', 'always']",
        ),
        (
            lambda: ScheduledLoss(wrap(chunks=2), F.mse_loss, "gpipe", stages="graph"),
            "ScheduledLoss",
            "schedule='gpipe', stages='graph'",
        ),
        (
            lambda: ScheduledLoss(wrap(chunks=2), F.mse_loss, one_f_one_b(2, 2)),
            "ScheduledLoss",
            "schedule='2 workers, 2 micro-batches', stages='eager'",
        ),
        (
            lambda: ScheduledLoss(
                wrap(chunks=2), F.mse_loss, partial(interleaved, stages_per_worker=1)
            ),
            "ScheduledLoss",
            "schedule='interleaved', stages='eager'",
        ),
        (
            lambda: MappedGPipe(linears(3, 3, 3), {"0": "meta", "1": "cpu"}, chunks=2),
            "MappedGPipe",
            "devices=['meta', 'cpu'], chunks=2, checkpoint='except_last'",
        ),
    ],
)
def test_first_line_of_repr(make, name, first):
    assert repr(make()).split("\n")[:2] == [f"{name}(", f"  {first}"]
