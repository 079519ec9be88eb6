"""The fence: which cells backward comes to only after which others, where autograd orders them.

``torchgpipe/engine/pipeline.py`` has its picture. The course of a device map ties it likewise, of
what leaves a stage and of what comes there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchgpipe.recompute.checkpoint import Checkpoint, trigger

__all__: list[str] = []


class Fence:
    """The phonies of a step, by the cells that they were branched off.

    A place ``j`` is a partition, or a stage of a device map.

    Args:
        ahead: for each place, by how many micro-batches each place that it sends to may be ahead of
            it in backward. Of these numbers the first one counts whose micro-batch is there.
    """

    def __init__(self, ahead: dict[int, dict[int, range]]) -> None:
        self.ahead = ahead
        self._phonies: dict[tuple[int, int], list[Tensor]] = {}

    def before(self, i: int, j: int) -> list[Tensor]:
        """The phonies of the cells that backward shall come to after the cell ``(i, j)``."""
        # A course may leave a place out.
        found = self._first(i, range(1, i + 1), j)
        # A list, since another thread may add places.
        for k, ahead in [*self.ahead[j].items()]:
            # guard: lead [3]
            found = found + self._first(i, ahead, k)  # [3]
        return found

    def fork(
        self, i: int, j: int, checkpoints: Sequence[Checkpoint], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Branch a phony off what leaves the cell ``(i, j)``, for cells that come before it.

        The node belongs to the current stream, and recomputes checkpoints, if there are any.
        """
        tensors, phony = trigger(checkpoints, tensors)
        self._phonies.setdefault((i, j), []).append(phony)
        return tensors

    def _first(self, i: int, ahead: range, j: int) -> list[Tensor]:
        for a in ahead:
            if (i - a, j) in self._phonies:
                return self._phonies[i - a, j]
        return []
