"""The causes of waits in docs/see.rst take the time that the page says, and show as it says."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchgpipe import GPipe, ScheduledLoss, trace
from torchgpipe.testing import observe

PAGE = Path(__file__).parents[2] / "docs/see.rst"
#: The rows of the table by their causes: milliseconds, bubble, host-bound and advice.
ROWS = {
    name: cells
    for name, *cells in re.findall(
        r"^(\S.+?)  +(\d+)  +(\S+ to \S+ %)  +(.+? %)  +(\S.*)$", PAGE.read_text("utf-8"), re.M
    )
}


@pytest.fixture(autouse=True)
def issuing():
    """Decide as users' programs do who issues the cells."""


class Waiting(nn.Linear):
    """Linear layer that asks for a value."""

    def forward(self, input):
        output = super().forward(input)
        return output / 2 if output.mean().item() > 1e9 else output


class Reading(nn.Linear):
    """Linear layer with a table on another device, which no wrapper knows."""

    def forward(self, input):
        return super().forward(input + self.table[0].to(input.device))


def layers(layer=nn.Linear, count=8):
    return [layer(16, 16) for _ in range(count)]


def reading(device):
    layer = Reading(16, 16)
    layer.table = [torch.zeros(1, 16, device=device)]
    return [*layers(count=6), layer, *layers(count=1)]


def measured(devices, module, balance=(2, 2, 2, 2), chunks=8, host=0, schedule=None):
    """The milliseconds of a third step, and its timeline."""
    model = GPipe(
        nn.Sequential(*module), balance, devices=devices[:4], chunks=chunks, checkpoint="never"
    )
    training = schedule and ScheduledLoss(model, F.mse_loss, schedule=schedule)
    input = torch.rand(64, 16, device=devices[0])
    target = torch.rand(64, 16, device=devices[3])
    for _ in range(3):
        with observe(costs={"mm": 1.0, "addmm": 1.0}, host=host), trace(model) as timeline:
            loss = training(input, target) if training else F.mse_loss(model(input), target)
            loss.backward()
    return timeline


CASES = {
    "none": lambda devices: measured(devices, layers()),
    "balance ``[3, 1, 2, 2]``": lambda devices: measured(devices, layers(), [3, 1, 2, 2]),
    "``chunks=2``, a mini-batch of a quarter": lambda x: measured(x, layers(), chunks=2),
    "the host takes 0.1 ms for each operator": lambda x: measured(x, layers(), host=0.1),
    "``.item()`` in every layer": lambda devices: measured(devices, layers(Waiting)),
    "a table on device 2, used on device 3 (1F1B)": lambda devices: measured(
        devices, reading(devices[2]), schedule="1f1b"
    ),
}


def span(values):
    low, high = (f"{100 * x:.0f}" for x in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def test_all_causes_are_measured():
    assert ROWS.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_cause(devices, name):
    timeline = CASES[name](devices)
    time, bubble, host, advice = ROWS[name]
    assert f"{timeline.step().makespan:.0f}" == time
    assert span([x.bubble for x in timeline.shares]) == bubble
    assert span([x.host for x in timeline.shares]) == host
    assert advice in str(timeline.advice)


def test_where_a_table_costs_little(devices):
    """The other figures of the paragraph on stray copies."""
    text = " ".join(PAGE.read_text("utf-8").split())
    times = [
        measured(devices, reading(devices[3]), schedule="1f1b").step().makespan,
        measured(devices, reading(devices[2])).step().makespan,
    ]
    assert times == [65, 67]
    assert "and 65 with the table on its own device" in text
    assert "whose devices go in step, it takes 67" in text
