"""Arguments that are out of range, or of another kind: the rule, ``(name: value)``, the remedy."""

import re
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchgpipe.schedule as S
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, Timeline, plan, trace
from torchgpipe.balance import balance_by_size, balance_by_time, map_by_size, map_by_time
from torchgpipe.balance.blockpartition import solve
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.graphs import communicates
from torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from torchgpipe.testing import Busy

X = torch.rand(8, 4)
CPUS = ["cpu"] * 2
HUGE = 10**30


def layers():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def wrapped(**options):
    return GPipe(layers(), [2, 2], **{"devices": CPUS, "chunks": 2, **options})


def scheduled(**options):
    return ScheduledLoss(wrapped(), **{"loss": F.mse_loss, **options})


def mapped(**options):
    return MappedGPipe(layers(), {"": "cpu"}, **options)


def planned(**options):
    return plan(**{"layers": layers(), "sample": X, "devices": CPUS, "timeout": 0, **options})


def by_time(**options):
    arguments = {"partitions": 2, "module": layers(), "sample": X, "timeout": 0, "device": "cpu"}
    return balance_by_time(**arguments | options)


def by_size(**options):
    return balance_by_size(**{"partitions": 2, "module": layers(), "input": X, **options})


def map_time(devices=CPUS, model=None, **options):
    return map_by_time(devices, *(model or [layers()]), X, **{"timeout": 0, **options})


def map_size(devices=CPUS, model=None, **options):
    return map_by_size(devices, *(model or [layers()]), X, **options)


def yielding(kind):
    """A call of a layer that stashes or pops by a name."""

    def call(name):
        class Layer(nn.Module):
            def forward(self, x):
                yield kind(name, x) if kind is stash else kind(name)
                return x

        return skippable(**{kind.__name__: ["a"]})(Layer)()(X)

    return call


@skippable(stash=["a"])
class Layer(nn.Module):
    def forward(self, x):
        yield stash("a", x)
        return x


def setting(make, name):
    """An attribute that is assigned later."""
    return lambda value: setattr(make(), name, value)


def tracing(model):
    with trace(model):
        pass


SCHEDULE = S.zero_bubble_h1(2, 4)
REPORT = S.simulate(SCHEDULE)
BOUNDS = S.bounds([0, 1], 4)

#: Values of no use anywhere.
NOTHING = (None, "x", 3, 1.5, {"a": 1}, [1], object(), int)
NUMBERS = (None, "x", [], {}, nan, inf, -1, object(), 2j, True)
COUNTS = (None, "x", [], nan, -1, 0, 1.5, HUGE, True)
FUNCTIONS = (None, "x", 3, [], {}, nan)
SEQUENCES = (None, 3, 1.5, nan, {"a": 1}, object(), int)
PATHS = (None, 3, 1.5, [], b"x", True, "")
WORDS = (None, 3, "x", [], {}, nan, int)
DEVICES = ("x", "", 10**30, -1, nan, [], {}, True, "cuda:99")
MODULES = (None, "x", 3, nn.Linear, [nn.Linear(1, 1)])

