"""Random programs on random streams, compared with graphs of all their steps."""

from collections import Counter
from functools import cache
from itertools import combinations, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.size import some
from tests.virtual.programs import new_streams, one, place, read
from torchgpipe.testing import observe

STREAMS, EVENTS = range(4), range(2)
PARTS = [slice(0, 8), slice(0, 4), slice(4, 8)]
ACCESS = st.tuples(
    st.just("access"),
    st.sampled_from(STREAMS[:3]),
    st.sampled_from(range(len(PARTS))),
    st.booleans(),
)
WORK = st.tuples(st.just("work"), st.sampled_from(STREAMS), st.sampled_from([0, 1, 2, 5]))
ORDER = [
    st.tuples(st.just("record"), st.sampled_from(STREAMS), st.sampled_from(EVENTS)),
    st.tuples(st.just("wait"), st.sampled_from(STREAMS), st.sampled_from(EVENTS)),
    st.tuples(st.just("synchronize"), st.sampled_from(STREAMS)),
]


def programs(step):
    return st.lists(st.one_of(step, step, step, step, *ORDER, *ORDER[:2]), min_size=15, max_size=50)


def edges_of(program):
    """The steps that directly precede each step: on its stream, by an event, or by the host."""
    edges = []
    last = {}  # The last step of each stream.
    records = {}  # The last record of each event.
    synchronized = []
    for index, (kind, stream, *rest) in enumerate(program):
        before = list(synchronized)
        if stream in last:
            before.append(last[stream])
        if kind == "wait" and rest[0] in records:
            before.append(records[rest[0]])
        if kind == "record":
            records[rest[0]] = index
        if kind == "synchronize":
            synchronized.append(index)
        last[stream] = index
        edges.append(before)
    return edges


def expected(program):
    """Races of each step, by a search in a graph of all steps.

    Where a later access stands for earlier ones, since it is ordered after them and excludes at
    least as much, that one alone is to be reported.
    """
    edges = edges_of(program)

    def reaches(i, j):
        todo, seen = [j], set()
        while todo:
            step = todo.pop()
            if step == i:
                return True
            if step not in seen:
                seen.add(step)
                todo.extend(edges[step])
        return False

    accesses = [
        (i, step[1], set(range(8)[PARTS[step[2]]]), step[3])
        for i, step in enumerate(program)
        if step[0] == "access"
    ]

    def stands_for(later, earlier):
        (k, stream2, bytes2, write2), (i, stream1, bytes1, write1) = later, earlier
        return (
            reaches(i, k) and bytes1 <= bytes2 and (write2 or (stream1 == stream2 and not write1))
        )

    races = [Counter() for _ in program]
    for first, second in combinations(accesses, 2):
        (i, stream1, bytes1, write1), (j, stream2, bytes2, write2) = first, second
        if (
            bytes1 & bytes2
            and (write1 or write2)
            and not reaches(i, j)
            and not any(stands_for(other, first) for other in accesses if i < other[0] < j)
        ):
            kind = f"{'write' if write2 else 'read'} after {'write' if write1 else 'read'}"
            races[j][kind, stream1, stream2] += 1
    return races


def order(kind, stream, event=None):
    if kind == "record":
        stream.record_event(event)
    elif kind == "wait":
        stream.wait_event(event)
    else:
        stream.synchronize()


@settings(max_examples=some(300, 40))
@given(programs(ACCESS))
def test_races_are_what_no_path_orders(devices, program):
    # The last stream is another device's: it only passes on what it waited for.
    streams = [*new_streams(devices[0], 3), *new_streams(devices[1], 1)]
    numbers = {place(stream): number for number, stream in enumerate(streams)}
    x = one(devices[0], 8)
    events = [torch.Event() for _ in EVENTS]
    steps = []
    before = Counter()
    with observe() as seen:
        for kind, number, *rest in program:
            stream = streams[number]
            if kind == "access":
                part, write = rest
                with stream:
                    x[PARTS[part]].fill_(1) if write else read(x[PARTS[part]])
            else:
                order(kind, stream, *[events[event] for event in rest])
            now = Counter()
            for race in seen.races:
                key = race.kind, numbers[race.first.stream], numbers[race.second.stream]
                now[key] += race.count
            steps.append(now - before)
            before = now
    assert steps == expected(program)


# ---------------------------------------------------------------- time


@settings(max_examples=some(200, 30))
@given(programs(WORK))
def test_time_is_the_longest_path(devices, program):
    streams = [*new_streams(devices[0], 2), *new_streams(devices[1], 2)]
    tensors = [one(stream.device) for stream in streams]
    events = [torch.Event() for _ in EVENTS]
    with observe() as seen:
        for kind, number, *rest in program:
            if kind == "work":
                with streams[number]:
                    read(tensors[number], "work", rest[0])
            else:
                order(kind, streams[number], *[events[event] for event in rest])

    edges = edges_of(program)

    @cache
    def end(index):
        return start(index) + (program[index][2] if program[index][0] == "work" else 0)

    @cache
    def start(index):
        return max(map(end, edges[index]), default=0)

    work = [i for i, step in enumerate(program) if step[0] == "work" and step[2]]
    spans = seen.spans
    assert [(span.stream, span.start, span.end) for span in spans] == [
        (place(streams[program[i][1]]), start(i), end(i)) for i in work
    ]
    assert seen.makespan == max(map(end, work), default=0)

    # Values that are derived from the spans.
    path = seen.critical_path
    assert sum(span.end - span.start for span in path) == seen.makespan
    assert all(before.end == after.start for before, after in pairwise(path))
    for stream, busy in seen.busy.items():
        ends = [span.end for span in spans if span.stream == stream]
        waited = sum(wait.end - wait.start for wait in seen.waits if wait.stream == stream)
        assert busy + waited == ends[-1]
        assert busy + seen.idle[stream] == seen.makespan
    for wait in seen.waits:
        assert spans[wait.span].start == wait.end == spans[wait.cause].end
