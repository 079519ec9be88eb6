"""Time and memory of whatever cells keep, beside the simulator's, in virtual time.

The model is a transformer of eight blocks in eight micro-batches, on virtual accelerators. A matrix
product takes 1 ms of virtual time, so B takes twice as long as F, and nothing else takes any. C is
the time in which what a cell saves is copied to the host, one way. Peaks are bytes of tensors
beyond weights. The simulator knows cells alone, so gradients and the tensors of one layer come on
top of its peaks; "beside" is that difference on the device where it is largest.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.command import output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from torchgpipe import GPipe, Offload, ScheduledLoss, testing
from torchgpipe.engine.stages import stages_of
from torchgpipe.schedule import Costs, named, simulate
from torchgpipe.testing import observe

M, BLOCKS, ROWS, SEQUENCE, WIDTH = 8, 8, 2, 16, 32
COSTS = {"addmm": 1.0, "mm": 1.0, "bmm": 1.0}
#: Milliseconds of a block: F, B and I.
F, B, I = 6, 12, 8  # noqa: E741  # The field's name for it.
#: Bytes that a block saves, that leave, and that W needs; the first one's input is the caller's.
SAVED, LEAVING, PENDING, INPUT = 86528, 86016, 81920, 4096
PLACES = {"gpipe": [*range(4)], "1f1b": [*range(8)], "zbv": [0, 1, 2, 3, 3, 2, 1, 0]}
RATIOS = (1.0, 1.5, 2.0, 3.0)

PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
POLICIES = {
    "a policy: products of matrices": PRODUCTS,
    "a policy: addmm alone": PRODUCTS[:1],
}
MODES: dict[str, Any] = {
    "never": "never",
    "offload": "offload",
    "Offload(share=0.5)": Offload(share=0.5),
    "always": "always",
}
MODES |= {
    name: partial(create_selective_checkpoint_contexts, ops) for name, ops in POLICIES.items()
}
#: PyTorch's own checkpoint around each block, with the policy of the first.
OWN = "PyTorch's own: products of matrices"


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, own: bool = False, heads: int = 4) -> None:
        super().__init__()
        self.own, self.heads = own, heads
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.own:
            return self.compute(x)
        contexts = MODES[next(iter(POLICIES))]
        found: Tensor = checkpoint(self.compute, x, use_reentrant=False, context_fn=contexts)
        return found

    def compute(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(d / self.heads), -1)
        x = x + self.drop(self.out((self.drop(a) @ v).transpose(1, 2).reshape(b, s, d)))
        found: Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))
        return found


def squares(x: Tensor) -> Tensor:
    """The loss."""
    return x.pow(2).mean()


def measure(name: str, mode: str, ratio: float) -> dict[str, Any]:
    """Time and peaks of a step, where nothing races."""
    places = [torch.device("virtual", k) for k in PLACES[name]]
    torch.manual_seed(0)
    layers = nn.Sequential(*[Block(mode == OWN) for _ in range(BLOCKS)])
    balance = [BLOCKS // len(places)] * len(places)
    model = GPipe(layers, balance, devices=places, chunks=M, checkpoint=MODES.get(mode, "never"))
    training = model if name == "gpipe" else ScheduledLoss(model, squares, name)
    devices = [*dict.fromkeys(places)]
    rate = LEAVING / (F * ratio)
    links: Any = {x: rate for d in devices for x in ((d.index, "cpu"), ("cpu", d.index))}
    x = torch.rand(ROWS * M, SEQUENCE, WIDTH, device=places[0])
    for _ in range(2):
        training.zero_grad()
        gc.collect()
        before = [torch.accelerator.memory_allocated(d) for d in devices]
        for d in devices:
            torch.accelerator.reset_peak_memory_stats(d)
        with observe(costs=COSTS, bandwidth=links) as seen:
            (squares(training(x)) if name == "gpipe" else training(x)).backward()
    assert not seen.races
    peaks = [torch.accelerator.max_memory_allocated(d) - y for d, y in zip(devices, before)]
    hosts = stages_of(model).pool._hosts
    return {
        "time": round(seen.makespan, 6),
        "peaks": peaks,
        "host": [sum(hosts[d].sizes) if d in hosts else 0 for d in devices],
    }


def simulated(name: str, mode: str, ratio: float) -> dict[str, Any]:
    """The same of the simulator, for modes that keep or send all that a cell saves."""
    n, per = len(PLACES[name]), BLOCKS // len(PLACES[name])
    offload = MODES[mode] if isinstance(MODES[mode], Offload) else Offload()
    halves = [0] + [I] * (n - 1) if name == "zbv" else [0] * n
    share = 0.0 if mode == "never" else offload.share
    away = [share * (LEAVING * per - INPUT * (j == 0)) for j in range(n)]
    costs = Costs(
        F=F * per,
        I=halves,
        W=[B * per - half for half in halves],
        activation=SAVED * per,
        pending=[PENDING * per + INPUT * (j == 0) for j in range(n)],
        away=away,
        out=[x / (LEAVING / (F * ratio)) for x in away],
    )
    workers = max(PLACES[name]) + 1
    report = simulate(named("fill_drain" if name == "gpipe" else name, workers, M), costs)
    return {
        "time": round(float(report.makespan), 6),
        "peaks": [*report.peak],
        "host": [*report.host],
    }


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("offload", __doc__)
    options.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="of C to F")
    options.add_argument("--schedules", nargs="+", choices=PLACES, default=[*PLACES])
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    testing.load(8)
    rows: list[dict[str, Any]] = []
    result = head("offload", argv)
    settings = [
        (name, mode, ratio)
        for name in chosen.schedules
        for mode in (*MODES, OWN)
        # Only copies take longer over slower links.
        for ratio in (chosen.ratios if "ffload" in mode else chosen.ratios[:1])
    ]
    for name, mode, ratio in progress(settings, "offload", "setting"):
        row = {"schedule": name, "mode": mode, "ratio": ratio, **measure(name, mode, ratio)}
        if mode == "never" or "ffload" in mode:
            row["simulated"] = simulated(name, mode, ratio)
        rows.append(row)
    publish(output(chosen, "offload"), result, rows, summarise)


def summarise(result: Result) -> Summary:
    """A table for each schedule."""
    rows = result["rows"]
    ratios = sorted({row["ratio"] for row in rows})
    tables = []
    for name in dict.fromkeys(row["schedule"] for row in rows):
        own = [row for row in rows if row["schedule"] == name]
        never = next(row["time"] for row in own if row["mode"] == "never")
        lines = []
        for mode in dict.fromkeys(row["mode"] for row in own):
            some = {row["ratio"]: row for row in own if row["mode"] == mode}
            first = next(iter(some.values()))
            times = [_times(some.get(ratio, first), never) for ratio in ratios]
            lines.append([mode, *times, *_memory(first)])
        columns = [f"time at C = {ratio:g} F" for ratio in ratios]
        memory = ["peak KiB", "cells, simulated", "beside", "host KiB"]
        count = max(PLACES[name]) + 1
        tables.append(Table(["mode", *columns, *memory], lines, f"{name} on {count} devices"))
    return Summary(
        "What a cell keeps: kept, computed again, or in the memory of the host, in virtual time",
        tables,
        "Times are over that of `never`; one after a stroke is the simulator's, where it differs. "
        "Peaks are those of the fullest device, beyond weights. The simulator knows cells alone: "
        "gradients and tensors of one layer are beside. The host's memory is that of all devices, "
        "measured, and the same as simulated unless a stroke says so.",
    )


def _times(row: dict[str, Any], never: float) -> str:
    found = f"{row['time'] / never:.3f}"
    other = f"{row['simulated']['time'] / never:.3f}" if "simulated" in row else found
    return found if found == other else f"{found} / {other}"


def _memory(row: dict[str, Any]) -> list[str]:
    peak, host = f"{max(row['peaks']) / 1024:.0f}", f"{sum(row['host']) / 1024:.0f}"
    if "simulated" not in row:
        return [peak, "", "", ""]
    told = row["simulated"]
    beside = max(x - y for x, y in zip(row["peaks"], told["peaks"]))
    other = f"{sum(told['host']) / 1024:.0f}"
    host = host if host == other else f"{host} / {other}"
    return [peak, f"{max(told['peaks']) / 1024:.0f}", f"{beside / 1024:.0f}", host]
