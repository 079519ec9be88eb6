"""Training plain and under GPipe gives the same results, at tiny size."""

import json
import sys
from dataclasses import replace
from functools import partial
from math import isnan

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.__main__ import main
from benchmarks.models import images, resnet
from benchmarks.report.files import RESULTS
from benchmarks.rivals import convergence
from benchmarks.rivals.convergence import Course, Outcome, Variant, count, grouped
from benchmarks.suites import transparency
from benchmarks.suites.tables.transparency import compared
from benchmarks.suites.transparency import MODELS, summarise
from tests.support.size import soak
from torchgpipe.testing import UnavailableError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def fill():
    """Make images of one colour each, somewhat different, in a folder."""

    def fill(folder, colour, number):
        folder.mkdir(parents=True)
        for k in range(number):
            pixels = tuple(max(0, x - 9 * k) for x in colour)
            Image.new("RGB", (5, 7), pixels).save(folder / f"{k}.png")
        (folder / "notes.txt").write_text("none of them", "utf-8")

    return fill


@pytest.fixture
def colours(tmp_path, fill):
    """Ten red images, and ten blue ones."""
    fill(tmp_path / "colours" / "red", (255, 0, 0), 10)
    fill(tmp_path / "colours" / "blue", (0, 0, 255), 10)
    return tmp_path / "colours"


def test_transparency(colours, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MODELS, "resnet", partial(resnet, [1], width=4))
    path = tmp_path / "found.json"
    options = ["--images", str(colours), "--size", "16", "--n", "1", "2", "--chunks", "2"]
    options += ["--device", "cpu", "--batch", "5", "--epochs", "2", "--seeds", "2"]
    options += ["--output", str(path)]
    assert main(["transparency", *options]) == 0
    result = json.loads(path.read_text("utf-8"))
    assert result["command"] == " ".join(["python -m benchmarks transparency", *options])
    assert result["machine"]["threads"] == 1
    layers = len(resnet([1]))
    assert {name: sum(x) for name, x in result["balances"].items()} == {"1": layers, "2": layers}
    rows = result["rows"]
    assert len(rows) == 3 + 2 * 5

    plain, *wrapped = [x for x in rows if x["part"] == "exact"]
    assert [x["variant"] for x in wrapped] == ["n = 1", "n = 2"]
    for row in wrapped:
        assert row["loss_difference"] < 1e-9
        assert row["weight_difference"] < 1e-9
        assert len(row["losses"]) == 2 * 3
        assert row["losses"] == pytest.approx(plain["losses"], rel=1e-9)
        assert row["accuracy"] == plain["accuracy"]
        assert row["digests"] == wrapped[0]["digests"]
    for seed in (0, 1):
        ours = [x for x in rows if x["part"] == "batch" and x["seed"] == seed and x["n"]]
        # Deferred batch normalisation trains the same parameters, with other running statistics.
        assert len({x["digests"][0] for x in ours}) == 1
        assert len({x["digests"][1] for x in ours}) == 2

    found = summarise(result)
    assert len(found.tables) == 3
    for table in found.tables:
        assert all(len(row) == len(table.head) for row in table.rows)
    assert "no" not in [cell for row in found.tables[0].rows for cell in row]
    lines, bars = found.charts
    assert list(lines.series) == ["plain", "n = 2"]
    assert len(bars.labels) == 5
    for chart in found.charts:
        assert all(len(x) == len(chart.labels) for x in chart.series.values())
    text = path.with_suffix(".md").read_text("utf-8")
    assert "All partitions share one device, the CPU" in text
    assert text in capsys.readouterr().out
    assert "n = 2, deferred" in text
    assert path.with_suffix(".png").stat().st_size

    result["exact_epochs"] = 0
    result["rows"] = [x for x in rows if x["part"] == "batch"]
    found = summarise(result)
    assert len(found.tables) == 2
    assert len(found.charts) == 1


@pytest.fixture
def course(colours):
    """A linear classifier learns colours."""
    return Course(
        images=images.folder(colours, 8),
        make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)),
        dtype=torch.float32,
        devices=[torch.device("cpu")],
        balances={2: [1, 1]},
        chunks=2,
        epochs=4,
        batch=4,
        rate=0.01,
    )


