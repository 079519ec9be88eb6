"""The advisor: tries other settings, one change at a time, and says what helps a step most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torchgpipe.advice.figures import Layer
from torchgpipe.advice.replays import Replays, Traced
from torchgpipe.advice.tries import Try, tries
from torchgpipe.timeline.advice import Advice

__all__: list[str] = []

#: The least gain that is worth a sentence.
LEAST = 0.03
#: The share of the largest gain from which on a change that needs no more memory is preferred.
ENOUGH = 0.7


class Advisor:
    """The advisor of one traced step.

    Args:
        traced: the step.
    """

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    @cached_property
    def advice(self) -> Advice | None:
        """The change that gains the most; None if none is worth it, or nobody can tell."""
        replays = Replays(self._traced)
        # As long as there are such copies, everything else is beside the point.
        stray = replays.without_strays
        if stray is not None and stray >= LEAST:
            reason, remedy = _stray(self._traced.figures.layers)
            return Advice(reason, {}, stray, remedy=remedy)
        if not replays.are_right:
            return None
        gains = [(replays.gain(x.setting), _known(x, replays)) for x in tries(replays)]
        most = max((gain for gain, _ in gains), default=0.0)
        if most < LEAST:
            return None
        # What needs no more memory is better than what gains a little more.
        enough = [x for x in gains if x[0] >= ENOUGH * most and not x[1].caution]
        # Of equal gains, the first is the smallest change.
        gain, best = max(enough or gains, key=lambda x: round(x[0], 2))
        return Advice(best.reason, best.change, gain, best.caution, best.words)


def _stray(layers: Sequence[Layer]) -> tuple[str, str]:
    """Name the layers that copy between devices by themselves, and what to do about it."""
    found = {k: layer for k, layer in enumerate(layers) if layer.copied}
    if len(found) > 1:
        reason = f"layers {', '.join(map(str, found))} copy between devices, which wait for that"
        return reason, "with what they read on their own devices, the step"
    ((k, layer),) = found.items()
    places = " and ".join([layer.device, *layer.copied])
    reason = f"layer {k} copies between {places}, which wait for that"
    return reason, f"with what it reads on {layer.device}, the step"


def _known(change: Try, replays: Replays) -> Try:
    """A change without its caution, where the plan of the model knows that it fits."""
    fits = change.caution and replays.excess(change.setting) == 0
    return replace(change, caution="") if fits else change
