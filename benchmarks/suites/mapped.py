"""Cost of a mapped module on the host, beside the hooks of Accelerate.

A Llama of Hugging Face Transformers, but with blocks that compute next to nothing, is spread over
four devices by the same device map in two ways: under MappedGPipe, and under the hooks of
Accelerate, one micro-batch after another. The plain model computes the same micro-batches on one
device. A step is timed until the host has issued it. What a way takes beyond the plain model,
divided by the micro-batches and the modules of the map, is the cost of a module. The time is the
host's real time, on virtual accelerators with their bookkeeping::

    pip install accelerate transformers
    python -m benchmarks mapped

Figures are microseconds: least (median).

Virtual accelerators tell the virtual time of a step, too: of equal stages, and of the Llama of
``examples/device_map.py``, where a matrix product with a micro-batch takes 1 ms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import add_device, at_least, output, parse, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.rivals.cells import in_turn
from benchmarks.simulate.mapped import equal_stages, llama_steps
from benchmarks.suites.tables import mapped as tables
from torchgpipe import MappedGPipe, testing

DEVICES = 4

#: What is timed: a forward without gradients, and a forward with a backward.
KINDS = ("inference", "training")


class Block(nn.Module):
    """A block in place of a Llama's, which is called with the same arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        found: Tensor = self.linear(hidden_states)
        return found


