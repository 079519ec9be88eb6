"""Speed experiments in virtual time: full size, at the rates of a GPU, on virtual accelerators.

:mod:`benchmarks.simulate.costs` counts the layers' costs on the meta device, and stand-ins for the
partitions (:mod:`benchmarks.simulate.standins`) take that time. The host takes none, so the
measured time depends on the pipeline alone: on its order, its streams and its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.models.experiments import Experiment
from benchmarks.rivals.processes import Running, UnavailableError
from benchmarks.simulate.costs import P40, count
from benchmarks.simulate.standins import cut

__all__ = ["measure"]


def measure(
    running: Sequence[Running], experiment: Experiment, balance: list[int], repeat: int
) -> dict[str, Any]:
    """Milliseconds of virtual time that a step of each rival takes.

    Args:
        running: processes of the rivals.
        experiment: for the rivals to train.
        balance: number of layers in each partition.
        repeat: number of steps, each with other delays of the host's threads.
    """
    m = experiment.m or 1
    rows = experiment.batch // m
    costs = count(experiment.model, experiment.size, rows)
    stages = cut(costs, balance, P40.link)
    arguments = {"stages": asdict(stages), "m": m, "mode": experiment.mode}
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for process in running:
        name = process.rival.name
        try:
            process.make("benchmarks.simulate.standins:Steps", **arguments)
            steps = [process.call("measure", seed=seed) for seed in range(repeat)]
            free = [process.call("measure", seed=seed, free=True) for seed in range(repeat)]
            found[name] = {key: [step[key] for step in steps] for key in ("ms", "busy")}
            found[name]["free_ms"] = [step["ms"] for step in free]
        except UnavailableError as error:
            failed[name] = error.reason
    return {
        "batch": rows * m,
        "stages": asdict(stages),
        "plain_ms": (sum(costs.forward) + sum(costs.backward)) * m,
        "limit_ms": stages.limit(experiment.mode, m),
        "free_limit_ms": stages.limit(experiment.mode, m, free=True),
        "rivals": found,
        "failed": failed,
    }
