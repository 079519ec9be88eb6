"""Makespan over the schedule's limit, with partitions that share one device.

There are four partitions and eight micro-batches. Each partition has a compute stream of its own,
so small kernels of different partitions overlap as they would on four GPUs. Stages are of two
kinds: some sleep on the GPU for a known time; others are small matrix products, whose times are
measured one by one. The ideal makespans are:

    never         (m + n - 1) (F + B)
    except_last   (m + n - 1) F + m B + (m - 1) R + (n - 1) B
    always        (m + n - 1) F + m (R + B) + (n - 1) B

To check the benchmark itself, ``--device virtual`` runs stages of known time on a virtual
accelerator, where every ratio is 1.
"""

from __future__ import annotations

import os

# Streams that share a hardware queue wait for each other; 32 is the largest number of queues.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import add_device, at_least, output, parse, parser
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.critical import MODES, step_path
from torchgpipe import GPipe, testing

N, M = 4, 8

Row = dict[str, Any]


class SleepFunction(torch.autograd.Function):
    """``input, weight, cycles → output``; backward takes twice as long as forward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        # The input is a tanh, so a checkpoint has something to recompute.
        ctx.save_for_backward(input)
        torch.cuda._sleep(cycles)
        return input * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        torch.cuda._sleep(2 * ctx.cycles)
        return grad * 1, grad.sum(0), None


class Sleep(nn.Module):
    """A stage that keeps its stream waiting."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles = cycles
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = SleepFunction.apply(input.tanh(), self.weight, self.cycles)
        return output


def elapsed(function: Callable[[], Any]) -> float:
    """Milliseconds of device time, by events on the current stream."""
    device = torch.accelerator.current_accelerator()
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def median(function: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds of a function, after a warm-up."""
    for _ in range(3):
        function()
    return statistics.median(elapsed(function) for _ in range(repeat))


def costs(stage: nn.Module, input: Tensor, repeat: int) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward of one micro-batch.

    Ten run in a row, since the host would need longer to launch a single one than it takes.
    """
    outputs = [stage(input) for _ in range(10)]
    grad = torch.ones_like(outputs[0])
    forward = median(lambda: [stage(input) for _ in range(10)], repeat) / 10

    def backward() -> None:
        for result in outputs:
            result.backward(grad, retain_graph=True)

    return forward, median(backward, repeat) / 10


def measure(name: str, make: Callable[[], nn.Module], input: Tensor, repeat: int) -> list[Row]:
    """Measure a row for each checkpoint mode."""
    forward, backward = costs(make(), input[: len(input) // M].requires_grad_(), repeat)
    rows = []
    for mode in MODES:
        layers = nn.Sequential(*[make() for _ in range(N)])
        model = GPipe(layers, [1] * N, devices=[input.device] * N, chunks=M, checkpoint=mode)
        x = input.detach().requires_grad_()

        def step(model: GPipe = model, x: Tensor = x) -> None:
            output = model(x)
            output.backward(torch.ones_like(output))

        found = median(step, repeat)
        best = step_path(mode, M, [forward] * N, [forward] * N, [backward] * N)
        rows.append(
            {
                "stages": name,
                "mode": mode,
                "forward_ms": forward,
                "backward_ms": backward,
                "makespan_ms": found,
                "ideal_ms": best,
                "ratio": found / best,
                "without_overlap": (N * M * (forward + backward)) / best,
            }
        )
    return rows


def on_gpu(milliseconds: float, repeat: int) -> list[Row]:
    """Measure sleeping stages, and matrix products that keep few multiprocessors busy."""
    device = torch.device("cuda", 0)
    probe = 10_000_000
    cycles = int(milliseconds / median(lambda: torch.cuda._sleep(probe), 5) * probe)
    x = torch.ones(M, 4, device=device)
    rows = measure("sleep", lambda: Sleep(cycles).to(device), x, repeat)
    x = torch.randn(M * 64, 256, device=device)
    return rows + measure(
        "small matrix products",
        lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(32)]).to(device),
        x,
        repeat,
    )


def busy(time: float) -> nn.Module:
    """A stage that takes virtual time; a checkpoint recomputes it, since it saves its tanh."""
    return nn.Sequential(nn.Tanh(), testing.Busy(time, time, time))


def on_virtual(milliseconds: float, repeat: int) -> list[Row]:
    """Measure stages of known time, in virtual time."""
    device = testing.load()[0]
    x = torch.ones(M, 4, device=device)
    time = milliseconds
    return measure("busy", lambda: busy(time).to(device), x, repeat)


def summarise(result: Result) -> Summary:
    """A line for each kind of stage and each mode."""
    times = ("forward_ms", "backward_ms", "makespan_ms", "ideal_ms", "ratio", "without_overlap")
    rows = [
        [row["stages"], row["mode"], *[f"{row[key]:.3f}" for key in times]]
        for row in result["rows"]
    ]
    columns = ["stages", "mode", "F", "B", "makespan", "ideal", "ratio", "no overlap"]
    where = "**virtual** milliseconds" if result["device"] == "virtual" else "milliseconds"
    notes = (
        f"n={result['partitions']}, m={result['micro_batches']}, times in {where}; `no overlap` is "
        "the time of one partition after the other, over the ideal."
    )
    return Summary("Partitions that share one device", [Table(columns, rows)], notes)


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    options = parser("one_gpu", __doc__)
    options.add_argument("--milliseconds", type=float, default=4.0, help="of a sleeping forward")
    options.add_argument("--repeat", type=at_least(1), default=11, help="number of measurements")
    add_device(options, "cuda", "virtual")
    chosen = parse(options, argv)
    torch.set_num_threads(1)
    result = head("one_gpu", argv, partitions=N, micro_batches=M, device=chosen.device)
    result["connections"] = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    measured = on_virtual if chosen.device == "virtual" else on_gpu
    rows = measured(chosen.milliseconds, chosen.repeat)
    publish(output(chosen, f"one_gpu_{chosen.device}"), result, rows, summarise)