def test_course_converges(course):
    plain, wrapped = course.run(Variant(), 0), course.run(Variant(2), 0)
    assert len(plain.losses) == 4 * (16 // 4)
    assert plain.losses[-1] < plain.losses[0] / 2
    assert plain.accuracy == wrapped.accuracy == 100
    assert wrapped.difference_of_losses(plain) < 1e-5
    assert course.run(Variant(), 1).difference_of_losses(plain) > 1e-3


def test_a_seed_makes_weights(course):
    # At this rate, they stay.
    course = replace(course, rate=0.0)
    first, again, other = (course.run(Variant(n), seed) for n, seed in [(None, 0), (2, 0), (2, 1)])
    assert first.digests == again.digests
    assert first.difference_of_parameters(other) > 0.1


def test_a_seed_makes_the_order_of_images(course):
    (layers,) = {course.make()}
    course = replace(course, rate=0.0, make=lambda: layers)
    first, again, other = (course.run(Variant(), seed).losses for seed in (0, 0, 1))
    assert first == again != other


def test_each_partition_has_a_device(course, monkeypatch):
    wrapped = course.wrapped(course.make(), Variant(2))
    assert [len(x) for x in wrapped.partitions] == course.balances[2]
    assert wrapped.devices == [torch.device("cpu")] * 2

    def named(n, count):
        course_there = replace(course, devices=[*"abcd"][:count], balances={n: [1] * n})
        return course_there.wrapped(nn.Sequential(), Variant(n, deferred=True))

    monkeypatch.setattr(convergence, "GPipe", lambda layers, balance, **options: options)
    assert named(2, 4) == {"devices": [*"ab"], "chunks": 2, "deferred_batch_norm": True}
    assert [named(n, 2)["devices"] for n in (1, 3, 4)] == [[*"a"], [*"aab"], [*"aabb"]]


def test_accuracy_is_of_an_evaluation_on_test_images(course):
    rows = torch.tensor([[0.0, 1.0]] * 5)
    train = TensorDataset(rows, torch.tensor([0] * 5))
    test = TensorDataset(rows, torch.tensor([1, 0, 1, 1, 0]))
    course = replace(course, images=images.Images("rows", 2, train, test), batch=2)
    # In training, all of it is dropped, and the first class is as good as the other.
    model = nn.Sequential(nn.Dropout(1.0))
    assert course.accuracy(model) == 60
    assert model.training
    assert model(rows).argmax(1).tolist() == [0] * 5


@soak  # It imports scikit-learn, which takes long.
def test_digits():
    pytest.importorskip("sklearn")
    data = images.digits(8)
    assert (data.classes, count(data.train), count(data.test)) == (10, 1442, 355)
    ((pixels, labels),) = images.batches(data.test, [torch.arange(355)], 0)
    assert pixels.shape == (355, 3, 8, 8)
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert labels.unique().tolist() == list(range(10))


def test_folder(colours):
    data = images.folder(colours, 4)
    assert (data.name, data.classes) == ("colours", 2)
    assert count(data.train) == 16
    assert count(data.test) == 4
    ((pixels, labels),) = images.batches(data.test, [torch.arange(4)], 0)
    assert pixels.shape == (4, 3, 4, 4)
    # By name: 0 is blue, and 1 is red.
    assert labels.tolist() == [0, 0, 1, 1]
    assert (pixels[:2, 2] > 0.6).all()
    assert (pixels[2:, 0] > 0.6).all()
    assert not pixels[:, 1].any()
    paths = {path for path, _ in [*data.train.rows, *data.test.rows]}
    assert len(paths) == 20


def test_folders_for_training_and_test(tmp_path, fill):
    for part, number in ("train", 3), ("val", 2):
        fill(tmp_path / part / "red", (255, 0, 0), number)
        fill(tmp_path / part / "blue", (0, 0, 255), number)
    data = images.folder(tmp_path, 4)
    assert {path.parent.parent.name for path, _ in data.train.rows} == {"train"}
    assert count(data.train) == 6
    assert count(data.test) == 4
    fill(tmp_path / "val" / "green", (0, 255, 0), 1)
    with pytest.raises(ValueError, match=r"the same classes .*in one alone: green\); remove"):
        images.folder(tmp_path, 4)


def test_wrong_folders(tmp_path, fill):
    with pytest.raises(ValueError, match=r"must be in a folder \(folder: .*nowhere\); give"):
        images.folder(tmp_path / "nowhere", 4)
    fill(tmp_path / "red", (255, 0, 0), 1)
    with pytest.raises(ValueError, match=r"two classes at least .*folders in it: 1\); give"):
        images.folder(tmp_path, 4)
    (tmp_path / "blue").mkdir()
    with pytest.raises(ValueError, match=r"must have images \(folder: .*blue\); add"):
        images.folder(tmp_path, 4)
    Image.new("L", (3, 3)).save(tmp_path / "blue" / "grey.PNG")
    with pytest.raises(ValueError, match=r"one to test on \(folder: .*blue\); add one"):
        images.folder(tmp_path, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--images", "nowhere"], "must be in a folder (folder: nowhere); give one that exists"),
        (["--batch", "17"], "(batch: 17, images: 16); take --batch 16 or less"),
        (["--batch", "7"], "two images in a micro-batch (batch: 7, chunks: 4); take --batch 8"),
        (["--n", "1", "99"], "a layer (n: 99, layers: 40); take --n 40 or less"),
        (["--device", "tpu"], "such a device (device: 'tpu'); take --device "),
        (["--epochs", "0"], "--epochs: must be at least 1 (value: 0)"),
    ],
)
def test_wrong_options(options, message, colours, capsys):
    # The first of two options of a name does not count.
    usual = ["--images", str(colours), "--size", "8", "--batch", "8", "--device", "cpu"]
    with pytest.raises(SystemExit) as status:
        main(["transparency", *usual, *options])
    assert status.value.code == 2
    assert message in capsys.readouterr().err