def llama(blocks: int) -> Any:
    """Make the model."""
    transformers = import_module("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    config.num_hidden_layers = blocks
    model.model.layers = nn.ModuleList([Block() for _ in range(blocks)])
    return model


def device_map(devices: Sequence[torch.device], blocks: int) -> dict[str, torch.device]:
    """Spread blocks evenly; the embedding is on the first device, norm and head on the last."""
    found = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0]}
    for k in range(blocks):
        found[f"model.layers.{k}"] = devices[k * len(devices) // blocks]
    return {**found, "model.norm": devices[-1], "lm_head": devices[-1]}


def measure(
    devices: Sequence[torch.device], blocks: int, kind: str, m: int, seconds: float
) -> dict[str, Any]:
    """Measure microseconds of each way, per micro-batch and mapped module."""
    torch.manual_seed(0)
    model = llama(blocks)
    places = device_map(devices, blocks)
    tokens = torch.randint(0, 64, (m, 12), device=devices[0])
    micro_batches = tokens.split(1)
    plain = copy.deepcopy(model).to(devices[0])
    hooked: Any = import_module("accelerate").dispatch_model(
        copy.deepcopy(model), places, main_device=devices[0], force_hooks=True
    )
    mapped = MappedGPipe(model, places, chunks=m, checkpoint="never")

    def loop(model: nn.Module) -> Tensor:
        return torch.stack([model(input_ids=x, labels=x).loss for x in micro_batches])

    def step(model: nn.Module, losses: Callable[[], Tensor]) -> float:
        model.zero_grad()
        with torch.set_grad_enabled(kind == "training"):
            start = perf_counter()
            loss = losses().mean()
            if kind == "training":
                loss.backward()
            return perf_counter() - start

    steps = {
        "plain": partial(step, plain, partial(loop, plain)),
        "Accelerate": partial(step, hooked, partial(loop, hooked)),
        "MappedGPipe": partial(step, mapped, lambda: mapped(input_ids=tokens, labels=tokens).loss),
    }
    for run in steps.values():
        run()
    modules = in_turn(steps, seconds, m * len(places))
    return {"blocks": blocks, "kind": kind, "m": m, "modules": modules}


def over(row: dict[str, Any], way: str, key: str) -> float:
    """Microseconds of a module above the plain model."""
    modules = row["modules"]
    cost: float = modules[way][key] - modules["plain"][key]
    return cost


def summarise(result: Result) -> Summary:
    """Costs on the host, and times of steps where they were measured."""
    host, steps = ([x for x in result["rows"] if ("ms" in x) == kind] for kind in (False, True))
    if not steps:
        return host_costs(result)
    found = tables.steps(steps)
    if not host:
        return found
    first = host_costs({**result, "rows": host})
    return replace(
        first,
        tables=[*first.tables, *found.tables],
        notes=f"{first.notes}\n\n{found.notes}",
    )


def host_costs(result: Result) -> Summary:
    """A line for each setting."""
    ways = ("Accelerate", "MappedGPipe")
    lines = []
    for row in result["rows"]:
        costs = {way: [over(row, way, key) for key in ("min", "median")] for way in ways}
        ratios = [
            f"{costs['MappedGPipe'][k] / costs['Accelerate'][k]:.2f}"
            if costs["Accelerate"][k] > 0
            else "-"
            for k in range(2)
        ]
        least = row["modules"]["plain"]
        lines.append(
            [
                *(row["blocks"] // DEVICES, row["kind"], row["m"]),
                f"{least['min']:.0f} ({least['median']:.0f})",
                *[f"{costs[way][0]:.0f} ({costs[way][1]:.0f})" for way in ways],
                f"{ratios[0]} ({ratios[1]})",
            ]
        )
    title = "What a mapped module costs on the host ({device}, {devices} devices)".format(
        **result, devices=DEVICES
    )
    return Summary(
        title,
        [
            Table(
                ["blocks a device", "kind", "m", "plain", *ways, "MappedGPipe / Accelerate"], lines
            ),
            Table(["kind", "m", "way", "a further module", "the rest"], further(result["rows"])),
        ],
        "Microseconds per micro-batch and module of the map: of the plain model on one device, and "
        "what the others take beyond it. Least (median). One thread of operators; the host's real "
        "time. The second table divides the cost of a micro-batch: what it grows by with each "
        "module that is added to a device, and the rest, which is mostly that of coming to four "
        "devices.",
    )


def further(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """For each kind and way, what a further module costs a micro-batch, and all the rest."""
    lines: list[list[Any]] = []
    for kind, m in dict.fromkeys((row["kind"], row["m"]) for row in rows):
        few, *_, many = [row for row in rows if (row["kind"], row["m"]) == (kind, m)] * 2
        added = many["blocks"] - few["blocks"]
        for way in ("Accelerate", "MappedGPipe") if added else ():
            cells = []
            for key in ("min", "median"):
                less, more = [over(row, way, key) * modules(row) for row in (few, many)]
                slope = (more - less) / added
                cells.append((slope, less - slope * modules(few)))
            (slope, rest), (slopes, rests) = cells
            lines.append([kind, m, way, f"{slope:.0f} ({slopes:.0f})", f"{rest:.0f} ({rests:.0f})"])
    return lines


def modules(row: dict[str, Any]) -> int:
    """The number of mapped modules: the blocks, and four around them."""
    count: int = row["blocks"] + 4
    return count


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser("mapped", __doc__)
    reads.add_argument(
        "--blocks", type=at_least(DEVICES), nargs="+", default=[8, 32], help="of the model"
    )
    reads.add_argument("--m", type=at_least(1), nargs="+", default=[8], help="micro-batches")
    add_device(reads, "virtual", "cuda")
    reads.add_argument("--seconds", type=float, default=20.0, help="of a setting")
    reads.add_argument(
        "--repeat", type=at_least(1), default=5, help="steps of each way in virtual time"
    )
    options = parse(reads, argv)
    absent = [name for name in ("accelerate", "transformers") if find_spec(name) is None]
    reason = f"it needs pip install {' '.join(absent)}"
    if absent and options.device == "cuda":
        reads.error(f"there is only the Llama to measure (device: cuda), and {reason}")
    torch.set_num_threads(1)
    if options.device == "virtual":
        # Before the first backward of the process.
        devices = testing.load()[:DEVICES]
    else:
        count = torch.cuda.device_count()
        devices = [torch.device("cuda", k % count) for k in range(DEVICES)]
    result = head("mapped", argv, device=options.device)
    if absent:
        result["left_out"] = {"the Llama": reason}
    settings = [] if absent else [*product(options.blocks, KINDS, options.m)]
    rows = [
        measure(devices, *setting, options.seconds)
        for setting in progress(settings, "mapped", "setting")
    ]
    if options.device == "virtual":
        rows += equal_stages(devices, options.repeat)
        rows += [] if absent else llama_steps(devices, options.repeat)
    publish(output(options, f"mapped_{options.device}"), result, rows, summarise)
