"""The built-in schedules by their names, and all of them in a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from inspect import signature

from torchgpipe.checks import verify_kind
from torchgpipe.schedule.built_in import (
    dualpipe_v,
    fill_drain,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    wave,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from torchgpipe.schedule.language import Schedule

__all__: list[str] = ["named"]


#: Functions by their stages per worker: one, two, or any number; wave has two for each wave.
_ONE = (fill_drain, one_f_one_b, zero_bubble_h1, zero_bubble_h2)
_TWO = (zero_bubble_v, v_half, v_min, dualpipe_v)
_MANY = (interleaved, looped_bfs, interleaved_zero_bubble)
_BUILT_IN: tuple[Callable[..., Schedule], ...] = (*_ONE, *_MANY, *_TWO, wave)
#: Names from papers and from torch.distributed.pipelining.
_ALIASES = {
    "gpipe": fill_drain,
    "1f1b": one_f_one_b,
    "interleaved1f1b": interleaved,
    "zbh1": zero_bubble_h1,
    "zbh2": zero_bubble_h2,
    "zbv": zero_bubble_v,
    "zbvzerobubble": zero_bubble_v,
    "hanayo": wave,
}


def named(name: str, workers: int, chunks: int, **parameters: int) -> Schedule:
    """Make a built-in schedule by its name, such as ``named("1f1b", workers=4, chunks=8)``.

    Args:
        name: the name of the function, or a common name, such as the name of the class in
            torch.distributed.pipelining. Case, spaces, ``_`` and ``-`` make no difference.
        workers: the number of workers.
        chunks: the number of micro-batches.
        parameters: further arguments of the function: ``stages_per_worker`` or ``waves``.

    Raises:
        ValueError: No built-in schedule has this name.
    """
    verify_kind(name, str, "name must be a word", "name", "use '1f1b', for one")
    functions = {f.__name__.replace("_", ""): f for f in _BUILT_IN} | _ALIASES
    found = functions.get(re.sub("[-_ ]", "", name).lower())
    if found is None:
        raise ValueError(
            f"name must be that of a built-in schedule (name: {name!r}); use one of "
            + ", ".join([*_ALIASES, *(f.__name__ for f in _BUILT_IN)])
        )
    known = [*signature(found).parameters]
    for parameter in parameters:
        if parameter not in known:
            raise TypeError(
                f"a schedule takes the arguments of its function (name: {name!r}, {parameter}: "
                f"{parameters[parameter]!r}); use {', '.join(known)}"
            )
    return found(workers, chunks, **parameters)


def built_in(workers: int, chunks: int) -> Iterator[tuple[str, Schedule]]:
    """Yield the built-in schedules with one, two and four stages per worker.

    Yields:
        The name of the function, and the schedule.
    """
    for _, call, schedule in every(workers, chunks, (1, 2, 4)):
        yield call.partition("(")[0], schedule


def every(
    workers: int, chunks: int, stages_per_worker: Iterable[int]
) -> Iterator[tuple[int, str, Schedule]]:
    """Yield the built-in schedules with these numbers of stages per worker.

    Yields:
        The number of stages per worker, the call that makes the schedule, and the schedule.
    """
    for v in stages_per_worker:
        calls: list[tuple[Callable[..., Schedule], dict[str, int]]]
        if v == 1:
            calls = [(function, {}) for function in _ONE]
        else:
            calls = [(function, {"stages_per_worker": v}) for function in _MANY]
        if v == 2:
            calls += [(function, {}) for function in _TWO]
        if v % 2 == 0:
            calls += [(wave, {"waves": v // 2})]
        for function, parameters in calls:
            words = [str(workers), str(chunks), *(f"{k}={x}" for k, x in parameters.items())]
            schedule = function(workers, chunks, **parameters)
            yield v, f"{function.__name__}({', '.join(words)})", schedule
