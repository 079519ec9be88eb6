"""Explicit schedules: write down what runs when, validate it, simulate it.

::

    schedule = one_f_one_b(workers=4, chunks=8).split().defer_weights([0, 1, 2, 3])
    print(schedule)
    assert not validate(schedule, capacity=4)
    print(simulate(schedule, Costs(F=1, I=1.2, W=0.8)))

There are five ways to make a schedule, from coarse to fine: by name (:func:`named`), by a function
of the numbers of workers and micro-batches, by rewriting another schedule (``split``,
``defer_weights``, ``overlap``, ``pair``, ``recompute``, ``first``), by a priority
(:func:`greedy`), or instruction by instruction (:func:`parse`).
"""

from __future__ import annotations

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
from torchgpipe.schedule.by_name import named
from torchgpipe.schedule.candidates import Candidate, best
from torchgpipe.schedule.costs import Costs
from torchgpipe.schedule.greedy import greedy
from torchgpipe.schedule.language import Schedule, parse, read_csv, write_csv
from torchgpipe.schedule.limits import Bounds, bounds
from torchgpipe.schedule.program import Op, Overlap
from torchgpipe.schedule.simulator import Report, simulate, validate

__all__ = ["Op", "Overlap", "Schedule", "Costs", "parse", "read_csv", "write_csv"]
__all__ += ["validate", "simulate", "Report", "bounds", "Bounds", "best", "Candidate"]
__all__ += ["named", "greedy", "fill_drain", "one_f_one_b", "interleaved", "looped_bfs"]
__all__ += ["zero_bubble_h1", "zero_bubble_h2", "interleaved_zero_bubble"]
__all__ += ["zero_bubble_v", "v_half", "v_min", "dualpipe_v", "wave"]
