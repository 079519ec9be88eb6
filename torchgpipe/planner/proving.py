"""Proof: the best candidates train for two steps on the devices, and what was measured decides."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from math import inf
from statistics import mean
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.devices.recorder import Stopwatch, forget_peak, memory_allocated, peak_memory
from torchgpipe.devices.streams import has_streams
from torchgpipe.mapped.inputs import on_device
from torchgpipe.planner.given import FILLED
from torchgpipe.planner.problem import Problem
from torchgpipe.planner.sandbox import same_numbers
from torchgpipe.planner.search import search, search_again
from torchgpipe.planner.trial import Proof, Trial, by_device
from torchgpipe.values.division import FlatInput
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: Proofs end when so many candidates have fitted, by default, or so many times as many were tried.
PROVEN, TRIES = 2, 3

#: A predicted peak may be above a limit this many times at most, if proofs have taken less memory
#: than was predicted.
MOST = 1.5

#: Before any proof, a predicted peak may be above a limit this many times: where one run of a layer
#: does not tell how much memory a step takes, more is counted, and not less.
HOPED = 1.2

#: Trains the layers for two steps as a trial says. It returns None if it has run out of memory for
#: another reason than the trial's: that the model itself is on a device.
Prove: TypeAlias = Callable[[Trial], Proof | None]


def ranked(problem: Problem, chunks: Sequence[int], most: int, prove: Prove) -> list[Trial]:
    """Search a problem, and prove so many of the best candidates, if devices have streams.

    Returns:
        The trials: what fits, then what is proven, then what is fast. What is not proven fits if
        it fills no more than a share of each device's memory.
    """
    trials: list[Trial] = []
    proven: list[Trial] = []
    if most > 0 and all(map(has_streams, problem.places)):
        trials = search(problem, chunks, [HOPED * x for x in problem.memory])
        proven = _proven(trials, problem.memory, most, prove)
    margin = [FILLED * x for x in problem.memory]
    if all(x.excess for x in proven):
        trials = search(problem, chunks, margin)
    known = {x.identity for x in proven}
    rest = [x for x in trials if x.identity not in known]
    for trial in rest:
        trial.excess = trial.over(margin)
    times = {x: x.proof.time if x.proof else x.time for x in (*proven, *rest)}
    return sorted(times, key=lambda x: (x.excess > 0, not x.proof, x.excess, times[x]))


def _proven(trials: list[Trial], limits: Sequence[float], most: int, prove: Prove) -> list[Trial]:
    """Prove the fastest trials, until so many fit, or none of the rest may be faster.

    What a step has taken, as a share of what was predicted, corrects the limits for its schedule,
    which is searched again with these. A schedule without a proof goes by the mean of all shares.
    """
    proven: list[Trial] = []
    # The shares begin with a guess, which the first trials go by and which stays in the mean.
    shares = [1 / HOPED]
    # The next trial of each setting that still has one.
    left = {x.setting: x for x in trials if not x.over([HOPED * y for y in limits])}
    # If nothing fits by its prediction, the nearest one tells how far that is off.
    left = left or {x.setting: x for x in trials[:1]}
    best = inf
    while left and len(proven) < TRIES * most and sum(not x.excess for x in proven) < most:
        trial = min(left.values(), key=lambda x: x.time)
        if trial.time >= best:
            break
        del left[trial.setting]
        room = [x / mean(shares) for x in limits]
        if not proven or trial.setting in {x.setting for x in proven} or not trial.over(room):
            if (proof := prove(trial)) is None:
                break
            trial.proof, trial.excess = proof, _excess(trial, proof, limits)
            proven.append(trial)
            best = best if trial.excess else min(best, proof.time)
            device_shares = _shares(trial, proof)
            room = [x / share for x, share in zip(limits, device_shares)]
            shares.append(device_shares[trial.memory.index(max(trial.memory))])
        following = search_again(trial, room)
        if not following.over(room) and following.identity not in {x.identity for x in proven}:
            left[trial.setting] = following
    return proven


def _excess(trial: Trial, proof: Proof, limits: Sequence[float]) -> float:
    """By how many bytes the fullest device has had too little."""
    room = by_device(trial.problem.places, limits)
    over = [size - room[x] for x, size in proof.memory.items() if x in room]
    # A step that has run out of memory has no peaks, and does not fit all the same.
    return max(0.0, float(proof.time == inf), *over)


def _shares(trial: Trial, proof: Proof) -> list[float]:
    """The memory that a step has taken on each device, as a share of what was predicted."""
    pairs = zip(trial.problem.places, trial.memory)
    # A step that has run out of memory has no peaks, and has taken more than was predicted.
    peaks = [(proof.memory.get(x, size / FILLED), max(1.0, size)) for x, size in pairs]
    return [max(1 / MOST, real / size) for real, size in peaks]


def proof_of(
    wrap: Callable[[Trial, nn.Sequential, Any], nn.Module],
    layers: nn.Sequential,
    input: Any,
    loss: Callable[..., Any] | None,
    targets: Sequence[Any],
    trial: Trial,
) -> Proof | None:
    """Train a copy of layers, and of the loss, for two steps, of which the second one counts."""
    devices = [*dict.fromkeys(trial.devices)]
    gc.collect()
    before = {x: memory_allocated(x) or 0 for x in devices}
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(same_numbers(device))
        try:
            model = wrap(trial, *deepcopy((layers, loss))).train()
            input, targets = _near(input, trial.devices[0]), _near((*targets,), trial.devices[-1])
            for _ in range(2):
                model.zero_grad()
                time = _step(model, devices, input, targets if trial.setting.name else ())
        except torch.OutOfMemoryError:
            # The user's own layers may have taken the memory, if they are on one of the devices.
            return None if any(x.device in devices for x in layers.parameters()) else Proof(inf, {})
    memory = {x: (peak_memory(x) or 0) - old for x, old in before.items()}
    trained = [x for x in model.parameters() if x.requires_grad]
    for device in devices:
        size = sum(x.nbytes for x in trained if x.device == device)
        memory[device] += round(trial.problem.state * size)
    return Proof(time, memory)


def _near(value: Any, device: torch.device) -> Any:
    """A value on a device, under the same marks."""
    flat = FlatInput(value)
    flat.map(partial(on_device, device))
    return flat.spec.unflatten(flat.leaves)


def _step(model: nn.Module, devices: Sequence[torch.device], input: Any, targets: Any) -> float:
    """The milliseconds of a step."""
    watches = [Stopwatch(device) for device in devices]
    for device, watch in zip(devices, watches):
        # The first stop waits for all that was issued before, which the time must not include.
        watch.start()
        watch.stop()
        forget_peak(device)
        watch.start()
    ends = [x for x in leaves_of(model(input, *targets)) if isinstance(x, Tensor)]
    # Where the loss is outside the pipeline, a loss stands in whose gradient is as large as the
    # output.
    terms = [F.mse_loss(x, x.detach()) if x.dim() else x for x in ends]
    torch.autograd.backward([x for x in terms if x.requires_grad])
    return 1000 * max(watch.stop() for watch in watches)


def agreed(choose: Callable[[], Any]) -> Any:
    """Choose in the first process, and have all others take its choice.

    Replicas that are trained together must be wrapped alike. An error is one of all.
    """
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() > 1):
        return choose()
    answer: list[Any] = [None, None]
    if group.get_rank() == 0:
        try:
            answer = [choose(), None]
        except Exception as error:
            answer = [None, error]
    group.broadcast_object_list(answer)
    choice, raised = answer
    if raised is not None:
        raise raised
    return choice
