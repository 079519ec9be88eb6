"""Blocks of memory of a partition: values between layers and skips, each counted once.

A layer that computes in place, or returns a view, hands on the memory of its input. A layer that
stashes its output, or its input, has it in memory once. So memory is counted by blocks, of which
several values are parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchgpipe.planner.look import Look
from torchgpipe.planner.skips import End
from torchgpipe.skip.namespace import Skip

__all__ = ["Block", "Blocks"]


@dataclass(eq=False)
class Block:
    """A block of memory.

    Args:
        size: its bytes.
        made: the layer that makes it; -1 for what comes to the partition.
        used: the last layer that gets it; the number of layers for what leaves the partition.
        savers: the layers that keep it for backward.
    """

    size: float
    made: int
    used: int
    savers: set[int] = field(default_factory=set)


class Blocks:
    """The memory of the layers of a partition, for micro-batches of some rows.

    Args:
        memory: the memory of each layer.
        rows: the rows of a micro-batch.
        arriving: memory of the input of the partition.
    """

    def __init__(self, memory: Sequence[Look], rows: float, arriving: float) -> None:
        self.arriving = value = Block(arriving, -1, 0)
        #: The blocks that the layers make.
        self.made: list[Block] = []
        #: For each layer, what it keeps besides.
        self.inner: list[float] = [x.inner.at(rows) for x in memory]
        #: The block in front of each layer, and the one behind the last.
        self.edges = [value]
        #: The bytes of these values, whose gradients have no memory in common.
        self.sizes: list[float] = [arriving, *(x.output.at(rows) for x in memory)]
        #: For each layer, the bytes of the gradients of the skips that it stashes, for this
        #: partition and for others, and of what its backward makes: the gradients of its input and
        #: of what it pops. The last are kept longer, and may be in the same memory.
        self.stays: list[float] = []
        self.leaves: list[float] = []
        self.passed: list[float] = []
        self.holds: list[float] = []
        #: The blocks that wait for backward's half for weights, of what comes before the layer.
        self.pending: set[Block] = set()
        self.stashed: dict[Skip, End] = {}
        self.popped: dict[Skip, End] = {}
        self.from_others: dict[Skip, Block] = {}
        within: dict[Skip, Block] = {}
        held: dict[Skip, float] = {}
        ours = {skip for x in memory for skip in x.popped}
        for k, look in enumerate(memory):
            value.used = max(value.used, k)
            before = value
            if look.saves_input:
                self._saved(before, k, look)
            passed = look.backward.passed.at(rows) if look.popped else self.sizes[k]
            self.passed.append(passed)
            self.holds.append(sum(x.holds.at(rows) for x in look.popped.values()))
            held |= {skip: x.holds.at(rows) for skip, x in look.popped.items()}
            for skip, popped in look.popped.items():
                block = within.get(skip)
                if block is None:
                    block = self.from_others[skip] = Block(popped.size.at(rows), -1, k)
                block.used = max(block.used, k)
                if popped.saved:
                    self._saved(block, k, look)
            if not look.passes:
                value = self._new(look.output.at(rows), k)
                if look.saves_output:
                    value.savers.add(k)
            self.edges.append(value)
            for skip, stashed in look.stashed.items():
                if stashed.is_output:
                    block = value
                elif stashed.is_input:
                    block = before
                else:
                    block = self._new(stashed.size.at(rows), k)
                if stashed.saved:
                    block.savers.add(k)
                within[skip] = block
            own = [x.gradient.at(rows) for skip, x in look.stashed.items() if skip not in ours]
            self.leaves.append(sum(own))
        value.used = len(memory)
        for look in memory:
            self.stays.append(sum(held.get(skip, 0.0) for skip in look.stashed))
            for skip, stashed in look.stashed.items():
                if skip not in ours:
                    block = within[skip]
                    block.used = len(memory)
                    self.stashed[skip] = End(
                        stashed.size.at(rows),
                        stashed.gradient.at(rows),
                        bool(block.savers),
                        is_input=block is self.arriving,
                        is_output=block is value,
                    )
            for skip, popped in look.popped.items():
                if skip in self.from_others:
                    block = self.from_others[skip]
                    size, gradient = popped.size.at(rows), popped.gradient.at(rows)
                    self.popped[skip] = End(
                        size, gradient, bool(block.savers), holds=popped.holds.at(rows)
                    )

    def _new(self, size: float, k: int) -> Block:
        block = Block(size, k, k)
        self.made.append(block)
        return block

    def _saved(self, block: Block, k: int, look: Look) -> None:
        block.savers.add(k)
        if look.trainable:
            self.pending.add(block)

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def leaving(self) -> Block:
        """The block of the output."""
        return self.edges[-1]

    @property
    def kept(self) -> float:
        """The memory that a cell keeps until its backward, skips of other partitions aside."""
        return sum(self.inner) + sum(x.size for x in [self.arriving, *self.made] if x.savers)

    def after(self, k: int, *, keeps: bool) -> float:
        """The memory by which there is more when the forward of a layer is over.

        Args:
            k: the layer.
            keeps: whether something is kept for backward.
        """
        more = self.inner[k] if keeps else 0.0
        for block in self.made:
            if block.made == k:
                more += block.size
            is_last = max(block.used, block.made) == k
            if is_last and not (keeps and block.savers):
                more -= block.size
        return more

    def gone(self, k: int) -> float:
        """The memory that goes with the gradient of what is behind a layer."""
        if k + 1 == len(self):
            return self.sizes[-1]
        return max(0.0, self.passed[k + 1] - self.holds[k + 1])

    @property
    def sent(self) -> float:
        """The memory of the gradients that go to other partitions, until all have gone."""
        holds = sum(x.holds for x in self.popped.values())
        if self.holds[0]:
            return self.passed[0] + holds - self.holds[0]
        return self.sizes[0] + holds

    def freed(self, k: int) -> float:
        """The memory that goes when the backward of a layer is over."""
        blocks: Iterator[Block] = (x for x in [self.arriving, *self.made] if x.savers)
        return self.inner[k] + sum(x.size for x in blocks if min(x.savers) == k)
