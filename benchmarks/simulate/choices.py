"""Choices of the planner, beside the best of all that it could have chosen.

Steps run dry: on virtual accelerators that compute shapes alone, with the times of described
hardware. A setting is a schedule with a number of micro-batches, a cut and modes. Of all of them, a
search by branch and bound finds the fastest that fits. If that seems to be faster than what was
chosen, it runs, too.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, pairwise, zip_longest
from math import inf
from typing import Any

import torch
from torch import nn

from benchmarks.simulate.choice_models import LLAMA, MODELS, Model, llama
from benchmarks.simulate.exhaustive import exhausted
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.partition.keeping import checkpointed, words_of
from torchgpipe.planner.blocks import recorded
from torchgpipe.planner.given import limits_of, state_of
from torchgpipe.planner.memory import Footprint, weights_of
from torchgpipe.planner.problem import problem_of
from torchgpipe.planner.search import search
from torchgpipe.planner.trial import Trial, Trials
from torchgpipe.testing import dry_run, observe
from torchgpipe.testing.dry_run import weightless, without_values
from torchgpipe.testing.hardware import NAMED

__all__ = ["measure", "measure_map"]

HARDWARE = NAMED["a100-80gb"]

#: The limits of memory: none, and shares of what the fastest one takes beyond weights and the like.
SHARES = (None, 0.7, 0.4)

#: What the simulator's times may be off: a setting that is so much faster is no better for sure.
NEAR = 0.015

#: As many maps all run, and by how much a predicted peak of one may be too high.
FEW, OFF = 16, 1.05

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
        known: what was measured before, for each limit. What is chosen now has the same limits, and
            is compared with the best of it, too.

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

        yield {**row, **compared(best, chunks, limit, run, before)}


def least_of(ranking: Sequence[Trial]) -> float:
    """The bytes of the fullest device between steps, if weights are spread evenly."""
    weights = [x.weights for x in ranking[0].problem.layers]
    state = ranking[0].problem.state
    whole = sum(x.all + (1 + state) * x.trainable for x in weights)
    largest = max(x.all + (1 + state) * x.trainable for x in weights)
    return float(max(whole / len(ranking[0].problem.places), largest))


def compared(
    chosen: Trial,
    chunks: Sequence[int],
    limit: float | None,
    run: Callable[[Trial], tuple[float, float]],
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """Run what was chosen, and the fastest of all settings if it seems to be faster.

    Args:
        chosen: what was chosen.
        chunks: the numbers of micro-batches to choose from.
        limit: the bytes that a device may use; None for no limit.
        run: runs a trial, and returns its milliseconds and its peak.
        before: what was measured before, of which the best may be better still.
    """
    row: dict[str, Any] = {"fits": not chosen.excess, "chosen": described(chosen)}
    room = limit or inf
    slowest = inf if chosen.excess else (1 - NEAR) * chosen.time
    # Trials of its own, with no margin.
    found = exhausted(Trials(chosen.problem), chunks, slowest, room)
    row |= {"settings": found.settings, "bounded": found.bounded, "simulated": found.simulated}
    row |= {"left": len(found.unfinished), "faster": None}
    ms = inf
    if not chosen.excess:
        ms, peak = run(chosen)
        row |= {"ms": ms, "predicted_ms": chosen.time}
        row |= {"peak": peak, "predicted_peak": max(chosen.memory)}
    best = {"best": described(chosen), "best_ms": None if ms == inf else ms}
    if found.best is not None:
        other, memory = run(found.best)
        row["faster"] = {"ms": other, "predicted_ms": found.best.time, "peak": memory}
        if memory <= room and other < ms:
            ms, best = other, {"best": described(found.best), "best_ms": other}
    if before is not None and (before["best_ms"] or inf) < ms:
        best = {key: before[key] for key in ("best", "best_ms")}
    return row | best


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
    """Choose a device map of a Llama for each limit, and compare it with others.

    These are all that may fit by their predicted peaks, or if they are many, those that have one
    boundary between devices a block to the left or to the right.
    """
    ran: dict[tuple[int, ...], tuple[float, float]] = {}
    peak_of = predicted_of_map(devices, chunks)
    limit: float | None = None
    most = least = 0.0
    for share in SHARES:
        if share is not None:
            limit = least + share * (most - least)
        start = time.process_time()
        sizes = map_of(devices, chunks, limit)
        took = time.process_time() - start
        row = {"model": "Llama", "n": len(devices), "share": share, "limit": limit}
        row |= {"seconds": took, "fits": sizes is not None, "faster": None}
        if sizes is None:
            # Nothing fits where not even what is nearest to equal shares does.
            sizes = next(iter(ran))
        else:
            ran.setdefault(sizes, run_map(sizes, devices, chunks))
            row |= {"ms": ran[sizes][0], "predicted_ms": None}
            row |= {"peak": ran[sizes][1], "predicted_peak": peak_of(sizes)}
        room = limit or inf
        every = maps_of(sum(sizes), len(sizes))
        hopeful = [x for x in every if peak_of(x) <= OFF * room]
        tried = hopeful if len(hopeful) <= FEW else beside(sizes)
        for other in tried:
            ran.setdefault(other, run_map(other, devices, chunks))
        if share is None:
            most, least = ran[sizes][1], 16 * weights_of_map(sizes)
        named = {"schedule": "map", "chunks": chunks, "modes": CHECKPOINT}
        fitting = {x: ms for x, (ms, peak) in ran.items() if peak <= room}
        winner = min(fitting, key=fitting.__getitem__, default=sizes)
        left = len({*hopeful} - ran.keys())
        row |= {"settings": len(every), "bounded": len(every), "simulated": 0, "left": left}
        row |= {"chosen": {**named, "balance": [*sizes]}}
        row |= {"best": {**named, "balance": [*winner]}}
        yield row | {"best_ms": min(fitting.values(), default=None)}


def maps_of(units: int, devices: int) -> list[tuple[int, ...]]:
    """The sizes of all maps of so many parts."""
    cuts = combinations(range(1, units), devices - 1)
    return [tuple([b - a for a, b in pairwise((0, *x, units))]) for x in cuts]


def predicted_of_map(
    devices: Sequence[torch.device], chunks: int
) -> Callable[[Sequence[int]], float]:
    """A function of the sizes of a map: the fullest device's peak, as the map "auto" has it."""
    with without_values(HARDWARE, 1.0), weightless():
        model = llama().to(devices[0])
        sample = {key: x.to(devices[0]) for key, x in sample_of(ROWS).items()}
        blocks = units_of(model)
        with observe(costs=HARDWARE):
            found = recorded(model, blocks, (), sample, devices[0])
        again = checkpointed(CHECKPOINT, chunks)
        state = state_of(torch.optim.AdamW)
        footprint = Footprint(found, weights_of(model, blocks), chunks, again, state)
    names = [*blocks]
    # What belongs to no block is on the first device.
    need = cache(lambda a, b: footprint.need({*names[a:b]} | ({None} if not a else set()))[0])

    def largest(sizes: Sequence[int]) -> float:
        return float(max(need(*x) for x in pairwise(accumulate(sizes, initial=0))))

    return largest


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
