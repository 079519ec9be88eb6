"""Choices of the planner, beside the best of all that it could have chosen.

Steps run dry: on virtual accelerators that compute shapes alone, with the times of described
hardware. A setting is a schedule with a number of micro-batches, a cut and modes. The simulator
tells the time of each in less than a millisecond, and nothing is faster than with all kept, so few
of them remain that can be better than the one that was chosen. These run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product, zip_longest
from math import inf
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from benchmarks.simulate.choice_models import LLAMA, MODELS, Model, llama
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.partition.keeping import Keeping, words_of
from torchgpipe.planner.cuts import others
from torchgpipe.planner.given import limits_of
from torchgpipe.planner.search import Search, problem_of, search
from torchgpipe.planner.trial import Trial
from torchgpipe.testing import dry_run, observe
from torchgpipe.testing.dry_run.run import weightless, without_values
from torchgpipe.testing.hardware import NAMED

__all__ = ["measure", "measure_map"]

HARDWARE = NAMED["a100-80gb"]

#: The limits of memory: none, and shares of what the fastest one takes beyond weights and the like.
SHARES = (None, 0.7, 0.4)

#: As many combinations of modes are all tried.
FEW = 256

#: As many settings run for each choice, and how much their memory may seem too large.
RUNS, HOPE = 4, 1.1

MODES = ("never", "except_last", "always", "offload")

#: The mode of the Llama, and the rows of its micro-batches.
CHECKPOINT, ROWS = "except_last", 4


def measure(
    name: str,
    devices: Sequence[torch.device],
    chunks: Sequence[int],
    known: Sequence[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Choose a setting of a model for each limit, and compare it with all others.

    Args:
        name: the model.
        devices: the accelerators.
        chunks: the numbers of micro-batches to choose from.
        known: what was measured before, for each limit. What is chosen now is compared with the
            best of it, under the same limits; nothing else runs.

    Yields:
        For each limit what was chosen, what is best, and what both take.
    """
    model = MODELS[name]
    with without_values(HARDWARE, 0.0), weightless():
        layers, data = model.make(), model.data()
        start = time.process_time()
        options: Any = {"loss": model.loss, "targets": data[1:], "timeout": 0}
        with observe(costs=HARDWARE):
            problem = problem_of(layers, data[0], devices, len(data[0]), **options)
    measuring = time.process_time() - start
    limit: float | None = None
    most = least = 0.0
    ran: dict[Any, tuple[float, float]] = {}
    for share, before in zip_longest(SHARES, known):
        if before is not None:
            limit = before["limit"]
        elif share is not None:
            limit = least + share * (most - least)
        room = limits_of(limit or inf, devices)
        start = time.process_time()
        ranking = search(replace(problem, memory=room), chunks)
        took = measuring + time.process_time() - start
        best = ranking[0]
        if share is None:
            most = max(best.memory)
            least = least_of(ranking)
        row = {"model": name, "n": len(devices), "share": share, "limit": limit, "seconds": took}

        def run(trial: Trial) -> tuple[float, float]:
            key = trial.setting.name, trial.schedule.chunks, trial.balance, trial.modes
            if key not in ran:
                ran[key] = run_dry(trial, model, layers, data, devices)
            return ran[key]

        yield {**row, **compared(ranking, best, limit, run, before)}


def least_of(ranking: Sequence[Trial]) -> float:
    """The bytes of the fullest device between steps, if weights are spread evenly."""
    weights = [x.weights for x in ranking[0].problem.layers]
    state = ranking[0].problem.state
    whole = sum(x.all + (1 + state) * x.trainable for x in weights)
    largest = max(x.all + (1 + state) * x.trainable for x in weights)
    return float(max(whole / len(ranking[0].problem.places), largest))


