"""The accelerators of this machine: gradients, repeats, limits, and a dry run beside a step.

A model of equal layers trains on all accelerators under each wrapper. Its gradients are compared
with the plain model's, and bit for bit from step to step, since a race would change them. Virtual
accelerators also report races. The time of a step stands beside its limit: that of a simulation by
the plain model's forward and backward on one accelerator, with free copies. At last a dry run, in a
process without GPUs, predicts a step by the data sheet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import command
from benchmarks.command import at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.machine import ROOT
from benchmarks.report.summary import Summary, Table
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.schedule import Costs, named, simulate
from torchgpipe.testing import dry_run, load, observe
from torchgpipe.testing.hardware import NAMED

__all__ = ["main", "predict", "summarise"]

#: The checkpoint modes of GPipe, and the schedules with their places among n workers.
MODES = ("never", "except_last", "always")
SCHEDULES = ("1f1b", "zero_bubble_h1", "zero_bubble_v")

#: Milliseconds of virtual time; on other devices operators take the time that they take.
VIRTUAL = {"addmm": 1.0, "mm": 1.0}


class Setting(NamedTuple):
    """The size of the model, and of a mini-batch."""

    kind: str
    n: int
    m: int
    width: int
    rows: int

    def devices(self) -> list[torch.device]:
        """The device of each worker; workers share devices where there are fewer."""
        count = torch.accelerator.device_count()
        return [torch.device(self.kind, worker * count // self.n) for worker in range(self.n)]

    def layers(self) -> nn.Sequential:
        """Two equal layers for each worker, for schedules with two stages on a device."""
        torch.manual_seed(0)
        pairs = [(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(2 * self.n)]
        return nn.Sequential(*[nn.Sequential(*pair) for pair in pairs])

    def batch(self, device: torch.device, last: torch.device) -> tuple[Tensor, Tensor]:
        """An input, which needs a gradient, and a target."""
        torch.manual_seed(1)
        x, y = torch.rand(2, self.m * self.rows, self.width)
        return x.to(device).requires_grad_(), y.to(last)


def trained(setting: Setting, name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A wrapped model, and its loss."""
    devices = setting.devices()
    if name == "zero_bubble_v":
        devices = [*devices, *devices[::-1]]
    balance = [2 * setting.n // len(devices)] * len(devices)
    mode = name if name in MODES else "never"
    options: Any = {"devices": devices, "chunks": setting.m, "checkpoint": mode}
    model = GPipe(setting.layers(), balance, **options)
    x, y = setting.batch(devices[0], devices[-1])
    if name in MODES:
        return model, lambda: F.mse_loss(model(x), y)
    training = ScheduledLoss(model, F.mse_loss, name)
    return model, lambda: training(x, y)


def limit(setting: Setting, name: str, forward: float, backward: float) -> float:
    """The time of a step that only waits for what it needs, from those of the plain model's.

    Args:
        setting: the model.
        name: a checkpoint mode of GPipe, or a schedule.
        forward: of a micro-batch through the whole model.
        backward: of the same.
    """
    n, m = setting.n, setting.m
    schedule = named("fill_drain" if name in MODES else name, n, m)
    if again := {"except_last": m - 1, "always": m}.get(name):
        schedule = schedule.recompute(microbatches=range(again))
    parts = len(schedule.placement)
    own, half = forward / parts, backward / parts / 2
    return float(simulate(schedule, Costs(F=own, I=half, W=half, R=own, overlap=max)).makespan)


def timed(setting: Setting, step: Callable[[], object]) -> tuple[float, int]:
    """Milliseconds of some work, and the races in it."""
    if setting.kind == "virtual":
        with observe(costs=VIRTUAL) as seen:
            step()
        return seen.makespan, len(seen.races)
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    step()
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    return 1e3 * (time.perf_counter() - begin), 0


def plain(setting: Setting, steps: int) -> tuple[list[Tensor], float, float]:
    """Gradients of the plain model, and milliseconds of a micro-batch's forward and backward."""
    device = setting.devices()[0]
    layers = setting.layers().to(device)
    x, y = setting.batch(device, device)
    F.mse_loss(layers(x), y).backward()
    grads = [x.grad.cpu() for x in layers.parameters() if x.grad is not None]
    part = x.detach()[: setting.rows].requires_grad_()
    outputs: list[Tensor] = []
    forward, backward = [], []
    for _ in range(steps):
        forward.append(timed(setting, lambda: outputs.append(layers(part)))[0])
        backward.append(timed(setting, lambda: outputs.pop().sum().backward())[0])
    return grads, median(forward), median(backward)


def check(setting: Setting, name: str, steps: int, reference: Any) -> dict[str, Any]:
    """Train some steps under a wrapper; return its figures."""
    grads, forward, backward = reference
    model, loss = trained(setting, name)
    found: list[list[Tensor]] = []
    times, races = [], 0
    for _ in range(steps):
        model.zero_grad()
        taken, seen = timed(setting, lambda: loss().backward())
        times.append(taken)
        races += seen
        found.append([x.grad.cpu() for x in model.parameters() if x.grad is not None])
    differences = [(a - b).abs().max() / b.abs().max() for a, b in zip(found[0], grads)]
    return {
        "name": name,
        "difference": float(max(differences)),
        "same": all(torch.equal(a, b) for each in found[1:] for a, b in zip(each, found[0])),
        "races": races if setting.kind == "virtual" else None,
        # The first step also fills caches.
        "ms": median(times[1:]),
        "limit_ms": limit(setting, name, forward, backward),
        "plain_ms": setting.m * (forward + backward),
    }


def step_of(setting: Setting, devices: Sequence[torch.device]) -> Callable[[], object]:
    """A whole training step, with its optimizer."""
    model = GPipe(setting.layers(), [2] * setting.n, devices=[*devices], chunks=setting.m)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.rand(setting.m * setting.rows, setting.width)

    def step() -> None:
        optimizer.zero_grad()
        model(x.to(devices[0])).mean().backward()
        optimizer.step()

    return step


def beside(setting: Setting, hardware: str) -> dict[str, Any]:
    """A step as it is, and as a dry run predicts it: GiB of each device, and milliseconds."""
    devices = setting.devices()
    step = step_of(setting, devices)
    distinct = [*dict.fromkeys(devices)]
    for _ in range(2):
        step()
    for device in distinct:
        torch.accelerator.reset_peak_memory_stats(device)
    if setting.kind == "virtual":
        with observe(costs=NAMED[hardware]) as seen:
            step()
        taken = seen.makespan
    else:
        taken = timed(setting, step)[0]
    gib = [torch.accelerator.max_memory_allocated(device) / 2**30 for device in distinct]
    program = "from benchmarks.suites.accelerators import predict; predict"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}({hardware!r}, *{tuple(setting)!r})"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {"hardware": hardware, "ms": taken, "gib": gib, **json.loads(done.stdout)}


