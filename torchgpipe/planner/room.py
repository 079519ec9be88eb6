"""Room: whether other settings of a model that was planned fit into the memory of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchgpipe.planner.memory import issued
from torchgpipe.planner.search import Problem, Search
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import operations
from torchgpipe.schedule.rehearsal import Step

__all__ = ["Room"]


class Room:
    """The room that a plan has on its devices.

    Args:
        problem: what was measured.
        places: the device of each worker of the plan.
    """

    def __init__(self, problem: Problem, places: Sequence[torch.device]) -> None:
        self._problem = problem
        self._limits = dict(zip(places, problem.memory))
        #: The search for some number of rows, made when it is asked for.
        self._search: Search | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Its caches cannot be pickled.
        return {**self.__dict__, "_search": None}

    def excess(
        self,
        schedule: Schedule,
        order: Sequence[Step],
        balance: Sequence[int],
        devices: Sequence[torch.device],
        rows: int,
        *,
        has_loss: bool,
    ) -> float | None:
        """By how many bytes the fullest device has too little for a step.

        Args:
            schedule: the schedule, with its recomputations.
            order: its instructions as the host issues them.
            balance: the layers of each partition.
            devices: the device of each partition.
            rows: the rows of the mini-batch.

        Keyword Args:
            has_loss: whether the schedule has the loss in it.

        Returns:
            The bytes, 0 if all fit; None if the plan was for something else, so nobody knows.
        """
        problem = self._problem
        if has_loss != problem.has_loss or not self._limits.keys() >= {*devices}:
            return None
        if sum(balance) != len(problem.layers) - problem.has_loss or not rows:
            return None
        if self._search is None or rows != self._search.problem.batch:
            share = rows / problem.batch
            given, targets = share * problem.given, share * problem.targets
            self._search = Search(replace(problem, batch=rows, given=given, targets=targets))
        places = [*dict.fromkeys(devices)]
        # Workers of one device share its memory.
        placement = [places.index(device) for device in devices]
        steps = [(placement[operations(x)[0].stage], x, edges) for _, x, edges in order]
        memory = self._search.peaks(issued(steps), placement, schedule.chunks, balance)
        return max(0.0, *(x - self._limits[place] for x, place in zip(memory, places)))