def compared(
    ranking: Sequence[Trial],
    chosen: Trial,
    limit: float | None,
    run: Callable[[Trial], tuple[float, float]],
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """Run what was chosen, and whatever may be better.

    Args:
        ranking: what was found, the best first.
        chosen: what was chosen.
        limit: the bytes that a device may use; None for no limit.
        run: runs a trial, and returns its milliseconds and its peak.
        before: what was measured before, if the best of it is known.
    """
    row: dict[str, Any] = {"fits": not chosen.excess, "chosen": described(chosen)}
    bound = limit or inf
    if before is None:
        found, count = better(ranking, chosen, HOPE * bound)
        row |= {"settings": count, "hopeful": len(found)}
    else:
        found = []
        row |= {key: before[key] for key in ("settings", "hopeful")}
    ms = peak = inf
    if not chosen.excess:
        ms, peak = run(chosen)
        row |= {"ms": ms, "predicted_ms": chosen.time}
        row |= {"peak": peak, "predicted_peak": max(chosen.memory)}
    best, fastest = chosen, ms
    for trial in found[:RUNS]:
        other, memory = run(trial)
        if memory <= bound and other < fastest:
            best, fastest = trial, other
    if before is not None and (before["best_ms"] or inf) < fastest:
        return row | {key: before[key] for key in ("best", "best_ms")}
    return row | {"best": described(best), "best_ms": None if fastest == inf else fastest}


def described(trial: Trial) -> dict[str, Any]:
    """A setting, for the result."""
    modes = trial.checkpoint
    words = [modes] if isinstance(modes, str) else words_of([*trial.modes], len(trial.modes))
    return {
        "schedule": trial.setting.name,
        "chunks": trial.schedule.chunks,
        "balance": [*trial.balance],
        "modes": " ".join(x if isinstance(modes, str) else x[0] for x in words),
    }


def better(ranking: Sequence[Trial], chosen: Trial, memory: float) -> tuple[list[Trial], int]:
    """The settings that may be faster than the one that was chosen, the fastest first.

    Of each cut there are the fastest modes that fit, and no cuts that cannot be among those that
    run: nothing is faster than with all kept, so most need not be looked at any closer. Without a
    limit there is the fastest of each schedule, too: what the simulator leaves out may be more for
    one than for another.

    Returns:
        The settings, and how many were looked at.
    """
    # A search of its own, with no margin and no limit.
    look = Search(replace(ranking[0].problem, memory=[memory] * len(ranking[0].problem.places)))
    bound = inf if chosen.excess else chosen.time
    found: list[Trial] = []
    count = 0
    for planned in ranking:
        setting, pairs = planned.setting, []
        for balance in (planned.balance, *map(tuple[int, ...], others(planned.balance))):
            every = modes_of(len(balance), planned.modes, few=bool(chosen.excess))
            count += len(every)
            fastest = look.fastest(setting, balance)
            if fastest < bound:
                pairs.append((fastest, balance, every))
        for fastest, balance, every in sorted(pairs, key=itemgetter(0)):
            if len(found) >= RUNS and fastest >= found[RUNS - 1].time:
                break
            # The first keep all, than which nothing is faster.
            kept = look.trial(setting, balance, every[0])
            if not kept.excess:
                every = every[:1]
            timed = sorted([(look.trial(setting, balance, x).time, k) for k, x in enumerate(every)])
            trials = (look.trial(setting, balance, every[k]) for time, k in timed if time < bound)
            best = next((x for x in trials if not x.excess), None)
            if best is not None:
                found = sorted([*found, best], key=lambda x: x.time)
    near = [x for x in ranking[1:] if not x.excess and x.time < 1.05 * bound]
    return sorted([*found, *near[:2]], key=lambda x: x.time), count


def modes_of(count: int, planned: Sequence[Keeping], *, few: bool) -> list[tuple[Keeping, ...]]:
    """Modes of so many partitions: all, or if these are many, the likely ones.

    That is one mode for all; one for the first partitions and another for the rest; and what was
    planned, with one of them changed.

    Args:
        count: the number of partitions.
        planned: what was planned.
        few: whether one mode for all is enough, since the planner says that nothing fits.
    """
    if few:
        return [(mode,) * count for mode in MODES]
    if len(MODES) ** count <= FEW:
        return [*product(MODES, repeat=count)]
    found: dict[tuple[Keeping, ...], None] = {
        (a,) * k + (b,) * (count - k): None for k in range(count + 1) for a in MODES for b in MODES
    }
    found |= {(*planned[:k], mode, *planned[k + 1 :]): None for k in range(count) for mode in MODES}
    return [*found]


def run_dry(
    trial: Trial,
    model: Model,
    layers: nn.Sequential,
    data: Sequence[torch.Tensor],
    devices: Sequence[torch.device],
) -> tuple[float, float]:
    """Train as a trial says, dry: the milliseconds of a step, and its peak of memory."""

    def make(found: list[torch.device]) -> Callable[[], None]:
        places = [found[w] for w in trial.schedule.placement]
        gpipe = GPipe(
            copy.deepcopy(layers),
            [*trial.balance],
            devices=places,
            chunks=trial.schedule.chunks,
            checkpoint=trial.checkpoint,
        )
        assert trial.setting.name is not None
        training = ScheduledLoss(gpipe, model.loss, trial.setting.name)
        optimizer = torch.optim.AdamW(gpipe.parameters())
        input, target = data[0].to(places[0]), data[1].to(places[-1])

        def step() -> None:
            optimizer.zero_grad()
            training(input, target).backward()
            # The time is that of forward and backward.
            if not optimizer.state:
                optimizer.step()

        return step

    found = dry_run(make, len(devices), HARDWARE)
    return 1000 * found.time, float(max(found.allocated))


def measure_map(devices: Sequence[torch.device], chunks: int) -> Iterator[dict[str, Any]]:
    """Choose a device map of a Llama for each limit, and compare it with those next to it.

    These have one boundary between devices a block to the left or to the right.
    """
    ran: dict[tuple[int, ...], tuple[float, float]] = {}
    limit: float | None = None
    most = least = 0.0
    for share in SHARES:
        if share is not None:
            limit = least + share * (most - least)
        start = time.process_time()
        sizes = map_of(devices, chunks, limit)
        took = time.process_time() - start
        row = {"model": "Llama", "n": len(devices), "share": share, "limit": limit}
        row |= {"seconds": took, "fits": sizes is not None, "hopeful": 0}
        if sizes is None:
            # Nothing fits where not even what is nearest to equal shares does.
            sizes = next(iter(ran))
        else:
            ran.setdefault(sizes, run_map(sizes, devices, chunks))
            row |= {"ms": ran[sizes][0], "predicted_ms": None}
            row |= {"peak": ran[sizes][1], "predicted_peak": None}
        near = beside(sizes)
        for other in near:
            ran.setdefault(other, run_map(other, devices, chunks))
        bound = limit or inf
        if share is None:
            most, least = ran[sizes][1], 16 * weights_of_map(sizes)
        named = {"schedule": "map", "chunks": chunks, "modes": CHECKPOINT}
        fitting = {x: ms for x, (ms, peak) in ran.items() if peak <= bound}
        winner = min(fitting, key=fitting.__getitem__, default=sizes)
        row |= {"settings": len(near) + 1, "chosen": {**named, "balance": [*sizes]}}
        row |= {"best": {**named, "balance": [*winner]}}
        yield row | {"best_ms": min(fitting.values(), default=None)}


def weights_of_map(sizes: Sequence[int]) -> int:
    """The most parameters of a device, by the number of blocks of each."""
    with weightless():
        model = llama()
    blocks = [sum(x.numel() for x in block.parameters()) for block in units_of(model).values()]
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return max(sum(blocks[a:b]) for a, b in pairwise(ends))


def units_of(model: Any) -> dict[str, nn.Module]:
    """The parts of a Llama that follow each other, of which a device has some."""
    inner = model.model
    found = {"model.embed_tokens": inner.embed_tokens}
    found |= {f"model.layers.{k}": layer for k, layer in enumerate(inner.layers)}
    return found | {"model.norm": inner.norm, "lm_head": model.lm_head}


def sample_of(rows: int) -> dict[str, torch.Tensor]:
    """Tokens of some rows, as input and as labels."""
    tokens = torch.randint(LLAMA[0], (rows, LLAMA[1]))
    return {"input_ids": tokens, "labels": tokens}


def map_of(
    devices: Sequence[torch.device], chunks: int, limit: float | None
) -> tuple[int, ...] | None:
    """The number of parts of each device by the map "auto"; None if nothing fits."""
    with without_values(HARDWARE, 1.0), weightless():
        model = llama().to(devices[0])
        sample = {key: x.to(devices[0]) for key, x in sample_of(ROWS).items()}
        options: dict[str, Any] = {"chunks": chunks, "checkpoint": CHECKPOINT, "memory": limit}
        try:
            with observe(costs=HARDWARE):
                pipe = MappedGPipe(model, "auto", sample=sample, devices=devices, **options)
        except ValueError as error:
            if "must fit" not in str(error):
                raise
            return None
        places = [next(x.parameters()).device for x in units_of(pipe.module).values()]
        del pipe, model
    return tuple([places.count(x) for x in devices])


def beside(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The sizes with one boundary moved by one."""
    found = []
    for k in range(len(sizes) - 1):
        for step in (-1, 1):
            moved = [*sizes]
            moved[k] += step
            moved[k + 1] -= step
            if min(moved) > 0:
                found.append(tuple(moved))
    return found


def run_map(
    sizes: Sequence[int], devices: Sequence[torch.device], chunks: int
) -> tuple[float, float]:
    """Train a Llama by a map, dry: the milliseconds of a step, and its peak of memory."""

    def make(found: list[torch.device]) -> Callable[[], None]:
        model = llama()
        places = [device for device, count in zip(found, sizes) for _ in range(count)]
        device_map = dict(zip(units_of(model), places)) | {"model.rotary_emb": found[0]}
        pipe = MappedGPipe(model, device_map, chunks=chunks, checkpoint=CHECKPOINT)
        optimizer = torch.optim.AdamW(pipe.parameters())
        sample = {key: x.to(found[0]) for key, x in sample_of(ROWS * chunks).items()}

        def step() -> None:
            optimizer.zero_grad()
            pipe(**sample).loss.mean().backward()
            if not optimizer.state:
                optimizer.step()

        return step

    found = dry_run(make, len(devices), HARDWARE, value_read=1.0)
    return 1000 * found.time, float(max(found.allocated))