def test_without_virtual_accelerators(colours, capsys, monkeypatch):
    def load(devices):
        raise UnavailableError(f"they need a compiler (devices: {devices}); install one")

    monkeypatch.setattr(transparency, "load", load)
    with pytest.raises(SystemExit):
        main(["transparency", "--images", str(colours), "--batch", "8", "--n", "1", "3"])
    assert "(devices: 3); install one, or take --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "options"), [("PIL", ["--images", "."]), ("sklearn", [])])
def test_without_packages(package, options, capsys, monkeypatch):
    for module in (package, f"{package}.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit):
        main(["transparency", *options])
    assert "run `pip install '.[benchmarks]'` in a clone" in capsys.readouterr().err


def test_devices_are_told():
    data = {"name": "rows", "classes": 2, "train": 5, "test": 5}
    numbers = dict.fromkeys(("model", "epochs", "batch", "chunks", "exact_epochs"), 0)
    row = {"part": "batch", "n": None, "variant": "plain", "accuracy": 1.0, "last_loss": 1.0}
    row |= {"seed": 0, "deferred": False, "digests": []}
    result = {**numbers, "images": data, "rows": [row, {**row, "n": 1, "variant": "n = 1"}]}

    def notes(device, devices):
        return summarise({**result, "device": device, "devices": devices}).notes

    assert "share one device, the CPU" in notes("cpu", 1)
    assert "Each partition has a virtual accelerator of its own" in notes("virtual", 1)
    assert "are on devices of cuda" in notes("cuda", 3)
    assert "(devices: 3)" in notes("cuda", 3)


def test_group_normalisation():
    layers = grouped(MODELS["resnet"](10))
    kinds = [type(x) for x in layers.modules()]
    assert nn.BatchNorm2d not in kinds
    # Also within the layers that fit the block's input to its output.
    assert kinds.count(nn.GroupNorm) == 1 + 3 * 4
    rows = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(layers(rows)[:2], layers(rows[:2]))


def test_noise():
    assert compared([98.0, 99.0], [97.0, 99.0]) == ("+0.50", "+0.45", "yes")
    assert compared([90.0, 91.0], [97.0, 99.0]) == ("-7.50", "-6.71", "no")
    assert compared([98.0], [97.0]) == ("+1.00", "", "")
    assert compared([98.0, 98.0], [98.0, 98.0]) == ("+0.00", "+0.00", "yes")
    assert compared([98.0, 98.0], [97.0, 97.0]) == ("+1.00", "+inf", "no")


def test_default_result():
    path = RESULTS / "transparency.json"
    result = json.loads(path.read_text("utf-8"))
    exact = [x for x in result["rows"] if x["part"] == "exact"]
    assert exact
    assert all(x["loss_difference"] < 1e-9 for x in exact)
    # Whether a difference of accuracies is noise is up to chance.
    for table in summarise(result).tables[:2]:
        column = [row[-1] for row in table.rows]
        assert table.head[-1].endswith("bit for bit")
        assert "yes" in column
        assert "no" not in column


def test_what_is_no_number_differs():
    nan = float("nan")
    good = Outcome([1.0, 2.0, 0.0], 99.0, [torch.ones(2), torch.zeros(2)], [])
    bad = Outcome([1.0, nan, 0.5], 99.0, [torch.ones(2), torch.tensor([0.0, nan])], [])
    assert good.difference_of_losses(good) == good.difference_of_parameters(good) == 0
    assert isnan(bad.difference_of_losses(good))
    assert isnan(bad.difference_of_parameters(good))
    other = Outcome([1.0, 1.0, 0.5], 99.0, [torch.ones(2) * 3, torch.zeros(2)], [])
    assert other.difference_of_losses(good) == 0.5
    assert other.difference_of_parameters(good) == 2
