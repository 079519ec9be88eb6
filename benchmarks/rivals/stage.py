"""A stage of torch.distributed.pipelining, in a process of :mod:`benchmarks.rivals.stages`."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from benchmarks.models.experiments import Model, build, samples
from benchmarks.rivals.carried import carried
from benchmarks.rivals.training import synchronize

__all__ = ["Plan", "work"]

#: Limit of every wait of one process for another.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Plan:
    """Orders for all stages; the first seven are those of :class:`benchmarks.rivals.stages.Stages`.

    Args:
        model: to train.
        size: of a sample.
        batch: samples in a mini-batch.
        balance: number of layers in each stage.
        m: number of micro-batches.
        mode: which micro-batches are checkpointed.
        schedule: class of the schedule.
        devices: device of each stage.
        threads: number of threads of each stage.
        rendezvous: URL of a file through which the stages find each other.
    """

    model: Model
    size: int
    batch: int
    balance: Sequence[int]
    m: int
    mode: str
    schedule: str
    devices: Sequence[str]
    threads: int
    rendezvous: str


def work(pipe: Connection, rank: int, plan: Plan) -> None:
    """Run a stage in its process: answer requests until there are no more."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        worker = Worker(rank, plan)
        answer: Any = sum(x.numel() for x in worker.parameters)
        while True:
            pipe.send((True, answer))
            method, *arguments = pipe.recv()
            answer = getattr(worker, method)(*arguments)
    except (EOFError, OSError):
        pass
    except Exception:
        with suppress(OSError):
            pipe.send((False, traceback.format_exc()))
    # Skip the usual end of Python, in which a process group may wait for others.
    os._exit(0)


def leave_with_parent() -> None:
    """End this process as soon as its parent has ended, even while it waits for something."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Worker:
    """A stage in its process.

    Args:
        rank: number of the stage.
        plan: orders for all stages.
    """

    def __init__(self, rank: int, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        n, device = len(plan.balance), torch.device(plan.devices[rank])
        self.devices = [device]
        on_cpu = device.type == "cpu"
        if on_cpu:
            # All stages are on this machine, even if its name resolves to another address.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        else:
            torch.accelerator.set_device_index(device.index)
        distributed.init_process_group(
            "gloo" if on_cpu else "nccl",
            init_method=plan.rendezvous,
            rank=rank,
            world_size=n,
            timeout=TIMEOUT,
            device_id=None if on_cpu else device,
        )
        torch.manual_seed(0)
        partition = carried(build(plan.model), plan.balance)[rank].to(device)
        self.parameters = list(partition.parameters())
        stage = pipelining.PipelineStage(Stage(partition, plan.mode), rank, n, device)
        self.schedule = getattr(pipelining, plan.schedule)(
            stage, plan.m, loss_fn=lambda output, target: output.square().mean()
        )
        # Only the first stage has inputs, and only the last one a target.
        self.inputs = []
        if rank == 0:
            self.inputs.append(samples(plan.model, plan.size, plan.batch, device))
        self.target = torch.zeros(plan.batch, device=device) if rank == n - 1 else None
        # A stage may have no parameters, which SGD takes only in a group.
        self.optimizer = torch.optim.SGD([{"params": self.parameters}], lr=1e-6)

    def compute(self) -> list[Tensor]:
        """Run forward and backward, and return the losses if this is the last stage."""
        losses: list[Tensor] = []
        self.schedule.step(*self.inputs, target=self.target, losses=losses, return_outputs=False)
        return losses

    def seconds(self, steps: int) -> list[float]:
        """See :class:`benchmarks.rivals.stages.Stages`."""
        found = []
        gc.collect()
        for _ in range(steps):
            self.together()
            start = perf_counter()
            self.compute()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.together()
            found.append(perf_counter() - start)
        return found

    def outcome(self) -> tuple[list[float], list[Any]]:
        """See :class:`benchmarks.rivals.stages.Stages`."""
        losses = [x.item() for x in self.compute()]
        grads = [x.grad.tolist() for x in self.parameters if x.grad is not None]
        self.optimizer.zero_grad()
        return losses, grads

    def together(self) -> None:
        """Wait until all stages have finished their work."""
        synchronize(self.devices)
        distributed.barrier()
        synchronize(self.devices)


class Stage(nn.Module):
    """Computation of a stage; it sends contiguous tensors only, as torch.distributed requires.

    Args:
        partition: the layers.
        mode: which micro-batches are checkpointed.
    """

    def __init__(self, partition: nn.Module, mode: str) -> None:
        super().__init__()
        self.partition = partition
        again = partial(checkpoint, partition, use_reentrant=False)
        self.compute = partition if mode == "never" else again

    def forward(self, *inputs: Tensor) -> Any:
        output = self.compute(*map(arrived, inputs))
        if isinstance(output, tuple):
            return tuple(x.contiguous() for x in output)
        return output.contiguous()


def arrived(input: Tensor) -> Tensor:
    """The input as a tensor whose gradient will be contiguous."""
    if input.requires_grad:
        input = input.view_as(input)
        input.register_hook(Tensor.contiguous)
    return input
