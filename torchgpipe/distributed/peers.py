"""Peers: the processes of a pipeline, what they tell each other, and which stages each has."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe._torch.attributes import is_alone
from torchgpipe.checks import verify, verify_kind
from torchgpipe.devices.streams import CPU
from torchgpipe.skip.tracker import SkipLayout
from torchgpipe.values.microbatch import VALUE

__all__: list[str] = []


#: Tags of messages with numbers that all processes tell each other: ``AFTER`` at the end of a step,
#: ``NUMBERS`` at any other time.
NUMBERS, AFTER = 1_000_003, 1_000_004


class Peers:
    """The processes of a pipeline.

    Raises:
        RuntimeError: there is no process group.
        TypeError: it is none.
        ValueError: this process is no member of it.
    """

    def __init__(self, group: Any, device: torch.device, name: str = "group") -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "a pipeline over several processes needs a process group (process group: none); "
                "call torch.distributed.init_process_group() first, and start the script with "
                "torchrun --nproc-per-node N"
            )
        group = dist.group.WORLD if group is None else group
        verify(
            group != dist.GroupMember.NON_GROUP_MEMBER,
            "a pipeline must be made in each process of its group, and in no other",
            "rank that is no member",
            dist.get_rank(),
            "call it in its members alone",
        )
        verify_kind(
            group,
            dist.ProcessGroup,
            f"{name} must be a process group",
            name,
            "pass what torch.distributed.new_group() returns, or None for all processes",
        )
        # A strong reference would keep the threads of a group alive after PyTorch has destroyed it.
        # They would then abort the process when the interpreter ends.
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = device
        #: The id of the process that made the pipeline. A forked child, which has no connections,
        #: has another id, so its steps raise an error.
        self.process = os.getpid()
        ranks = dist.get_process_group_ranks(self.group)
        #: A name of the group, the same in all processes, for keys in torch.distributed's store.
        self.name = f"torchgpipe {getattr(self.group, 'group_name', None)} {ranks}"
        #: The text of the failure that has cut all connections; empty if they are connected.
        self.failure = ""
        #: An error that each process raises by itself, so that none tells the others; else None.
        self.known: Exception | None = None
        config = dist.get_backend_config(self.group)
        # If "gloo" stands alone, it is the backend of all devices, the CPU included.
        if "cpu:" not in config and config != "gloo":
            raise RuntimeError(
                "the processes of a pipeline exchange small tensors on the CPU, too, so that no "
                f"device is waited for (backends: {config}); call "
                'init_process_group("cpu:gloo,cuda:nccl") instead'
            )

    @property
    def group(self) -> Any:
        """The group.

        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._group()
        if group is None or not _is_known(group):
            raise RuntimeError(
                f"the processes of a pipeline must be connected ({self.name}: destroyed); destroy "
                "a process group when nothing uses it any more, or make the pipeline anew"
            )
        return group

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all processes, of 63 bits."""
        exchange = Exchange(self, len(numbers))
        exchange.tell(numbers)
        return exchange.heard()

    def texts(self, text: str) -> list[str]:
        """The texts of all processes."""
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def fill(self, tensor: Tensor, rank: int) -> None:
        """Fill a tensor with that of one process."""
        plain = resolved(tensor)
        dist.broadcast(plain, group=self.group, group_src=rank)
        if plain is not tensor:
            tensor.copy_(plain)

    def summed(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Sum a tensor up over some of the processes, in place, in the order of their ranks.

        These are messages between two processes. A group for some of them would have to be made by
        all processes of the job, also by those of other pipelines.
        """
        total = resolved(tensor)
        if self.rank != ranks[0]:
            dist.send(total, group=self.group, group_dst=ranks[0])
            dist.recv(total, group=self.group, group_src=ranks[0])
        else:
            for rank in ranks[1:]:
                other = torch.empty_like(total)
                dist.recv(other, group=self.group, group_src=rank)
                total += other
            for rank in ranks[1:]:
                dist.send(total, group=self.group, group_dst=rank)
        if total is not tensor:
            tensor.copy_(total)


