"""The memory of a partition, and of the blocks that a device of a map has.

Each cell keeps bytes between forward and backward, which :class:`~torchgpipe.schedule.Costs` has,
and each computation needs more while it runs: its workspace. All follows from what one run of each
layer, or block, takes. Where one run does not tell, more is counted, and not less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from torch import Tensor, nn

from torchgpipe.planner.blocks import Run
from torchgpipe.planner.layers import Layer, Taken, Weights

__all__: list[str] = []

#: The memory of a loss outside, as a multiple of all outputs: these, joined, and as much for what
#: it keeps and for the gradient.
OUTSIDE = 3

#: How many gradients may arrive before the one before them is used, where autograd orders backward:
#: at the first stage, and at others. These are the most that the fence allows for.
EARLY_AT_FIRST, EARLY = 2, 1


class Stage:
    """Layers that follow each other: the memory for a micro-batch, in bytes, and the times.

    Args:
        layers: all layers.
        taken: the memory of each.
        rows: the rows of the micro-batch.
        own: the numbers of the layers of this stage.
        is_summed: whether a schedule adds up gradients, which it does in place, and not autograd.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        taken: Sequence[Taken],
        rows: int,
        own: range,
        *,
        is_summed: bool,
    ) -> None:
        self._layers, self._rows = [layers[k] for k in own], rows
        self._taken, self._own = taken, own
        self._weights = each = [x.weights for x in self._layers]
        #: The bytes of weights, of trained ones, and of gradients that wait to be added.
        self.weights = sum(x.all for x in each)
        self.trainable = sum(x.trainable for x in each)
        self._waiting = sum(x.small for x in each)
        if not is_summed:
            self._waiting += max([x.largest for x in each], default=0)
        before = taken[own.start - 1] if own.start else None
        #: By the layers that they come from, the sizes and gradients of what arrives.
        self.arrivals: list[tuple[int, float, float]] = []
        if before is not None:
            self.arrivals.append((own.start - 1, before.output, before.gradient))
        stashed = {n: (k, size, grad) for k, x in enumerate(taken) for n, size, grad in x.stashed}
        popped = {n: k for k, x in enumerate(taken) for n, _ in x.popped}
        skips = [(*x, popped.get(n, x[0])) for n, x in stashed.items()]
        self.arrivals += [(a, x, y) for a, x, y, b in skips if b in own and a < own.start]
        leaving = [(a, x, y) for a, x, y, b in skips if a in own and b >= own.stop]
        inner = [(a, x, y) for a, x, y, b in skips if a in own and b in own]
        last = taken[own.stop - 1]
        is_last = own.stop == len(taken)
        self.output = last.output
        #: The bytes that are sent, and of the gradients that come back for it.
        self.sent = sum(x for _, x, _ in leaving) + (0.0 if is_last else last.output)
        self.gets = sum(x for *_, x in leaving) + last.gradient
        self._gives = sum(x for *_, x in self.arrivals)
        #: Those that stay within, and their gradients.
        self._inside = sum(x for _, x, _ in inner)
        self._inner = sum(x for *_, x in inner)
        arriving = sum(x for _, x, _ in self.arrivals)
        #: Before each layer, what is kept, and what is there of the output before it.
        self._before: list[tuple[float, float]] = []
        # A first layer that computes in place has a clone.
        first = taken[own.start]
        kept = carried = 0.0
        if not own.start and first.in_place:
            kept = first.input
        for k in own:
            x = taken[k]
            held = min(carried, x.input)
            kept += held
            self._before.append((kept, carried - held))
            kept += x.own
            carried = (carried - held if x.in_place else 0.0) + x.loose
        self._loose = carried
        self._kept = kept
        kept += before.output if before is not None else 0.0
        # Of a skip, the layer that pops it tells what it keeps.
        kept += sum(x for k in own for _, x in taken[k].popped)
        #: The bytes that a cell keeps for backward, from F until R if it is computed again, and
        #: from I until W.
        self.kept = kept
        self.stored = arriving
        if not own.start and first.in_place:
            self.stored += first.input
        # I lets go of what only I needed, and notes gradients.
        noted = sum(taken[k].pending - taken[k].own for k in own)
        self.pending = self.kept + self.gets + (noted if self.gives_back else 0.0)

    @property
    def gives_back(self) -> bool:
        """Whether an arrival needs a gradient. Otherwise W does all of backward."""
        return self._gives > 0

    def durations(self, *, splits: bool) -> tuple[float, float, float, float]:
        """The milliseconds of F, I, W and R, whose backward may be in halves."""
        rows, last = self._rows, self._layers[-1]
        forward, input, weight, late = (
            sum(x.at(rows) for x in each)
            for each in zip(*[(x.forward, x.input, x.weight, x.late) for x in self._layers])
        )
        # A recomputation ends at the last tensor that backward needs.
        again = forward - last.forward.at(rows) + last.again.at(rows)
        if not self.gives_back:
            return forward, 0.0, input + weight, again
        return forward, input, late if splits else weight, again

    @cached_property
    def workspaces(self) -> Mapping[str, float]:
        """The most that each kind of computation needs above what is kept, and all of R's cell."""
        own = [self._taken[k] for k in self._own]
        forward = [kept + rest + x.forward for (kept, rest), x in zip(self._before, own)]
        whole = max(*forward, self._kept + self._loose) - self._kept + self._inside
        again = max(x.forward + y.output for x, y in zip(own, [Taken(), *own])) + self._inside
        # What a stage gets is there until the end of its backward, and counts with its last layer.
        gets = [self.gets] * (len(own) - 1) + [self.gets - own[-1].gradient]
        each = zip(self._before, own, gets)
        backward = [kept + x.own + x.backward + grads for (kept, _), x, grads in each]
        grads = self._waiting + self._inner
        full = max(0.0, max(backward) - self._kept) + grads
        rest, halved = 0.0, 0.0
        for x, there in zip(reversed(own), reversed(gets)):
            halved = max(halved, rest + x.backward + there)
            rest += max(0.0, x.pending - x.own)
        # The gradients of all weights are there before they are added to the sums.
        sums = accumulate((x.trainable for x in self._weights), initial=0)
        late = max(x.weight + y for x, y in zip(own, sums))
        return {
            "F": whole + self.sent,
            "again": again + self.sent,
            "R": whole,
            "B": full,
            "I": halved + grads if self.gives_back else 0.0,
            "W": late if self.gives_back else full,
        }


