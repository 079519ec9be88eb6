"""Scripts that are run dry without a change."""

import sys

import pytest

from torchgpipe.testing.dry_run.__main__ import main

SCRIPT = """
import sys

import torch
from torch import nn
from torchgpipe import GPipe

chunks, steps = map(int, sys.argv[1:])
layers = nn.Sequential(*[nn.Linear(2**14, 2**14) for _ in range(4)])
devices = [torch.device(torch.accelerator.current_accelerator().type, i) for i in range(2)]
model = GPipe(layers, balance=[2, 2], devices=devices, chunks=chunks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    optimizer.zero_grad()
    loss = model(torch.rand(64, 2**14).to(model.devices[0])).mean()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, "utf-8")
    return str(path)


def test_a_script(script, devices, capsys):
    before = sys.argv
    main(["--devices", "2", "--device", "p40-24gb", "--value-read", "0", script, "8", "100"])
    printed = capsys.readouterr().out
    assert printed.startswith("loss 0.0\nloss 0.0\npredicted for 2 x p40-24gb, not measured")
    assert "1F7" not in printed
    assert "step of" in printed
    assert sys.argv is before


def test_a_script_that_measures_its_layers_before(tmp_path, devices, capsys):
    """The layers run first within whatever the profiler sets in PyTorch's dispatcher."""
    path = tmp_path / "script.py"
    measured = SCRIPT.replace("balance=[2, 2]", "balance=balance").replace(
        "model = GPipe",
        "from torchgpipe.balance import balance_by_time\n"
        "balance = balance_by_time(2, layers, torch.rand(1, 64), timeout=0.1)\n"
        "model = GPipe",
    )
    measured = measured.replace("2**14", "64")
    path.write_text(measured, "utf-8")
    main(["--devices", "2", "--device", "p40-24gb", "--value-read", "0", str(path), "8", "100"])
    assert "predicted for 2 x p40-24gb" in capsys.readouterr().out


def test_a_script_that_reads_values(script, devices):
    with pytest.raises(RuntimeError, match=r"no values.*operator: item, layer: none that is known"):
        main(["--devices", "2", script, "8", "100"])


OF_GRAPHS = """
import torch
from torch import nn
from torchgpipe import GPipe, ScheduledLoss

devices = [torch.device(torch.accelerator.current_accelerator().type, i) for i in range(2)]
model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=devices, chunks=2)
training = ScheduledLoss(model, nn.functional.mse_loss, "zbh1", stages="graph")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = torch.rand(4, 4, device=devices[0]), torch.rand(4, 4, device=devices[1])
for step in range(3):
    # costs
    optimizer.zero_grad()
    training(*values).backward()
    optimizer.step()
"""


@pytest.mark.filterwarnings("error:a stage must be traceable")
def test_a_script_whose_stages_are_graphs(tmp_path, devices):
    path = tmp_path / "script.py"
    path.write_text(OF_GRAPHS.replace("# costs", "step and training.costs(*values)"), "utf-8")
    main(["--devices", "2", str(path)])


def test_a_script_that_observes(tmp_path, devices):
    path = tmp_path / "script.py"
    path.write_text("from torchgpipe.testing import observe\nwith observe(): pass", "utf-8")
    with pytest.raises(RuntimeError, match="a dry run is one, so leave observe.* out"):
        main(["--devices", "2", str(path)])


def test_a_script_that_is_too_short(script, devices):
    with pytest.raises(
        RuntimeError, match=r"third step of an optimizer \(steps: 2, script: .*train"
    ):
        main(["--devices", "2", "--value-read", "0", script, "8", "2"])
