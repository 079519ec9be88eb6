"""Selective checkpoints: a policy of PyTorch's says what the recomputation of a cell computes anew.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` makes two context managers, one for
each run. The first one keeps what the policy names, and the second one hands it out in place of
computing it. All else is done as without: the recomputation fills the slots of what was dropped.

PyTorch counts the operators of both runs, and knows by its number what to hand out. So the layers
alone run within the context managers, and not what is done around one of the runs, such as copying
buffers, or within a layer in one of them.

A policy may send a result to the CPU. Outside of compiled code PyTorch computes that again. Here it
is kept as others are, and then it leaves for the host, and comes back, as under ``'offload'``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import torch
from torch.utils import checkpoint

from torchgpipe import _torch
from torchgpipe._torch.attributes import (
    judge_by,
    keeps_results,
    kept_by,
    put_into,
    results_of,
    schema_of,
    unchanged_in,
)
from torchgpipe.ambient.modes import own_casts
from torchgpipe.devices.streams import get_device, is_current
from torchgpipe.partition.keeping import Policy
from torchgpipe.recompute.offload import NewCell, Offloaded
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.recompute.storage import View
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: The context managers of the first run and the recomputation of one cell.
Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

Choice = checkpoint.CheckpointPolicy
#: The choices by which a result is kept on the device, and in the memory of the host.
KEPT = (Choice.MUST_SAVE, Choice.PREFER_SAVE)
#: PyTorch has had the latter since version 2.11.
SENT = [x for x in Choice if x.name.endswith("CPU_OFFLOAD")]


def contexts_of(policy: Policy, new: NewCell | None) -> Contexts:
    """The context managers of the two runs of a cell.

    Args:
        policy: the policy.
        new: makes what sends results to the host, if there is another memory than that.
    """
    first, second = policy()
    if not keeps_results(first):
        # They are somebody's own.
        return first, second
    results = Results(first, new)
    judge_by(first, results.choose)
    judge_by(second, Results(first, None).choose)
    return Counted(first, results), Counted(second, results)


class within:
    """Compute within a context manager, and in that within the one of the run that goes on.

    A generator would do the same, but not with errors that end generators.

    Args:
        around: the outer one.
        contexts: those of the two runs.
    """

    def __init__(self, around: AbstractContextManager[Any], contexts: Contexts) -> None:
        self._around, (first, second) = around, contexts
        self._inner = second if is_recomputing() else first

    def __enter__(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(self._around)
            self._inner.__enter__()
            entered.pop_all()

    def __exit__(self, *raised: Any) -> None:
        try:
            self._inner.__exit__(*raised)
        finally:
            self._around.__exit__(*raised)


class uncounted:
    """Compute within a ``with`` block what one of the two runs alone does, and no policy counts."""

    def __enter__(self) -> None:
        self._mode = None
        count = _torch.count_dispatch_modes()
        modes = _torch.KeepingMode, _torch.GivingMode
        if count and isinstance(_torch.dispatch_mode_at(count - 1), modes):
            self._mode = _torch.pop_dispatch_mode(None)

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            _torch.push_dispatch_mode(self._mode)


def does_more(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator changes an argument, or draws random numbers.

    A recomputation without it would find another value there, or draw other numbers after it.
    """
    schema = schema_of(operator)
    if schema is None or schema.is_mutable:
        return schema is not None
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    given = {**dict(zip([x.name for x in schema.arguments], args)), **kwargs}
    chances = [
        given.get(x.name, x.default_value) for x in schema.arguments if x.name in ("p", "dropout_p")
    ]
    # Attention without dropout draws none.
    return any(chances) or not chances


class Results:
    """The results of operators that PyTorch's mode keeps for the recomputation of a cell.

    Args:
        mode: the mode, whose policy :meth:`choose` has the last word on.
        new: makes what sends results to the host, once there is one to send.
    """

    def __init__(self, mode: Any, new: NewCell | None) -> None:
        # Not the mode itself, which refers to this object.
        self._results, self._new = results_of(mode), new
        self._offloaded: Offloaded | None = None
        #: For each operator, whether each of its results that are kept leaves.
        self._leave: defaultdict[Any, list[bool]] = defaultdict(list)
        #: What has left, or would have, with the entry of PyTorch's that has to get it back.
        self._views: list[tuple[Any, View]] = []

    def choose(
        self, policy: Callable[..., Any], context: Any, operator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Choose what becomes of the result of an operator, as the policy does."""
        found = policy(context, operator, *args, **kwargs)
        sent = found in SENT
        if sent or found in KEPT or found is True:
            # guard: operators that do more than to return
            if does_more(operator, args, kwargs):
                return Choice.PREFER_RECOMPUTE
            self._leave[operator].append(sent and self._may_leave())
        return Choice.MUST_SAVE if sent else found

    def _may_leave(self) -> bool:
        if self._offloaded is None and self._new is not None:
            self._offloaded = self._new()
        # guard: results on another stream
        return self._offloaded is not None and is_current(self._offloaded.stream)

    def leave(self) -> None:
        """Hand over what leaves, once the layers have run."""
        self._new = None
        if self._offloaded is None:
            return
        for operator, leave in self._leave.items():
            each = map(leaves_of, kept_by(self._results, operator))
            entries = [[x for x in found if isinstance(x, _torch.KeptResult)] for found in each]
            # Of results that are not kept there is no entry, or an empty one.
            for result, leaves in zip(filter(None, entries), leave):
                for entry in result if leaves else ():
                    # What has changed stays, and PyTorch raises when it is asked for.
                    # guard: what a policy sends and layers change
                    x = unchanged_in(entry)
                    if x is not None:
                        view = self._offloaded.pack(x)
                        put_into(entry, view, view.version)
                        self._views.append((entry, view))

    def come(self) -> None:
        """Take back what has left, before the layers run again."""
        if self._offloaded is None:
            return
        self._offloaded.begin()
        views, self._views = self._views, []
        for entry, view in views:
            x = view.kept
            if x is None:
                x = view.rebuild(get_device(self._offloaded.stream))
            put_into(entry, x, view.version)


class Counted:
    """The context manager of a run within a mode of PyTorch's.

    Args:
        mode: the mode.
        results: what the mode keeps.
    """

    def __init__(self, mode: AbstractContextManager[Any], results: Results) -> None:
        self._mode, self._results = mode, results

    def __enter__(self) -> None:
        if is_recomputing():
            self._results.come()
        # A weight that was cast for another micro-batch would be cast in one of both runs alone.
        # guard: casts of both runs
        self._casts: AbstractContextManager[None] = own_casts()
        self._casts.__enter__()
        self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)
        self._casts.__exit__(*raised)
        kind, error, _ = raised
        if kind is None and not is_recomputing():
            self._results.leave()
        if kind is RuntimeError and "has been mutated" in str(error):
            raise RuntimeError(
                "what a policy keeps must not be changed in place later "
                f"(PyTorch: {error}); use the layer that changes it out of place, or a policy that "
                "lets the result be computed again"
            ) from error
