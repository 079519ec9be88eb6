"""The accelerators of this machine: gradients, repeats, limits, and a dry run beside a step.

A model of equal layers trains on all accelerators under each wrapper. Its gradients are compared
with the plain model's, and bit for bit from step to step, since a race would change them. Virtual
accelerators also report races. The time of a step stands beside its limit: that of a simulation by
the plain model's forward and backward on one accelerator, with free copies. At last whole training
steps, of models at full size where there are GPUs, stand beside what a dry run in a process without
GPUs predicts for them by the data sheet.
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
from benchmarks.models.experiments import RESNET, Model, build, samples, unet
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.machine import ROOT
from benchmarks.report.summary import Summary, Table
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.schedule import Costs, named, simulate
from torchgpipe.testing import dry_run, load, observe
from torchgpipe.testing.hardware import hardware_of

__all__ = ["main", "predict", "summarise"]

#: The checkpoint modes of GPipe, and the schedules with their places among n workers.
MODES = ("never", "except_last", "always")
SCHEDULES = ("1f1b", "zero_bubble_h1", "zero_bubble_v")
WRAPPERS = [*MODES, *SCHEDULES]

#: The name of the step of equal layers.
EQUAL = "equal layers"

#: Models whose steps run beside dry runs, the size of a sample, samples in a mini-batch and the
#: checkpoint mode. Those with tokens compute in bfloat16.
GPT: Model = {"name": "gpt", "width": 1024, "layers": 24, "heads": 16}
TRAINED: dict[str, tuple[Model, int, int, str]] = {
    "GPT, never": (GPT, 1024, 32, "never"),
    "GPT, always": (GPT, 1024, 32, "always"),
    "GPT, offload": (GPT, 1024, 32, "offload"),
    "U-Net (5, 64), except_last": (unet(5, 64), 192, 160, "except_last"),
    "ResNet-101, except_last": (RESNET, 224, 256, "except_last"),
}

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
    grads = gradients(layers)
    part = x.detach()[: setting.rows].requires_grad_()
    outputs: list[Tensor] = []
    forward, backward = [], []
    for _ in range(steps):
        forward.append(timed(setting, lambda: outputs.append(layers(part)))[0])
        backward.append(timed(setting, lambda: outputs.pop().sum().backward())[0])
    return grads, median(forward), median(backward)


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of the gradients, each where it is: a host would take long to compare large ones."""
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def check(setting: Setting, name: str, steps: int, reference: Any) -> dict[str, Any]:
    """Train some steps under a wrapper; return its figures."""
    grads, forward, backward = reference
    model, loss = trained(setting, name)
    first: list[Tensor] = []
    times, races, same = [], 0, True
    for _ in range(steps):
        model.zero_grad()
        taken, seen = timed(setting, lambda: loss().backward())
        times.append(taken)
        races += seen
        found = gradients(model)
        first = first or found
        same = same and all(map(torch.equal, found, first))
    pairs = zip(first, grads)
    differences = [float((a - b.to(a.device)).abs().max() / a.abs().max()) for a, b in pairs]
    return {
        "name": name,
        "difference": max(differences),
        "same": same,
        "races": races if setting.kind == "virtual" else None,
        # The first step also fills caches.
        "ms": median(times[1:]),
        "limit_ms": limit(setting, name, forward, backward),
        "plain_ms": setting.m * (forward + backward),
    }


def step_of(setting: Setting, name: str, devices: Sequence[torch.device]) -> Callable[[], object]:
    """A whole training step of equal layers, or of a model by its name, with its optimizer."""
    if name in TRAINED:
        layout, size, batch, mode = TRAINED[name]
        layers, x = build(layout), samples(layout, size, batch, "cpu")
        half = layout["name"] == "gpt"
        balance = [len(part) for part in torch.arange(len(layers)).tensor_split(len(devices))]
    else:
        layers, mode, half = setting.layers(), "except_last", False
        x = torch.rand(setting.m * setting.rows, setting.width)
        balance = [2] * setting.n
    model = GPipe(layers, balance, devices=[*devices], chunks=setting.m, checkpoint=mode)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(setting.kind, torch.bfloat16, enabled=half):
            loss = model(x.to(devices[0])).float().mean()
        loss.backward()
        optimizer.step()

    return step