def predict(hardware: str, *sizes: Any) -> None:
    """Print a prediction as JSON, in a process that has no other accelerators."""
    setting = Setting(*sizes)
    found = dry_run(lambda devices: step_of(setting, devices), setting.n, hardware)
    gib = [size / 2**30 for size in found.allocated]
    print(json.dumps({"predicted_ms": 1e3 * found.time, "predicted_gib": gib}))


def main(argv: Sequence[str]) -> None:
    """Check and publish."""
    options = parser("accelerators", __doc__)
    command.add_device(options, "cuda", "virtual")
    options.add_argument("--n", type=at_least(1), help="partitions (default: as many as devices)")
    options.add_argument("--m", type=at_least(1), default=8, help="micro-batches")
    options.add_argument("--width", type=at_least(1), default=4096, help="of a layer")
    options.add_argument("--rows", type=at_least(1), default=512, help="of a micro-batch")
    options.add_argument("--steps", type=at_least(2), default=20, help="of each wrapper")
    options.add_argument("--hardware", choices=NAMED, default="h100-80gb", help="of the dry run")
    chosen = command.parse(options, argv)
    if chosen.device == "virtual":
        # Before the first backward of the process.
        load(chosen.n or 4)
    n = chosen.n or torch.accelerator.device_count()
    setting = Setting(chosen.device, n, chosen.m, chosen.width, chosen.rows)
    reference = plain(setting, chosen.steps)
    result = head("accelerators", argv, n=n, m=chosen.m)
    rows = [
        check(setting, name, chosen.steps, reference)
        for name in progress([*MODES, *SCHEDULES], "accelerators", "wrapper")
    ]
    result["dry_run"] = beside(setting, chosen.hardware)
    publish(output(chosen, f"accelerators_{chosen.device}"), result, rows, summarise)


def summarise(result: Result) -> Summary:
    """A line for each wrapper, and one for the dry run."""
    lines = [
        [
            *(row["name"], f"{row['difference']:.1e}", "yes" if row["same"] else "NO"),
            *("-" if row["races"] is None else str(row["races"]), f"{row['ms']:.2f}"),
            *(f"{row['ms'] / row['limit_ms']:.3f}", f"{row['plain_ms'] / row['ms']:.2f}"),
        ]
        for row in result["rows"]
    ]
    names = ["wrapper", "gradients off by", "same in each step", "races", "ms"]
    dry = result["dry_run"]
    pairs = [(dry["predicted_ms"], dry["ms"]), (max(dry["predicted_gib"]), max(dry["gib"]))]
    units = ("ms of a step", "GiB of the fullest device")
    return Summary(
        f"Checks of {result['n']} accelerators",
        [
            Table([*names, "over the limit", "speed-up"], lines),
            Table(
                ["dry run", "predicted", "found", "off"],
                [
                    [unit, f"{a:.3g}", f"{b:.3g}", f"{a / b - 1:+.1%}"]
                    for unit, (a, b) in zip(units, pairs)
                ],
                f"A step of GPipe with Adam, by the data sheet of {dry['hardware']}:",
            ),
        ],
        notes="The speed-up is that over the plain model on one device. The limit has free copies "
        "and a host that is never late. Workers that share a device cannot reach it.",
    )
