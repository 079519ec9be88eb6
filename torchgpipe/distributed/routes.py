"""Routes: in which process each stage is, and the way of each skip.

PyTorch lowers messages from each stage to the next one only. So a skip travels with the value, from
the stage that stashes it to the first stage that is in the process of the one that pops it::

    stage     0      1      2      3
    process   0      1      1      0       a skip from 0 to 2 leaves with the value of 0, and waits
              └── ───┴──────┘              in process 1; one from 0 to 3 never leaves process 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchgpipe.skip.layout import SkipLayout
from torchgpipe.values.microbatch import VALUE

__all__: list[str] = []


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
        self.own = [j for j, process in enumerate(placement) if process == rank]
        #: For each stage, the skips that travel from it to the next one.
        self.carried: list[list[Any]] = [[] for _ in placement]
        #: The stage that each skip comes from.
        self.sources: dict[Any, int] = {}
        #: A name for each part that is the same in all processes; namespaces of skips are not.
        self.names: dict[Any, int] = {VALUE: 0}
        for source, stashed in enumerate(layout.stashed):
            for skip, target in stashed.items():
                self.sources[skip] = source
                self.names[skip] = len(self.names)
                k = source
                while placement[k] != placement[target]:
                    self.carried[k].append(skip)
                    k += 1
        #: The parts by their names.
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