def beside(setting: Setting, name: str, hardware: str) -> dict[str, Any]:
    """A step as it is, and as a dry run predicts it: GiB of each device, and milliseconds."""
    devices = setting.devices()
    try:
        step = step_of(setting, name, devices)
        for _ in range(2):
            step()
    except torch.OutOfMemoryError:
        return {"step": name, "ms": None, "gib": None}
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    if setting.kind == "virtual":
        with observe(costs=hardware_of(hardware)) as seen:
            step()
        taken = seen.makespan
    else:
        taken = median(timed(setting, step)[0] for _ in range(3))
    gib = [torch.accelerator.max_memory_allocated(device) / 2**30 for device in devices]
    program = "from benchmarks.suites.accelerators import predict; "
    program += f"predict({hardware!r}, {name!r}, *{tuple(setting)!r})"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    row = {"step": name, "ms": taken, "gib": gib}
    if done.returncode:
        told = done.stderr.strip().splitlines() or ["it said nothing"]
        # An error is in the last line, and a fault of the process in the first.
        line = told[-1] if done.returncode > 0 else told[0]
        return row | {"failed": f"status {done.returncode}: {line}"}
    predicted: dict[str, Any] = json.loads(done.stdout)
    return row | predicted


def predict(hardware: str, name: str, *sizes: Any) -> None:
    """Print a prediction as JSON, in a process that has no other accelerators."""
    setting = Setting(*sizes)
    found = dry_run(
        lambda devices: step_of(setting._replace(kind="virtual"), name, devices),
        setting.n,
        hardware,
    )
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
    options.add_argument(
        "--wrappers", nargs="*", choices=WRAPPERS, default=WRAPPERS, help="modes and schedules"
    )
    options.add_argument(
        "--trained", nargs="*", choices=[EQUAL, *TRAINED], help="steps (default: all, with a GPU)"
    )
    options.add_argument(
        "--hardware", default="h100-80gb", help="of the dry run: a name, or a measured file"
    )
    chosen = command.parse(options, argv)
    if chosen.device == "virtual":
        # Before the first backward of the process.
        load(chosen.n or 4)
    n = chosen.n or torch.accelerator.device_count()
    setting = Setting(chosen.device, n, chosen.m, chosen.width, chosen.rows)
    reference = plain(setting, chosen.steps) if chosen.wrappers else None
    result = head("accelerators", argv, n=n, m=chosen.m)
    rows = [
        check(setting, name, chosen.steps, reference)
        for name in progress(chosen.wrappers, "accelerators", "wrapper")
    ]
    del reference  # Its gradients take a device's memory.
    # A dry run knows no devices that partitions share.
    setting = setting._replace(n=min(n, torch.accelerator.device_count()))
    names = chosen.trained
    if names is None:
        names = [EQUAL, *(TRAINED if chosen.device == "cuda" else ())]
    result["hardware"] = chosen.hardware
    result["dry_runs"] = [
        beside(setting, name, chosen.hardware) for name in progress(names, "accelerators", "step")
    ]
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
    return Summary(
        f"Checks of {result['n']} accelerators",
        [
            *([Table([*names, "over the limit", "speed-up"], lines)] if lines else ()),
            Table(
                ["step", "ms", "predicted", "off", "GiB", "predicted", "off"],
                [[row["step"], *pair(row, "ms"), *pair(row, "gib")] for row in result["dry_runs"]],
                "A step of GPipe with Adam and the fullest device, beside a dry run by the data "
                f"sheet of {result['hardware']}:",
            ),
        ],
        notes="The speed-up is that over the plain model on one device. The limit has free copies "
        "and a host that is never late. Workers that share a device cannot reach it.",
    )


def pair(row: dict[str, Any], key: str) -> list[str | None]:
    """A figure as it was measured and as a dry run predicted it, and by how much that is off."""
    if row[key] is None:
        return ["out of memory", None, None]
    found = max(row[key]) if key == "gib" else row[key]
    if "failed" in row:
        return [f"{found:.4g}", row["failed"], None]
    said = max(row["predicted_gib"]) if key == "gib" else row["predicted_ms"]
    return [f"{found:.4g}", f"{said:.4g}", f"{said / found - 1:+.1%}"]
