"""The fence: forks and joins that fix the order in which autograd comes to cells in backward.

``torchgpipe/engine/pipeline.py`` has its picture. Under a device map, a course forks tensors that
leave a stage, and joins tensors that arrive there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchgpipe.recompute.checkpoint import Checkpoint, trigger

__all__: list[str] = []


class Fence:
    """The phonies of a step, by the cells that they were branched off.

    The index ``j`` is a partition, or a stage of a device map.

    Args:
        ahead: for each ``j`` and each ``k`` that it sends to, by how many micro-batches ``k`` may
            be ahead of ``j`` in backward. Of these numbers the first one counts whose cell exists.
    """

    def __init__(self, ahead: dict[int, dict[int, range]]) -> None:
        self.ahead = ahead
        self._phonies: dict[tuple[int, int], list[Tensor]] = {}

    def before(self, i: int, j: int) -> list[Tensor]:
        """The phonies of the cells that backward shall come to after the cell ``(i, j)``."""
        # A micro-batch may skip a stage of a device map.
        found = self._first(i, range(1, i + 1), j)
        # A list, since another thread may add stages.
        for k, ahead in [*self.ahead[j].items()]:
            # guard: lead [3]
            found = found + self._first(i, ahead, k)  # [3]
        return found

    def fork(
        self, i: int, j: int, checkpoints: Sequence[Checkpoint], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Branch a phony off tensors that leave the cell ``(i, j)``, to be joined by other cells.

        The node belongs to the current stream, and its backward recomputes the checkpoints, if any.
        """
        tensors, phony = trigger(checkpoints, tensors)
        self._phonies.setdefault((i, j), []).append(phony)
        return tensors

    def _first(self, i: int, ahead: range, j: int) -> list[Tensor]:
        for a in ahead:
            if (i - a, j) in self._phonies:
                return self._phonies[i - a, j]
        return []
