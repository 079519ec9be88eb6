"""Proof: the best candidates train for two steps on the devices, and what was measured decides."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.ambient.generators import generator_of, get_state, set_state
from torchgpipe.devices.recorder import Stopwatch, forget_peak, memory_allocated, peak_memory
from torchgpipe.devices.streams import CPU, has_streams
from torchgpipe.planner.given import FILLED
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.search import search
from torchgpipe.planner.trial import Trial, by_device
from torchgpipe.values.structure import is_of_input, leaves_of, map_leaves

__all__: list[str] = []

#: How many candidates are proven, if nobody says how many.
PROVEN = 2

#: How often the search is repeated, and how many candidates are tried each time, at most, for each
#: that is to be proven: most of those may have too little memory.
SEARCHES, TRIES = 3, 3

#: How many times the limits the search may take for them, where proofs have taken less than was
#: predicted.
MOST = 1.5


class Proof(NamedTuple):
    """The milliseconds of a step that a candidate was trained for, and its memory."""

    time: float
    memory: dict[torch.device, int]


class Ranked(NamedTuple):
    """A candidate, by how many bytes it has too little memory, and what its steps have taken."""

    trial: Trial
    excess: float
    proof: Proof | None = None

    @property
    def key(self) -> tuple[bool, bool, float, float]:
        """The place in a ranking: what fits, then what is proven, then what is fast."""
        time = self.trial.time if self.proof is None else self.proof.time
        return self.excess > 0, self.proof is None, self.excess, time


#: Trains the layers as a trial says, for two steps; None if they have taken nothing to go by.
Prove = Callable[[Trial], Proof | None]


def ranked(problem: Problem, chunks: Sequence[int], most: int, prove: Prove) -> list[Ranked]:
    """Search a problem, and prove so many of the best candidates, if devices have streams.

    What steps have taken, beside what was predicted, corrects the limits of the next search. What
    is not proven fills a share of each device's memory.
    """
    limits, proofs = problem.memory, dict[Any, Ranked]()
    margin = [FILLED * x for x in limits]
    is_proven = most > 0 and all(map(has_streams, problem.places))
    found: list[Trial] = []
    room = limits
    for _ in range(SEARCHES if is_proven else 0):
        trials = search(replace(problem, memory=room), chunks)
        found = found or trials
        new = _proven(trials, proofs, limits, most, prove)
        if not new or min(limits) == inf:
            break
        room = [_corrected(new, w, limit) for w, limit in enumerate(limits)]
    if all(x.excess for x in proofs.values()):
        trials = search(replace(problem, memory=margin), chunks)
        found = found or trials
        if is_proven:
            _proven(trials, proofs, limits, most, prove)
    rest = [Ranked(x, x.excess or x.over(margin)) for x in found if x.settings not in proofs]
    return sorted([*proofs.values(), *rest], key=lambda x: x.key)


def _proven(
    trials: Sequence[Trial],
    proofs: dict[Any, Ranked],
    limits: Sequence[float],
    most: int,
    prove: Prove,
) -> list[Ranked]:
    """Prove some trials, as long as one that fits by its prediction may be faster."""
    best = min([x.proof.time for x in proofs.values() if x.proof and not x.excess], default=inf)
    # If nothing fits by its prediction, the next best one tells how far that is off.
    fits = [x for x in trials if not x.excess] or [x for x in trials[:1] if not proofs]
    left = [x for x in fits if x.settings not in proofs]
    new: list[Ranked] = []
    for trial in sorted(left, key=lambda x: x.time)[: TRIES * most]:
        if trial.time >= best or sum(not x.excess for x in new) == most:
            break
        proof = prove(trial)
        if proof is None:
            break
        room = by_device(trial.problem.places, limits)
        over = [size - room[x] for x, size in proof.memory.items() if x in room]
        # Nobody knows how much a step lacks that has failed.
        excess = max(0.0, float(proof.time == inf), *over)
        new.append(Ranked(trial, excess, proof))
        proofs[trial.settings] = new[-1]
        best = best if excess else min(best, proof.time)
    return new


def _corrected(proofs: Sequence[Ranked], w: int, limit: float) -> float:
    """The limit of a worker for predictions, by what steps have taken there beside these."""
    shares = []
    for trial, _, proof in proofs:
        taken = proof.memory.get(trial.problem.places[w]) if proof else None
        shares.append(1 / FILLED if taken is None else taken / trial.memory[w])
    return limit / max([1 / MOST, min(1 / FILLED, max(shares, default=1.0))])


def proof_of(
    trial: Trial,
    wrap: Callable[[nn.Sequential, Any], nn.Module],
    layers: nn.Sequential,
    input: Any,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
) -> Proof | None:
    """Train a copy of layers for two steps, of which the second one counts.

    Args:
        trial: the settings.
        wrap: wraps the copy, and that of the loss.
        layers: the layers.
        input: a mini-batch.
        loss: the loss of a schedule; None if it is outside.
        targets: its arguments after the output.
    """
    devices = [*dict.fromkeys(trial.devices)]
    generators = {generator_of(x) for x in (*devices, CPU)}
    numbers = {generator: get_state(generator) for generator in generators}
    gc.collect()
    before = {x: memory_allocated(x) or 0 for x in devices}
    try:
        model = wrap(*deepcopy((layers, loss))).train()
        input, targets = _near(input, trial.devices[0]), _near((*targets,), trial.devices[-1])
        for _ in range(2):
            model.zero_grad()
            time = _step(model, devices, input, targets if trial.setting.name else ())
    except torch.OutOfMemoryError:
        # If the layers themselves are on one of the devices, that tells nothing.
        return None if any(x.device in devices for x in layers.parameters()) else Proof(inf, {})
    finally:
        for generator, own in numbers.items():
            set_state(generator, own)
    memory = {}
    for place, old in before.items():
        here = [x for x in model.parameters() if x.requires_grad and x.device == place]
        state = trial.problem.state * sum(x.nbytes for x in here)
        memory[place] = (peak_memory(place) or 0) - old + round(state)
    return Proof(time, memory)


def _near(values: Any, device: torch.device) -> Any:
    """Values on a device, under the same marks."""
    return map_leaves(partial(_on, device), values, is_of_input)


def _on(device: torch.device, x: Any) -> Any:
    if is_of_input(x):
        return x.map(partial(_on, device))
    return x.to(device) if isinstance(x, Tensor) else x


def _step(
    model: nn.Module, devices: Sequence[torch.device], input: Any, targets: Sequence[Any]
) -> float:
    """The milliseconds of a step."""
    watches = [Stopwatch(device) for device in devices]
    for device, watch in zip(devices, watches):
        # What was issued before is over then.
        watch.start()
        watch.stop()
        forget_peak(device)
        watch.start()
    ends = [x for x in leaves_of(model(input, *targets)) if isinstance(x, Tensor)]
    # A loss outside is taken to make a gradient as large as its input.
    terms = [F.mse_loss(x, x.detach()) if x.dim() else x for x in ends]
    torch.autograd.backward([x for x in terms if x.requires_grad])
    return 1000 * max(watch.stop() for watch in watches)


T = TypeVar("T")


def agreed(choose: Callable[[], T]) -> T:
    """Choose in the first process, and have all others take its choice.

    Replicas that are trained together must be wrapped alike. An error is one of all.
    """
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() > 1):
        return choose()
    found: list[Any] = [None, None]
    if group.get_rank() == 0:
        try:
            found[0] = choose()
        except Exception as error:
            found[1] = error
    group.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    choice: T = found[0]
    return choice