class Exchange:
    """The numbers that all processes tell each other once.

    Messages take less time than a collective, which a thread of gloo runs from process to process.
    They take almost none if their receiver expects them before they are sent.
    """

    def __init__(
        self, peers: Peers, count: int, dtype: torch.dtype = torch.int64, tag: int = NUMBERS
    ) -> None:
        self._rank, self._tag = peers.rank, tag
        self._connections = Connections(peers)
        # With device=CPU, since the caller may have set another default device.
        self._numbers = [torch.empty(count, dtype=dtype, device=CPU) for _ in range(peers.size)]
        self._works = {
            k: self._connections.receive(x, k, tag)
            for k, x in enumerate(self._numbers)
            if k != peers.rank
        }
        self._going: list[Any] = []

    def tell(self, numbers: Sequence[float]) -> None:
        """Send the numbers of this process to all others."""
        numbers_here = torch.tensor(numbers, dtype=self._numbers[0].dtype, device=CPU)
        self._numbers[self._rank] = numbers_here
        for k in self._works:
            self._going += self._connections.send(numbers_here, k, self._tag)

    def heard_of(self, rank: int) -> list[Any]:
        """Wait for the numbers of a process."""
        if rank in self._works:
            self._works.pop(rank).wait()
        numbers: list[Any] = self._numbers[rank].tolist()
        return numbers

    def heard(self) -> list[list[Any]]:
        """Wait for the numbers of all processes."""
        by_rank = [self.heard_of(k) for k in range(len(self._numbers))]
        for work in self._going:
            work.wait()
        return by_rank


class Connections:
    """The ways of tensors to other processes and back, for one step."""

    def __init__(self, peers: Peers) -> None:
        self._group = peers.group

    def send(self, tensor: Tensor, rank: int, tag: int) -> list[Any]:
        """Begin to send a tensor to a process; return what waits until it has left."""
        # A layer may write to another tensor that shares the memory, before the message has left.
        # guard: clone of what goes to a process
        if not is_alone(tensor):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        # dist.isend() calls the group's send(), too, but first 20 functions in Python that look up
        # the group and the rank, and take as long as the message itself.
        return [self._group.send([_real(tensor.detach())], rank, tag)]

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Begin to receive a tensor from a process; return what waits until it is there."""
        return self._group.recv([_real(tensor)], rank, tag)


def resolved(tensor: Tensor) -> Tensor:
    """A tensor whose memory has its values, for a group that sends memory: itself, or a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _real(tensor: Tensor) -> Tensor:
    """A tensor for a group, which sends no complex numbers: these as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def digest(text: str) -> int:
    """A number of 63 bits that stands for a text, in any process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def first_difference(names: Sequence[str], by_rank: Sequence[Sequence[int]]) -> str:
    """The first of some things in which processes differ, as text; empty if there is none."""
    for name, values in zip(names, zip(*by_rank)):
        if len({*values}) > 1:
            first = [values.index(x) for x in values]
            return f"differing: {name}, first process with the same, by rank: {first}"
    return ""


def _is_known(group: Any) -> bool:
    """Whether PyTorch knows a group. An object may refer to it after it was destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


# Routes: in which process each stage is, and the way of each skip.
#
# PyTorch lowers messages from each stage to the next one only. So a skip travels with the value,
# stage by stage, until it is in the process of the stage that pops it::
#
#   stage     0      1      2      3
#   process   0      1      1      0       a skip from 0 to 2 leaves with the value of 0, and waits
#             └── ───┴──────┘              in process 1; one from 0 to 3 never leaves process 0


class Routes:
    """The ways of values and skips.

    Args:
        placement: for each stage, the process (its rank in the group).
        rank: the process that we are.
        layout: which stages stash and pop each skip.
    """

    def __init__(self, placement: Sequence[int], rank: int, layout: SkipLayout) -> None:
        self.placement, self.rank = placement, rank
        #: The stages in this process.
        self.stages = [j for j, process in enumerate(placement) if process == rank]
        #: For each stage, the skips that are sent with its output to the next stage.
        self.carried: list[list[Any]] = [[] for _ in placement]
        #: For each skip, the stage that stashes it.
        self.sources: dict[Any, int] = {}
        #: For the value and each skip, the number that stands for its key in messages. The key
        #: itself cannot, since a skip may have another object as its key in each process.
        self.names: dict[Any, int] = {VALUE: 0}
        for source, stashed in enumerate(layout.stashed):
            for skip, target in stashed.items():
                self.sources[skip] = source
                self.names[skip] = len(self.names)
                k = source
                while placement[k] != placement[target]:
                    self.carried[k].append(skip)
                    k += 1
        #: For each number that ``names`` gives, the key of the value or skip.
        self.parts = {name: key for key, name in self.names.items()}

    @property
    def is_first(self) -> bool:
        """Whether this process has the first stage."""
        return self.placement[0] == self.rank

    @property
    def is_last(self) -> bool:
        """Whether this process has the last stage."""
        return self.placement[-1] == self.rank

    def is_away(self, j: int) -> bool:
        """Whether there is a stage of this number, in another process."""
        return 0 <= j < len(self.placement) and self.placement[j] != self.rank

    def source(self, key: Any, j: int) -> int:
        """The stage that a part of the input of a stage comes from."""
        return self.sources.get(key, j - 1)
