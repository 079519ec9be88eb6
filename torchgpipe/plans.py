"""Plans: the candidates that the planner finds for a model, and how to wrap a model as one says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batchnorm import has_batch_norms
from torchgpipe.checks import verify, verify_number
from torchgpipe.devices.streams import Device
from torchgpipe.engine.stages import stages_of
from torchgpipe.gpipe import GPipe
from torchgpipe.partition.split import verify_module
from torchgpipe.planner.auto import too_large
from torchgpipe.planner.given import Memory, chunks_of, input_of, places_of, rows_of
from torchgpipe.planner.layers import Layer
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.proving import PROVEN, proof_of, ranked
from torchgpipe.planner.trial import Proof, Trial, by_device
from torchgpipe.schedule.limits import bounds
from torchgpipe.schedule.simulator import Report, simulate
from torchgpipe.scheduled import ScheduledLoss
from torchgpipe.show.tables import aligned, as_mib, in_bytes
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.values.division import row_count

__all__ = ["Candidate", "Plans", "plan"]


def plan(
    layers: nn.Sequential,
    sample: Any,
    *,
    devices: Iterable[Device] | None = None,
    memory: Memory | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | float = torch.optim.AdamW,
    batch: int | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    chunks: int | Iterable[int] | None = None,
    timeout: float = 1.0,
    progress: bool = False,
    prove: int | None = None,
) -> Plans:
    """Find the balance, chunks, checkpoints and schedule that are fastest, and fit into memory.

    ::

        plans = torchgpipe.plan(layers, input, loss=F.cross_entropy, targets=(target,))
        print(plans)
        training = plans.best.wrap(layers)

    The layers are measured once, with micro-batches of two sizes. Times are simulated, and memory
    is counted: what cells keep between forward and backward, weights, gradients, the optimizer, and
    the workspace of one computation. Where devices have streams, the best candidates train for two
    steps then, and what was measured decides. What leaves for the memory of the host, and policies
    of PyTorch's, are not planned.

    Args:
        layers: the model. It is not changed.
        sample: the arguments of the first layer, with as many rows as a mini-batch, or fewer: a
            tensor, a tuple of arguments, a dict of keyword arguments, or what
            :func:`torchgpipe.arguments` returns.

    Keyword Args:
        devices: the devices, one for each worker, which should be alike; by default all
            accelerators.
        memory: the bytes that each device may use, one number for all, or a table by device, as
            ``{0: "10GiB", 1: "8GiB"}``. What is proven may fill them, and what is not fills 85 %
            by its prediction. By default it is nine tenths of what the device has, where it says
            so, and there is no limit for the CPU.
        optimizer: the optimizer, as a function of parameters, or how many bytes of state it has for
            each byte of a parameter: 0 for SGD, 1 with momentum, 2 for Adam.
        batch: the rows of a mini-batch; by default those of the sample.
        loss: the loss of a micro-batch, as for :class:`~torchgpipe.ScheduledLoss`. Without it only
            the order of :class:`~torchgpipe.GPipe` is planned, whose loss is outside.
        targets: the arguments of the loss after the output, with the rows of the sample.
        chunks: the numbers of micro-batches to try; by default 1, 2, 4 and so on, up to the rows.
        timeout: the seconds to measure. A warm-up comes on top.
        progress: whether to show a progress bar.
        prove: how many candidates that fit to train for two steps on the devices, each with a copy
            of the layers, as long as one that is left may be faster: two by default, if devices
            have streams and the sample has the rows of a mini-batch. What takes more memory than it
            may, or runs out of it, is passed over, and others are trained: three for each in all.
            On virtual accelerators that compute no values, this is a dry run.

    Returns:
        The candidates: for each schedule and number of micro-batches the best one found, and what
        was proven before others.

    Raises:
        TypeError: the layers could not be wrapped, or the sample is of another kind.
        ValueError: no layer takes any time, an argument is out of range, layers share weights
            that no plan keeps on one device, or a proof would lack rows.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    verify_module(layers)
    verify_skippables(layers)
    input, places = input_of(sample), places_of(devices)
    rows, have = rows_of(batch, input), row_count(input)
    # Wrong arguments are told before the layers are measured, which takes a second or more.
    tried = chunks_of(chunks, rows, has_norms=has_batch_norms(layers))
    if prove is None:
        prove = PROVEN if have == rows else 0
    rule = "prove must be how many candidates are trained at most"
    verify_number(prove, rule, "prove", "pass such as 3, or 0 to go by predictions", least=0)
    remedy = f"pass a sample of {rows} rows, or prove=0"
    rule = "candidates are proven with a sample that has the rows of a mini-batch"
    verify(not prove or have == rows, rule, "rows", have, remedy)
    options: Any = {"memory": memory, "optimizer": optimizer, "loss": loss, "targets": targets}
    problem = Problem(layers, input, places, rows, timeout=timeout, progress=progress, **options)

    def wrap(trial: Trial, *copies: Any) -> nn.Module:
        return _candidate(trial, loss).wrap(*copies)

    proven = partial(proof_of, wrap, layers, input, loss, targets)
    candidates = [_candidate(x, loss) for x in ranked(problem, tried, prove, proven)]
    fitting = [x for x in candidates if not x.excess]
    misfits = [x for x in candidates if x.excess]
    return Plans(fitting, misfits, problem.layers, by_device(places, problem.memory))


