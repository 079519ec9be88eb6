"""The built-in schedules by their names, and all of them in a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from inspect import signature

from torchgpipe.checks import verify_kind
from torchgpipe.schedule.built_in import ANY_STAGES, ONE_STAGE, TWO_STAGES, wave
from torchgpipe.schedule.language import Schedule

__all__: list[str] = ["named"]


_BUILT_IN = {f.__name__: f for f in (*ONE_STAGE, *ANY_STAGES, *TWO_STAGES, wave)}
#: Names from papers and from torch.distributed.pipelining, which :func:`named` takes as well.
_ALIASES = {
    "gpipe": "fill_drain",
    "1f1b": "one_f_one_b",
    "interleaved1f1b": "interleaved",
    "zbh1": "zero_bubble_h1",
    "zbh2": "zero_bubble_h2",
    "zbv": "zero_bubble_v",
    "zbvzerobubble": "zero_bubble_v",
    "hanayo": "wave",
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
    names = {x.replace("_", ""): x for x in _BUILT_IN} | _ALIASES
    word = re.sub("[-_ ]", "", name).lower()
    if word not in names:
        raise ValueError(
            f"name must be that of a built-in schedule (name: {name!r}); use one of "
            + ", ".join([*_ALIASES, *_BUILT_IN])
        )
    function: Callable[..., Schedule] = _BUILT_IN[names[word]]
    known = [*signature(function).parameters]
    for parameter in parameters:
        if parameter not in known:
            raise TypeError(
                f"a schedule takes the arguments of its function (name: {name!r}, {parameter}: "
                f"{parameters[parameter]!r}); use {', '.join(known)}"
            )
    return function(workers, chunks, **parameters)


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
            calls = [(function, {}) for function in ONE_STAGE]
        else:
            calls = [(function, {"stages_per_worker": v}) for function in ANY_STAGES]
        if v == 2:
            calls += [(function, {}) for function in TWO_STAGES]
        if v % 2 == 0:
            calls += [(wave, {"waves": v // 2})]
        for function, parameters in calls:
            words = [str(workers), str(chunks), *(f"{k}={x}" for k, x in parameters.items())]
            schedule = function(workers, chunks, **parameters)
            yield v, f"{function.__name__}({', '.join(words)})", schedule
