"""torch.distributed.pipelining as a rival: the rival's process starts a process for each stage.

The stages are the partitions of :func:`benchmarks.rivals.carried.carried`, since
torch.distributed.pipelining knows no skips: the stages between hand them on. The processes share
the rival's threads. They talk through gloo on the CPU, and through NCCL on CUDA, where each process
has a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.models.experiments import Model
from benchmarks.rivals import stage
from benchmarks.rivals.library import Library

__all__ = ["Stages"]


class Stages:
    """A model in training, with each stage in a process of its own.

    ``torch.distributed.pipelining`` makes no checkpoints. In any other mode than ``"never"``, each
    stage checkpoints all micro-batches, because it cannot tell which one is the last.

    Args:
        library: provides the devices.
        model: to train.
        size: of a sample.
        batch: samples in a mini-batch, a multiple of ``m``.
        balance: number of layers in each stage.
        m: number of micro-batches.
        mode: which micro-batches are checkpointed.
        schedule: a class of :mod:`torch.distributed.pipelining`.

    Raises:
        ValueError: the schedule cannot run this setting, or there are fewer GPUs than stages.
        RuntimeError: a process failed.
    """

    def __init__(
        self,
        library: Library,
        model: Model,
        size: int,
        batch: int,
        balance: list[int],
        m: int,
        mode: str,
        schedule: str = "ScheduleGPipe",
    ) -> None:
        n = len(balance)
        devices = [str(x) for x in library.devices[:n]]
        verify(n, m, batch, devices, schedule)
        folder = TemporaryDirectory()
        threads = max(1, torch.get_num_threads() // n)
        plan = stage.Plan(
            *(model, size, batch, balance, m, mode, schedule),
            *(devices, threads, f"file://{folder.name}/rendezvous"),
        )
        # The forkserver imports this module once, and forks processes that have it already.
        context = get_context("forkserver")
        context.set_forkserver_preload([stage.__name__])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self._finalizer = weakref.finalize(self, end, self.pipes, self.processes, folder)
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=stage.work, args=(theirs, rank, plan), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._counts = self._answers()

    def seconds(self, steps: int) -> list[float]:
        """Seconds of each step, from the common start until all stages have finished."""
        found: list[float] = self._ask("seconds", steps)[0]
        return found

    def parameters(self) -> int:
        """Number of parameters."""
        return sum(self._counts)

    def outcome(self) -> tuple[list[float], list[Any]]:
        """Losses of a step, and the gradients that it leaves in all stages, as lists."""
        found = self._ask("outcome")
        return found[-1][0], [grad for _, grads in found for grad in grads]

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def _ask(self, *request: Any) -> list[Any]:
        for pipe in self.pipes:
            with suppress(OSError):  # The missing answer reports that.
                pipe.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        """Collect an answer of each stage; if one fails, end all, since others may wait for it."""
        found: dict[int, Any] = {}
        try:
            while len(found) < len(self.pipes):
                ready = wait([x for k, x in enumerate(self.pipes) if k not in found])
                for rank, pipe in enumerate(self.pipes):
                    if pipe in ready:
                        done, found[rank] = receive(pipe)
                        if not done:
                            raise RuntimeError(f"stage {rank} failed: {found[rank]}")
        except BaseException:
            self.close()
            raise
        return [found[rank] for rank in range(len(self.pipes))]


def verify(n: int, m: int, batch: int, devices: Sequence[str], schedule: str) -> None:
    """Check that a schedule can run a setting.

    Raises:
        ValueError: the schedule cannot.
    """
    if batch % m:
        raise ValueError(f"micro-batches must have the same size (batch: {batch}, m: {m})")
    if schedule == "Schedule1F1B" and m < n:
        raise ValueError(f"1F1B needs as many micro-batches as stages (m: {m}, n: {n})")
    if devices[0] != "cpu" and len({*devices}) < n:
        raise ValueError(f"each stage needs a GPU (stages: {n}, GPUs: {len({*devices})})")


def receive(pipe: Connection) -> tuple[bool, Any]:
    """Receive whether a stage fulfilled its request, and its answer."""
    try:
        found: tuple[bool, Any] = pipe.recv()
    except (EOFError, OSError):
        return False, "its process ended"
    return found


def end(pipes: list[Connection], processes: list[Any], folder: TemporaryDirectory[str]) -> None:
    """End processes; idle ones leave by themselves."""
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(1)
        process.kill()
        process.join()
        process.close()
    folder.cleanup()