# Any model under a device map.


@dataclass(frozen=True)
class Footprint:
    """The memory of a model, whichever blocks a device has."""

    run: Run
    #: The weights of each block; under None those that belong to no block.
    weights: Mapping[str | None, Weights]
    chunks: int
    #: How many of them, from the first, are computed again.
    again: int
    #: Memory of the optimizer, for each byte of a parameter that it changes.
    state: float

    def need(self, blocks: Collection[str | None]) -> float:
        """The most bytes of a device with some blocks, and with None for all else."""
        own = [self.weights[x] for x in blocks if x in self.weights]
        now = sum(x.all + (1 + self.state) * x.trainable for x in own)
        here = [x.block in blocks for x in self.run.parts]
        mine = [x for x, is_here in zip(self.run.parts, here) if is_here]
        if not mine:
            return now
        visits = groupby(zip(here, self.run.parts), lambda x: x[0])
        firsts = [next(each)[1] for is_here, each in visits if is_here]
        # What arrives is a copy, but not what the caller gives.
        arriving = sum(x.input for x in firsts if x is not self.run.parts[0])
        calls = sum(x.kept for x in mine if x.is_call)
        code = sum(x.kept for x in mine if not x.is_call) + arriving
        inputs = sum(x.input for x in mine if x.is_call)
        m = self.chunks
        # The cell that is computed again has all, as one that is not.
        full = max(m - self.again, min(1, self.again))
        now += m * code + full * calls + self.again * inputs
        now += max(max(x.forward - x.kept, x.backward) for x in mine) + 2 * arriving
        now += max(x.largest for x in own) if own else 0.0
        if here[0]:
            now += m * self.run.given
        if here[-1]:
            now += m * self.run.output * (1 if self.run.has_loss else OUTSIDE)
        return now


def weights_of(
    model: nn.Module, blocks: Mapping[str, nn.Module], own: Collection[str | None] | None = None
) -> dict[str | None, Weights]:
    """The memory of the weights of each block, and under None of what belongs to none.

    A weight that several blocks share counts for the last one of them, the first in backward. Of
    the blocks of one device, a weight whose home is another device comes as a copy, whose gradient
    leaves.
    """
    users: dict[Tensor, list[str | None]] = {}
    for name, module in (*blocks.items(), (None, model)):
        for x in {*module.parameters(), *module.buffers()}:
            users.setdefault(x, []).append(name)
    found: dict[str | None, Weights] = {}
    for x, names in users.items():
        # The home is the first of the deepest ones.
        home = max(names, key=lambda name: 0 if name is None else 1 + name.count("."))
        here = [name for name in names[:-1] if own is None or name in own]
        last, changed = here[-1] if here else None, x.nbytes if x.requires_grad else 0
        before = found.get(last, Weights())
        largest = max(before.largest, changed)
        if own is None or home in own:
            found[last] = Weights(before.all + x.nbytes, 0, before.trainable + changed, 0, largest)
        elif here:
            found[last] = Weights(before.all + x.nbytes + changed, 0, before.trainable, 0, largest)
    return found