def _candidate(trial: Trial, loss: Callable[..., Any] | None) -> Candidate:
    schedule, costs = trial.schedule, trial.table.costs
    report = simulate(schedule, costs)
    limit = bounds(schedule.placement, schedule.chunks, costs, skips=schedule.skips)
    memory = by_device(trial.problem.places, trial.memory)
    name, excess, gap = trial.setting.name, round(trial.excess), limit.gap(report)
    settings = [*trial.balance], trial.devices, schedule.chunks, trial.checkpoint, name
    return Candidate(*settings, trial.time, memory, excess, report, gap, loss, trial.proof)


@dataclass(frozen=True)
class Candidate:
    """One way to train a model: how to wrap it, and what that is expected to take; print it.

    Args:
        balance: how many layers each partition takes.
        devices: the device of each partition.
        chunks: the number of micro-batches.
        checkpoint: the checkpoint mode of each partition, or the one of all.
        schedule: the name of the schedule, for :class:`~torchgpipe.ScheduledLoss`; None for the
            order of :class:`~torchgpipe.GPipe`.
        time: milliseconds of a step, without the optimizer and, under ``GPipe``, without the loss.
        memory: the most bytes of each device, as predicted, which may be above the limit where a
            proof (``proof.memory``) has measured less.
        excess: by how many bytes the fullest device has too little; 0 if the plan fits.
        report: the simulation.
        gap: the excess of the time over the bound for this placement, as a share of the bound.
        proof: what a step has taken, if the candidate was trained for one.
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: str | list[str]
    schedule: str | None
    time: float
    memory: dict[torch.device, int]
    excess: int
    report: Report = field(repr=False)
    gap: float
    _loss: Callable[..., Any] | None = field(repr=False)
    proof: Proof | None = None

    @property
    def bubble(self) -> float:
        """The share of the step's time in which devices wait, on average."""
        return float(mean(self.report.bubble) / (self.report.makespan or 1))

    def wrap(
        self,
        layers: nn.Sequential,
        loss: Callable[..., Any] | None = None,
        *,
        deferred_batch_norm: bool = False,
    ) -> nn.Module:
        """Wrap a model as this candidate says.

        Args:
            layers: the layers that were planned, or others like them.
            loss: the loss, if the candidate has a schedule; by default the one of the plan.

        Keyword Args:
            deferred_batch_norm: as for :class:`~torchgpipe.GPipe`.

        Returns:
            A :class:`~torchgpipe.GPipe`, or a :class:`~torchgpipe.ScheduledLoss` around one.
        """
        settings: Any = {"chunks": self.chunks, "checkpoint": self.checkpoint}
        settings |= {"devices": self.devices, "deferred_batch_norm": deferred_batch_norm}
        model = GPipe(layers, self.balance, **settings)
        loss = self._loss if loss is None else loss
        name = self.schedule if loss is not None else None
        if name == self.schedule:
            stages_of(model).predict(self.time, self.memory, model, name)
        return model if name is None or loss is None else ScheduledLoss(model, loss, name)

    def __str__(self) -> str:
        placed = f"balance={self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"
        size = in_bytes(max(self.memory.values()))
        proven = "" if self.proof is None else f", proven: {self.proof.time:.4g} ms"
        return (
            f"{self.schedule or 'gpipe'}, {placed}: {self.time:.4g} ms a step, {size} on the "
            f"fullest device, bubble {self.bubble:.1%}{proven}"
        )

    def _row(self) -> list[str]:
        modes, proof = self.checkpoint, self.proof
        letters = modes if isinstance(modes, str) else " ".join(x[0] for x in modes)
        time, sizes = (f"{proof.time:.4g}", [*proof.memory.values()]) if proof else ("", [])
        most = as_mib(max(sizes)) if sizes else ""
        lacks = f"{in_bytes(self.excess)} too much" if self.excess else ""
        settings = [self.schedule or "gpipe", str(self.chunks), str(self.balance), letters]
        figures = [f"{self.time:.4g}", time, as_mib(max(self.memory.values())), most]
        return [*settings, *figures, f"{self.bubble:.1%}", f"{self.gap:.1%}", lacks]


@dataclass(frozen=True)
class Plans:
    """The candidates of :func:`plan`, the fastest first; print it for a table.

    Args:
        candidates: those that fit.
        misfits: those that do not: what was proven first, and then the nearest to fit.
        layers: what was measured.
        limits: the bytes that each device may use, if there is a limit.
    """

    candidates: list[Candidate]
    misfits: list[Candidate] = field(repr=False)
    layers: list[Layer] = field(repr=False)
    limits: dict[torch.device, int]

    @property
    def best(self) -> Candidate:
        """The fastest candidate.

        Raises:
            ValueError: none fits.
        """
        if not self.candidates:
            near = self.misfits[0]
            raise too_large(near.schedule, near.chunks, near.balance, near.excess)
        return self.candidates[0]

    def __str__(self) -> str:
        titles = ["schedule", "chunks", "balance", "checkpoint", "ms", "proven", "MiB", "proven"]
        titles += ["bubble", "gap", ""]
        shown = [*self.candidates[:10], *self.misfits[:3]]
        rows = [titles, *(x._row() for x in shown)]
        if not any(x.proof for x in shown):
            rows = [row[:5] + row[6:7] + row[8:] for row in rows]
        lines = [aligned(rows, left=range(len(rows[0])))]
        hidden = len(self.candidates) + len(self.misfits) - len(shown)
        if any(isinstance(x.checkpoint, list) for x in shown):
            lines.append("checkpoint of each partition: a always, e except_last, n never")
        if self.limits:
            sizes = dict.fromkeys(map(as_mib, self.limits.values()))
            lines.append(f"a device may use {', '.join(sizes)} MiB")
        return "\n".join([*lines, f"and {hidden} more"] if hidden else lines)