#: For each function and argument: the call with it, and values that are wrong.
CALLS = {
    "simulate(schedule)": (lambda x: S.simulate(x), NOTHING),
    "simulate(costs)": (lambda x: S.simulate(SCHEDULE, x), NOTHING),
    "validate(schedule)": (lambda x: S.validate(x), NOTHING),
    "validate(capacity)": (lambda x: S.validate(SCHEDULE, x), ("x", nan, -1, [1], {}, inf)),
    "validate(costs)": (lambda x: S.validate(SCHEDULE, costs=x), NOTHING),
    "bounds(placement)": (lambda x: S.bounds(x, 4), (*SEQUENCES, "01", ["a"], [0.0], [[0]], [])),
    "bounds(chunks)": (lambda x: S.bounds([0, 1], x), COUNTS),
    "bounds(costs)": (lambda x: S.bounds([0, 1], 4, x), NOTHING),
    "bounds(skips)": (lambda x: S.bounds([0, 1], 4, skips=x), (*SEQUENCES, [1], ["ab"], [(1, 0)])),
    "gap": (BOUNDS.gap, NOTHING),
    "best(workers)": (lambda x: S.best(x, 4), COUNTS),
    "best(chunks)": (lambda x: S.best(2, x), COUNTS),
    "best(costs)": (lambda x: S.best(2, 4, x), (*FUNCTIONS, lambda v: None)),
    "best(stages_per_worker)": (
        lambda x: S.best(2, 4, stages_per_worker=x),
        (*SEQUENCES, "12", b"x", [], ["a"], [0], [[1]]),
    ),
    "named(name)": (lambda x: S.named(x, 2, 4), WORDS),
    "named(waves)": (lambda x: S.named("wave", 2, 4, waves=x), COUNTS),
    "named(other)": (lambda x: S.named("1f1b", 2, 4, waves=x), (1,)),
    "interleaved": (lambda x: S.interleaved(2, 4, x), COUNTS),
    "v_half(chunks)": (lambda x: S.v_half(2, x), COUNTS),
    "greedy(placement)": (lambda x: S.greedy(x, 2, str), SEQUENCES),
    "greedy(priority)": (lambda x: S.greedy([0], 2, x), FUNCTIONS),
    "greedy(costs)": (lambda x: S.greedy([0], 2, str, costs=x), NOTHING),
    "parse(text)": (lambda x: S.parse(x, [0], 2), (None, 3, [], b"0F0", "x", "(", "0F")),
    "parse(placement)": (lambda x: S.parse("0F0 0B0", x, 1), SEQUENCES),
    "Schedule(program)": (lambda x: S.Schedule((0,), 1, x), (*SEQUENCES, [1], ["0F0"], [[1]])),
    "write_csv(schedule)": (lambda x: S.write_csv(x, "never.csv"), NOTHING),
    "write_csv(path)": (lambda x: S.write_csv(SCHEDULE, x), PATHS),
    "read_csv(path)": (lambda x: S.read_csv(x, [0, 1], 4), PATHS),
    "first": (SCHEDULE.first, COUNTS),
    "recompute(stages)": (lambda x: SCHEDULE.recompute(x), ("x", 9, [None], [[1]], 1.5, -1, nan)),
    "defer_weights": (SCHEDULE.defer_weights, ("x", None, -1, nan, [1], {})),
    "overlap": (SCHEDULE.overlap, (None, 3, "x", "FX", [])),
    "Costs(overlap)": (lambda x: S.simulate(SCHEDULE, S.Costs(overlap=x)), (None, nan, "x", 1)),
    "Costs(F)": (lambda x: S.simulate(SCHEDULE, S.Costs(F=x)), (*NUMBERS, [1], HUGE**20)),
    "Costs(copy)": (lambda x: S.simulate(SCHEDULE, S.Costs(copy=x)), (None, "x", nan, {"a": 1})),
    "GPipe(module)": (lambda x: GPipe(x, [1]), MODULES),
    "GPipe(balance)": (lambda x: GPipe(layers(), x, devices=CPUS), (*SEQUENCES, "x", [nan], [])),
    "GPipe(devices)": (lambda x: wrapped(devices=[x] * 2), DEVICES),
    "GPipe(chunks)": (lambda x: wrapped(chunks=x), (None, "x", [], nan, inf, -1, 0, 1.5, True)),
    "GPipe(checkpoint)": (lambda x: wrapped(checkpoint=x), (*WORDS, ["x"], ["never"])),
    "GPipe(deferred)": (lambda x: wrapped(deferred_batch_norm=x), ("x", None, [], nan)),
    "GPipe.chunks": (setting(wrapped, "chunks"), (None, "x", nan, 0, nn.Linear(1, 1))),
    "GPipe.checkpoint": (setting(wrapped, "checkpoint"), (*WORDS, nn.Linear(1, 1))),
    "GPipe[index]": (lambda x: wrapped()[x], (None, "x", 1.5, [])),
    "MappedGPipe(module)": (lambda x: MappedGPipe(x, {"": "cpu"}), MODULES),
    "MappedGPipe(map)": (lambda x: MappedGPipe(layers(), x), (3, "x", [], {}, {"": "x"}, {1: 1})),
    "MappedGPipe(threads)": (lambda x: mapped(threads=x), (None, "x", 0, -1, nan, 1.5, [])),
    "MappedGPipe(chunks)": (lambda x: mapped(chunks=x), (None, "x", 0, -1, nan, 1.5, [])),
    "MappedGPipe.checkpoint": (setting(mapped, "checkpoint"), (*WORDS, nn.Linear(1, 1))),
    "MappedGPipe.threads": (setting(mapped, "threads"), (None, 0, "x", nn.Linear(1, 1))),
    "ScheduledLoss(model)": (lambda x: ScheduledLoss(x, F.mse_loss), MODULES),
    "ScheduledLoss(loss)": (lambda x: scheduled(loss=x), FUNCTIONS),
    "ScheduledLoss(schedule)": (
        lambda x: scheduled(schedule=x),
        (*WORDS[:-1], lambda w, c: None, nn.Linear(1, 1)),
    ),
    "ScheduledLoss(outputs)": (lambda x: scheduled(outputs=x), (None, "x", [], nan)),
    "ScheduledLoss(scaler)": (lambda x: scheduled(scaler=x), ("x", 3, [], nan)),
    "ScheduledLoss(stages)": (lambda x: scheduled(stages=x), WORDS),
    "ScheduledLoss(compile)": (lambda x: scheduled(stages="graph", compile=x), (-1, [], nan, {})),
    "ScheduledLoss(recompute)": (lambda x: scheduled(stages="graph", recompute=x), WORDS),
    "ScheduledLoss.model": (setting(scheduled, "model"), MODULES),
    "ScheduledLoss.loss": (setting(scheduled, "loss"), FUNCTIONS),
    "ScheduledLoss.schedule": (setting(scheduled, "schedule"), (None, 3, nn.Linear(1, 1))),
    "ScheduledLoss.scaler": (setting(scheduled, "scaler"), ("x", 3)),
    "ScheduledLoss.outputs": (setting(scheduled, "outputs"), (None, "x")),
    "ScheduledLoss.stages": (setting(scheduled, "stages"), WORDS),
    "ScheduledLoss.backend": (setting(scheduled, "backend"), (-1, [], nan)),
    "ScheduledLoss.recompute": (setting(scheduled, "recompute"), WORDS),
    "trace": (tracing, MODULES),
    "Timeline.step": (lambda x: REPORT.timeline.step(x), (None, "x", 1.5, [])),
    "Timeline.svg(path)": (lambda x: REPORT.timeline.svg(x), PATHS),
    "Timeline.svg(scale)": (lambda x: REPORT.timeline.svg("never", scale=x), ("x", 0, nan, [])),
    "Timeline.svg(others)": (lambda x: REPORT.timeline.svg("never", x), NOTHING),
    "Timeline.save_trace": (lambda x: Timeline([]).save_trace(x), PATHS),
    "plan(layers)": (lambda x: planned(layers=x), MODULES),
    "plan(devices)": (lambda x: planned(devices=x), (3, "x", [], {"a": 1}, [nan])),
    "plan(memory)": (lambda x: planned(memory=x), ("x", 0, -1, nan, [1], {}, object())),
    "plan(optimizer)": (lambda x: planned(optimizer=x), (None, "x", -1, nan, [], lambda p: None)),
    "plan(batch)": (lambda x: planned(batch=x), ("x", 0, -1, nan, 1.5, [])),
    "plan(loss)": (lambda x: planned(loss=x), FUNCTIONS[1:]),
    "plan(targets)": (lambda x: planned(targets=x), (None, "x", 3, X, {})),
    "plan(chunks)": (lambda x: planned(chunks=x), (0, "x", [], [0], [None], [nan], {}, [99])),
    "plan(timeout)": (lambda x: planned(timeout=x), NUMBERS),
    "balance_by_time(partitions)": (lambda x: by_time(partitions=x), COUNTS),
    "balance_by_time(module)": (lambda x: by_time(module=x), MODULES),
    "balance_by_time(args)": (lambda x: by_time(args=x), (None, "x", 3, {})),
    "balance_by_time(kwargs)": (lambda x: by_time(kwargs=x), ("x", 3, [])),
    "balance_by_time(timeout)": (lambda x: by_time(timeout=x), (*NUMBERS, HUGE)),
    "balance_by_time(device)": (lambda x: by_time(device=x), DEVICES),
    "balance_by_time(progress)": (lambda x: by_time(progress=x), (None, "x", X)),
    "balance_by_size(chunks)": (lambda x: by_size(chunks=x), (None, "x", -1, 0, nan, 1.5, [])),
    "balance_by_size(param_scale)": (lambda x: by_size(param_scale=x), NUMBERS),
    "map_by_time(devices)": (map_time, (None, 3, "x", {"a": 1}, [nan], [None], [], [-1], [True])),
    "map_by_time(model)": (lambda x: map_time(model=[x]), MODULES),
    "map_by_time(no_split)": (lambda x: map_time(no_split=x), ("x", 3, [1], nan)),
    "map_by_time(timeout)": (lambda x: map_time(timeout=x), (*NUMBERS, HUGE)),
    "map_by_size(devices)": (map_size, (None, 3, "x", {"a": 1}, [nan], [None], [], [-1], [True])),
    "map_by_size(model)": (lambda x: map_size(model=[x]), MODULES),
    "map_by_size(param_scale)": (lambda x: map_size(param_scale=x), NUMBERS),
    "solve(costs)": (lambda x: solve(x, 1), (*SEQUENCES, "12", [nan], [inf], [-1], ["x"], [None])),
    "solve(partitions)": (lambda x: solve([1.0, 2.0], x), COUNTS),
    "DeferredBatchNorm(features)": (DeferredBatchNorm, (None, "x", -1, 1.5, nan, [])),
    "DeferredBatchNorm(eps)": (lambda x: DeferredBatchNorm(2, x), NUMBERS),
    "DeferredBatchNorm(momentum)": (lambda x: DeferredBatchNorm(2, 1e-5, x), NUMBERS[1:]),
    "DeferredBatchNorm(chunks)": (lambda x: DeferredBatchNorm(2, chunks=x), (None, "x", 0, nan)),
    "verify_skippables": (verify_skippables, MODULES),
    "skippable(stash)": (lambda x: skippable(stash=x), (None, "x", 3, [1], {"a": 1})),
    "skippable(pop)": (lambda x: skippable(pop=x), (None, "x", 3, [1], {"a": 1})),
    "skippable(class)": (skippable(stash=["a"]), (None, "x", int, nn.Linear(1, 1))),
    "stash(name)": (yielding(stash), (None, 3, [], {})),
    "pop(name)": (yielding(pop), (None, 3, [], {})),
    "isolate(ns)": (lambda x: Layer().isolate(x), NOTHING),
    "isolate(only)": (lambda x: Layer().isolate(Namespace(), only=x), ("a", 3, [1], ["b"])),
    "convert_deferred_batch_norm(module)": (
        DeferredBatchNorm.convert_deferred_batch_norm,
        MODULES,
    ),
    "convert_deferred_batch_norm(chunks)": (
        lambda x: DeferredBatchNorm.convert_deferred_batch_norm(layers(), x),
        (None, "x", 0, nan, 1.5),
    ),
    "communicates": (communicates, (*NOTHING, nan, [], torch.add)),
    "Busy(forward)": (lambda x: Busy(x), (None, "x", -1, nan, inf, [])),
    "Busy(features)": (lambda x: Busy(features=x), COUNTS),
    "Busy(name)": (lambda x: Busy(name=x), (None, 3, [])),
}


@pytest.mark.parametrize("name", CALLS)
def test_rule_value_and_remedy(name):
    call, values = CALLS[name]
    for value in values:
        with pytest.raises((TypeError, ValueError)) as found:
            call(value)
        assert re.search(r".+\(.*: ?.*\).*; .+", str(found.value), re.DOTALL), str(found.value)
        assert type(found.value) in (TypeError, ValueError)


def test_iterators_are_read_once():
    """An iterator is consumed by the first who reads it."""
    assert wrapped(devices=iter(CPUS)).balance == [2, 2]
    assert GPipe(layers(), iter([2, 2]), devices=CPUS).balance == [2, 2]
    assert S.bounds(iter([0, 1]), 4, skips=iter([(0, 1)])) == S.bounds([0, 1], 4, skips=[(0, 1)])
    assert S.greedy(iter([0, 1]), 2, str, skips=iter([(0, 1)])).skips == ((0, 1),)
    assert map_size(iter(CPUS)) == map_size(CPUS)
    assert len(S.best(2, 4, stages_per_worker=iter([1, 2]))) > 1
