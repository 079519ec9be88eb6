"""Throughput over processes, beside PyTorch's own classes and one process.

Two processes train an MLP, whose micro-batches have equal sizes, on the CPU. The steps of all ways
alternate, in all orders: ours (``torchgpipe.distributed.Pipe``), those of PyTorch's schedule
classes over its own ``PipelineStage``, and, while the other process waits, ``ScheduledLoss`` in one
process with a thread for each stage::

    python -m benchmarks across

The loss is computed in each way, and so are the gradients. No optimizer steps. A process has one
thread of operators. Figures are milliseconds of a step: least (median).
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Sequence
from itertools import cycle, permutations, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

from benchmarks.command import at_least, output, parse, parser
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.distributed import Pipe

#: The number of processes.
SIZE = 2

#: Our name of a schedule, PyTorch's class, and the number of stages.
SCHEDULES = {
    "fill_drain": ("ScheduleGPipe", SIZE),
    "1f1b": ("Schedule1F1B", SIZE),
    "zbv": ("ScheduleZBVZeroBubble", 2 * SIZE),
}

WAYS = ("Pipe", "PyTorch", "one process")

Step = Callable[[], Any]


def layers(stages: int, width: int) -> list[nn.Module]:
    """Make the stages: eight linear layers in all."""
    torch.manual_seed(0)
    each = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    share = len(each) // stages
    return [nn.Sequential(*each[k * share : (k + 1) * share]) for k in range(stages)]


def steps(name: str, m: int, rows: int, width: int) -> dict[str, Step]:
    """Make a step of each way in this process.

    Args:
        name: the schedule.
        m: the number of micro-batches.
        rows: of each of them.
        width: of the layers.
    """
    kind, stages = SCHEDULES[name]
    rank = dist.get_rank()
    made = layers(stages, width)
    x, y = torch.randn(2, m * rows, width)
    pipe = Pipe(
        nn.Sequential(*copy.deepcopy(made)),
        [1] * stages,
        loss=F.mse_loss,
        schedule=name,
        chunks=m,
        checkpoint="never",
    )
    own = [
        PipelineStage(copy.deepcopy(made[j]), j, stages, torch.device("cpu")) for j in pipe.stages
    ]
    schedule: Any = getattr(theirs, kind)
    runtime = schedule(own if stages > SIZE else own[0], m, loss_fn=F.mse_loss)

    def theirs_step() -> None:
        for stage in own:
            stage.submod.zero_grad()
        runtime.step(*([x] if pipe.is_first else []), target=y if pipe.is_last else None)

    def ours_step() -> None:
        pipe.zero_grad()
        pipe.step(x, y)

    model = GPipe(
        nn.Sequential(*made), [1] * stages, devices=["cpu"] * stages, chunks=m, checkpoint="never"
    )
    training = ScheduledLoss(model, F.mse_loss, name)

    def one_step() -> None:
        if rank == 0:
            model.zero_grad()
            training(x, y).backward()
        dist.barrier()

    found = dict(zip(WAYS, (ours_step, theirs_step, one_step)))
    for step in found.values():
        step()
    check(pipe, [stage.submod for stage in own], model)
    return found


def check(pipe: Pipe, stages: Sequence[nn.Module], model: GPipe) -> None:
    """Check that all ways have the same gradients.

    Raises:
        RuntimeError: they have not.
    """
    grads = [[x.grad for x in found.parameters()] for found in (pipe, nn.ModuleList(stages))]
    if dist.get_rank() == 0:
        plain = {key: x.grad for key, x in model.module.named_parameters()}
        grads.append([plain[key] for key, _ in pipe.named_parameters()])
    for other in grads[1:]:
        for one, two in zip(grads[0], other):
            if one is None or two is None or not torch.allclose(one, two, atol=1e-6):
                raise RuntimeError("the ways compute different gradients")


def work(rank: int, folder: str, options: dict[str, Any]) -> None:
    """Measure in one process; the first one writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE
    )
    rows = []
    for name in options["schedules"]:
        for size, m in product(options["sizes"], options["m"]):
            made = steps(name, m, *map(int, size.split("x")))
            times: dict[str, list[float]] = {way: [] for way in made}
            # After "one process", in which a process is idle, a step takes longer, whose it is.
            orders = cycle(permutations(made.items()))
            for _ in range(options["repeat"]):
                for way, step in next(orders):
                    dist.barrier()
                    start = perf_counter()
                    step()
                    # A step ends when the last process is done.
                    dist.barrier()
                    times[way].append(1000 * (perf_counter() - start))
            found = {way: {"min": min(x), "median": median(x)} for way, x in times.items()}
            rows.append({"schedule": name, "size": size, "m": m, "ms": found})
    if rank == 0:
        Path(folder, "rows").write_bytes(pickle.dumps(rows))
    dist.destroy_process_group()


def summarise(result: Result) -> Summary:
    """A line for each schedule."""
    lines = []
    for row in result["rows"]:
        ms = row["ms"]
        ratios = [ms["PyTorch"][key] / ms["Pipe"][key] for key in ("min", "median")]
        lines.append(
            [
                *(row["schedule"], row["size"], row["m"]),
                *[f"{ms[way]['min']:.1f} ({ms[way]['median']:.1f})" for way in WAYS],
                f"{ratios[0]:.2f} ({ratios[1]:.2f})",
            ]
        )
    title = f"A step over {SIZE} processes on the CPU"
    return Summary(
        title,
        [Table(["schedule", "rows x width", "m", *WAYS, "throughput, Pipe / PyTorch"], lines)],
        "Milliseconds of a step: least (median). Micro-batches of equal sizes, one thread of "
        "operators in each process. The steps of all ways alternate.",
    )


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser("across", __doc__)
    reads.add_argument("--schedules", nargs="+", choices=[*SCHEDULES], default=[*SCHEDULES])
    reads.add_argument("--m", type=at_least(1), nargs="+", default=[8], help="micro-batches")
    reads.add_argument(
        "--sizes",
        nargs="+",
        default=["64x512", "512x512", "2048x256"],
        help="rows of a micro-batch, and width of a layer",
    )
    reads.add_argument("--repeat", type=at_least(1), default=12, help="steps of each way")
    options = parse(reads, argv)
    result = head("across", argv, processes=SIZE)
    wanted = {name: vars(options)[name] for name in ("schedules", "m", "sizes", "repeat")}
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (folder, wanted), nprocs=SIZE, start_method="spawn")
        rows = pickle.loads(Path(folder, "rows").read_bytes())
    publish(output(options, "across"), result, rows, summarise)
