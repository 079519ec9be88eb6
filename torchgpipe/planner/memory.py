"""The memory of a partition.

Each cell keeps bytes between forward and backward, which :class:`~torchgpipe.schedule.Costs` has,
and each computation needs more while it runs: its workspace. All follows from what one run of each
layer takes. Where one run does not tell, more is counted, and not less.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from torchgpipe.planner.layers import Layer
from torchgpipe.planner.sandbox import Figures

__all__: list[str] = []

#: The memory of a loss outside, as a multiple of all outputs: these, joined, and as much for what
#: it keeps and for the gradient.
OUTSIDE = 3

#: How many gradients may arrive before the one before them is used, where autograd orders backward:
#: at the first stage, and at others. These are the most that the fence allows for.
EARLY_AT_FIRST, EARLY = 2, 1


class Stage:
    """Layers that follow each other: the memory for a micro-batch, in bytes, and the times.

    The layers are all of a model, each with its figures for so many rows, and ``numbers`` are the
    indices of those in this stage. A schedule adds up gradients in place if ``is_summed``, and
    autograd does otherwise.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        figures: Sequence[Figures],
        rows: int,
        numbers: range,
        *,
        is_summed: bool,
    ) -> None:
        self._here = here = [figures[k] for k in numbers]
        weights = [layers[k].weights for k in numbers]
        #: The bytes of weights, and of trained ones.
        self.weights = sum(x.all for x in weights)
        self.trainable = sum(x.trainable for x in weights)
        popped = {n: k for k, x in enumerate(layers) for n in x.popped}
        #: The skips: the layers that stash and pop them, and their sizes.
        skips = [
            (k, popped.get(n, k), line.at(rows))
            for k, x in enumerate(layers)
            for n, line in x.stashed.items()
        ]
        arriving = [(a, b, x) for a, b, x in skips if a < numbers.start and b in numbers]
        #: By the layers that they come from, the sizes and gradients of what arrives.
        self.arrivals = [(a, x, x) for a, _, x in arriving]
        if numbers.start:
            before = figures[numbers.start - 1]
            self.arrivals.append((numbers.start - 1, before.output, before.gradient))
        #: Whether an arrival needs a gradient. Otherwise W does all of backward.
        self.gives_back = any(gradient for *_, gradient in self.arrivals)
        leaving = sum(x for a, b, x in skips if a in numbers and b >= numbers.stop)
        inside = sum(x for a, b, x in skips if a in numbers and b in numbers)
        last, is_last = here[-1], numbers.stop == len(layers)
        self.output = last.output
        #: The bytes of the gradients that come back for what is sent.
        self.gets = leaving + last.gradient
        #: The bytes that a cell keeps for backward, from F until R if it is computed again, and
        #: from I until W.
        self.stored = sum(size for _, size, _ in self.arrivals)
        # What is kept after each layer, and what of its output nobody has kept so far, which the
        # next layer may keep as its input.
        kept, output, ends = 0.0, 0.0, [0.0]
        #: What I lets go of in layers that keep their output, though the next layer's W needs it.
        shared = 0.0
        for x, before in zip(here, [Figures(), *here]):
            held = min(output, x.kept_input)
            shared += min(before.output, x.kept_input) - held
            kept += held + x.kept
            # A layer that has made nothing returns its input, or computes in place.
            output = x.left - x.kept if x.left else output - held
            ends.append(kept + output)
        # A layer may keep nothing of a skip that it pops.
        freed = sum(max(0.0, x - figures[b].kept_input) for _, b, x in arriving)
        self.kept = self.stored + kept - freed
        # From I until W, a cell has the gradients that W begins with, and lacks what only I needed.
        noted = shared + sum(x.pending - x.kept for x in here) if self.gives_back else 0.0
        self.pending = self.kept + self.gets + noted
        forward = max(before + x.most_forward for before, x in zip(ends, here)) - kept
        forward = max(0.0, forward) + freed + leaving + (0.0 if is_last else last.output)
        halves = [max(x.most_input, x.most_weight) for x in here]
        backward = max(map(add, ends[1:], halves)) - kept
        backward += self.gets + inside + sum(x.small for x in weights)
        backward += 0 if is_summed else max(x.largest for x in weights)
        #: The most that each kind of computation needs above what is kept, and an F of what is
        #: computed again above what is stored.
        self.workspaces = {
            "F": forward,
            "again": self.kept - self.stored + forward,
            "R": forward,
            "B": backward,
            "I": backward + max(0.0, noted) if self.gives_back else 0.0,
            "W": backward,
        }
        if self.gives_back:
            # The gradients of all weights are there before they are added to the sums.
            self.workspaces["W"] = max(x.most_weight for x in here) + self.trainable

    def durations(self, *, splits: bool) -> tuple[float, float, float, float]:
        """The milliseconds of F, I, W and R, whose backward may be in halves."""
        total, last = Figures(*map(sum, zip(*self._here))), self._here[-1]
        # A recomputation ends at the last tensor that backward needs.
        again = total.forward - last.forward + last.again
        if not self.gives_back:
            return total.forward, 0.0, total.backward, again
        weight = total.weight if splits else max(0.0, total.backward - total.input)
        return total.forward, total.input, weight, again
