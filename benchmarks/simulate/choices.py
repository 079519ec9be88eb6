"""Choices of the planner, beside the best that is known of all that it could have chosen.

Steps run dry: on virtual accelerators that compute shapes alone, with the times of described
hardware. A setting is a schedule, a cut and modes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.simulate.choice_models import LLAMA, MODELS, Model, llama
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.planner.given import limits_of
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.proving import PROVEN, ranked
from torchgpipe.planner.trial import Proof, Trial, settings
from torchgpipe.testing import dry_run, observe
from torchgpipe.testing.dry_run import weightless, without_values
from torchgpipe.testing.hardware import NAMED

__all__ = ["measure", "measure_map"]

#: A line of the result.
Row: TypeAlias = dict[str, Any]

HARDWARE = NAMED["a100-80gb"]

#: The mode of the Llama, and the rows of its micro-batches.
CHECKPOINT, ROWS = "except_last", 4


def measure(
    name: str, devices: Sequence[torch.device], rows: Sequence[Row], chunks: int
) -> Iterator[Row]:
    """Choose a setting of a model for each limit, by predictions alone, and with proof.

    Args:
        name: the model.
        devices: the accelerators.
        rows: for each limit its bytes, and the best setting that is known.
        chunks: the number of micro-batches.

    Yields:
        What was chosen for each limit, and what it and the best one take.
    """
    model = MODELS[name]
    with without_values(HARDWARE, 0.0), weightless():
        layers, data = model.make(), model.data()
        start = time.process_time()
        options: Any = {"loss": model.loss, "targets": data[1:], "timeout": 0}
        with observe(costs=HARDWARE):
            problem = Problem(layers, data[0], devices, len(data[0]), **options)
    measuring = time.process_time() - start
    ran: dict[Any, Proof] = {}

    def prove(trial: Trial) -> Proof:
        if trial.identity not in ran:
            ran[trial.identity] = run_dry(trial, model, layers, data, devices)
        return ran[trial.identity]

    for row in rows:
        limits = limits_of(row["limit"] or inf, devices)
        found = {key: row[key] for key in ("model", "n", "share", "limit", "best")}
        best = trial_of(problem, row["best"], chunks)
        found["best_ms"] = None if row["best_ms"] is None else prove(best).time
        for way, most in ("predicted", 0), ("proven", PROVEN):
            start = time.process_time()
            ran.clear()
            problem.memory = limits
            own = ranked(problem, [chunks], most, prove)[0]
            took = measuring + time.process_time() - start
            chosen = {"fits": not own.excess, "seconds": took, **described(own)}
            if not own.excess:
                proof = prove(own)
                chosen |= {"ms": proof.time, "peak": max(proof.memory.values())}
                chosen |= {"predicted_ms": own.time, "predicted_peak": max(own.memory)}
            found[way] = chosen
        yield found


def trial_of(problem: Problem, best: Row, chunks: int) -> Trial:
    """The trial of a setting as :func:`described` has it."""
    modes, count = best["modes"].split(), len(best["balance"])
    words = {"n": "never", "e": "except_last", "a": "always"}
    setting = next(
        x
        for x in settings(problem, [chunks])
        if (x.name, len(x.schedule.placement)) == (best["schedule"], count)
    )
    each = tuple([words.get(x, x) for x in (modes if len(modes) > 1 else modes * count)])
    return Trial(setting, tuple(best["balance"]), each)


def described(trial: Trial) -> dict[str, Any]:
    """A setting, for the result."""
    modes = trial.checkpoint
    return {
        "schedule": trial.setting.name,
        "chunks": trial.schedule.chunks,
        "balance": [*trial.balance],
        "modes": modes if isinstance(modes, str) else " ".join(x[0] for x in modes),
    }


def run_dry(
    trial: Trial,
    model: Model,
    layers: nn.Sequential,
    data: Sequence[torch.Tensor],
    devices: Sequence[torch.device],
) -> Proof:
    """Train as a trial says, dry: the milliseconds of a step, and its peaks of memory."""

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
    return Proof(1000 * found.time, dict(zip(devices, found.allocated)))


def measure_map(devices: Sequence[torch.device], rows: Sequence[Row], chunks: int) -> Iterator[Row]:
    """Choose a device map of a Llama for each limit."""
    for row in rows:
        start = time.process_time()
        sizes = map_of(devices, chunks, row["limit"])
        chosen: Row = {"fits": sizes is not None, "seconds": time.process_time() - start}
        if sizes is not None:
            ms, peak = run_map(sizes, devices, chunks)
            chosen |= {"ms": ms, "peak": peak, "balance": [*sizes], "schedule": "map"}
        keys = ("model", "n", "share", "limit", "best", "best_ms")
        yield {**{key: row[key] for key in keys}, "predicted": chosen}


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
