"""Models that need many GPUs, predicted by dry runs: which settings fit, and how fast they are.

Two are Transformers' own Llama, in full size and bfloat16, over four devices by MappedGPipe:

    lora-70b    adapters of rank 16 on all linear layers (PEFT), on a100-80gb
    full-8b     all weights, with AdamW, on rtx4090-24gb
    lora-8b     adapters of rank 16 where PEFT puts them (queries and values), on h100-80gb: one
                long sequence, whole and in slices

And one is a GPT-3 of 175 billion parameters in bfloat16, over 64 a100-80gb by ScheduledLoss, under
several schedules. A row is a mini-batch with one sequence in each micro-batch. Each row runs in a
process of its own, with the memory that it took of this machine. Nothing is calibrated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import command
from benchmarks.alone import alone, warmed
from benchmarks.models.gpt import gpt
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.balance.blockpartition import solve
from torchgpipe.testing import Prediction, dry_run

__all__ = ["main", "summarise"]

GIB = 2**30

#: Sizes of Llama 3 (Grattafiori et al., arXiv 2407.21783, table 3).
LLAMA = {
    "lora-70b": (8192, 28672, 80, 64),
    "full-8b": (4096, 14336, 32, 32),
    "lora-8b": (4096, 14336, 32, 32),
}
VOCABULARY = 128256

#: GPT-3 (Brown et al., arXiv 2005.14165, table 2.1): vocabulary, context, blocks, width, heads.
GPT3 = {"vocabulary": 50257, "context": 2048, "layers": 96, "width": 12288, "heads": 96}
WORKERS = 64


@dataclass(frozen=True)
class Setting:
    """One row.

    Args:
        model: its name.
        hardware: what the devices are.
        n: how many there are.
        m: the number of micro-batches, each a sequence.
        mode: which of them are checkpointed. ``"own"`` is the model's own gradient checkpointing,
            layer by layer, and ``"head"`` checkpoints the head alone.
        length: tokens of a sequence.
        balance: layers of each device of a Llama.
        schedule: of the GPT.
        slices: of each sequence, or ``"auto"``; 0 where nobody asks for them.
    """

    model: str
    hardware: str
    n: int
    m: int
    mode: str
    length: int
    balance: tuple[int, ...] = ()
    schedule: str = ""
    slices: int | str = 0


MODES = ("never", "except_last", "always", "own")

#: The tokens of long sequences, modes, and numbers of slices.
LONG = [
    (16384, "never", (1, 4, 8, 12, 16, "auto")),
    (32768, "never", (1, 8, 16)),
    (32768, "head", (16,)),
    (32768, "always", (1, 4, 8, 16)),
    (131072, "always", (1, 8, 16, 32, "auto")),
]

SETTINGS = [
    *[
        Setting("lora-70b", "a100-80gb", 4, m, mode, length, (20, 20, 20, 20))
        for m, mode, length in (
            *[(8, mode, 2048) for mode in MODES],
            *((16, "always", 2048), (8, "always", 4096)),
        )
    ],
    *[
        Setting("full-8b", "rtx4090-24gb", 4, m, mode, 1024, (7, 9, 9, 7))
        for m, mode in (*[(8, mode) for mode in MODES], (16, "always"))
    ],
    *[
        Setting("gpt-175b", "a100-80gb", WORKERS, 2 * WORKERS, "always", 2048, schedule=schedule)
        for schedule in ("1f1b", "zbh1", "zbv", "dualpipev")
    ],
    *[
        Setting("lora-8b", "h100-80gb", 4, 1, mode, length, (8, 8, 8, 8), "", slices)
        for length, mode, counts in LONG
        for slices in counts
    ],
]

Maker = Callable[[list[torch.device]], Callable[[], None]]


def llama(setting: Setting) -> Maker:
    """A function that makes a step of a Llama by MappedGPipe."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(devices: list[torch.device]) -> Callable[[], None]:
        width, hidden, layers, heads = LLAMA[setting.model]
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
        model: Any = narrow(lambda: LlamaForCausalLM(config))
        before = ""
        if setting.model.startswith("lora"):
            from peft import LoraConfig, get_peft_model

            targets = "all-linear" if setting.model == "lora-70b" else None
            adapters = LoraConfig(r=16, lora_alpha=32, target_modules=targets)
            model, before = get_peft_model(model, adapters), "base_model.model."
        mode: Any = setting.mode
        if mode == "own":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            mode = "never"
        first, last = devices[0], devices[-1]
        ends = {"model.embed_tokens": first, "model.rotary_emb": first}
        ends |= {"model.norm": last, "lm_head": last}
        places = [device for device, count in zip(devices, setting.balance) for _ in range(count)]
        ends |= {f"model.layers.{k}": device for k, device in enumerate(places)}
        device_map = {before + name: device for name, device in ends.items()}
        if mode == "head":
            mode = ["always" if name == "lm_head" else "never" for name in ends]
        options: Any = {"chunks": setting.m, "checkpoint": mode, "slices": setting.slices or 1}
        pipe = MappedGPipe(model, device_map, **options).train()
        optimizer = torch.optim.AdamW([x for x in pipe.parameters() if x.requires_grad])
        tokens = torch.randint(VOCABULARY, (setting.m, setting.length), device=first)

        def step(m: int) -> None:
            pipe.chunks, some = m, tokens[:m]
            optimizer.zero_grad()
            pipe(input_ids=some, labels=some).loss.mean().backward()
            optimizer.step()

        return warmed(step, setting.m)

    return make


def gpt3(setting: Setting) -> Maker:
    """A function that makes a step of a GPT-3 by ScheduledLoss."""

    def make(devices: list[torch.device]) -> Callable[[], None]:
        layers = narrow(lambda: gpt(**GPT3))
        folded = setting.schedule in ("zbv", "dualpipev")
        if folded:
            devices = [*devices, *devices[::-1]]
        pipe = GPipe(
            layers,
            balance_of(layers, len(devices)),
            devices=devices,
            chunks=setting.m,
            checkpoint=setting.mode,
        )
        training = ScheduledLoss(pipe, of_tokens, setting.schedule)
        optimizer = torch.optim.AdamW(pipe.parameters())
        size = (setting.m, setting.length)
        tokens = torch.randint(GPT3["vocabulary"], size, device=devices[0])
        target = torch.randint(GPT3["vocabulary"], size, device=devices[-1])

        def step(m: int) -> None:
            pipe.chunks = m
            # Not every schedule takes few micro-batches.
            few = "zbv" if folded else "1f1b"
            training.schedule = setting.schedule if m == setting.m else few
            optimizer.zero_grad()
            training(tokens[:m], target[:m]).backward()
            optimizer.step()

        return warmed(step, setting.m)

    return make


def of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean loss of a micro-batch's tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def balance_of(layers: nn.Sequential, stages: int) -> list[int]:
    """Spread layers evenly by their weights that are multiplied, which is most of their time."""
    costs = [sum(x.numel() for x in layer.parameters() if x.dim() == 2) for layer in layers]
    costs[0] = 0  # An embedding looks up.
    return [len(block) for block in solve(costs, stages)]


def narrow(make: Callable[[], nn.Module]) -> Any:
    """Make a model whose weights are bfloat16 from the beginning."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def row_of(setting: Setting) -> dict[str, Any]:
    """Run a row dry."""
    torch.set_num_threads(1)
    make = gpt3(setting) if setting.schedule else llama(setting)
    # Transformers asks whether all tokens are of one sequence, and they are.
    found: Prediction = dry_run(make, setting.n, setting.hardware, value_read=1.0)
    shares = found.timeline.shares
    return {
        **{key: getattr(setting, key) for key in ("model", "hardware", "n", "m", "mode", "length")},
        "schedule": setting.schedule,
        "slices": setting.slices,
        "seconds": found.time,
        "bubble": fmean(x.bubble for x in shares),
        "reserved": [*found.reserved],
        "allocated": [*found.allocated],
        "before": [*found.before],
        "fits": found.fits,
        "too_large": str(found.too_large or ""),
    }


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    parser = command.parser("large", __doc__)
    models = [*dict.fromkeys(x.model for x in SETTINGS)]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--first", type=command.at_least(1), help="rows of each model (all)")
    return parser


def main(argv: Sequence[str]) -> None:
    """Predict and publish."""
    options = parser().parse_args(argv)
    chosen = [
        x for of in options.models for x in [y for y in SETTINGS if y.model == of][: options.first]
    ]
    rows = [alone(row_of, setting) for setting in progress(chosen, "large", "row")]
    publish(command.output(options, "large"), head("large", argv), rows, summarise)


def ratio(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The time of the whole sequence over that of slices, if it was run in the same mode."""
    same = [x for x in rows if (x["length"], x["mode"]) == (row["length"], row["mode"])]
    whole = [x for x in same if x["slices"] == 1]
    return f"{whole[0]['seconds'] / row['seconds']:.2f}" if whole else ""


def summarise(result: Result) -> Summary:
    """A table for each model."""
    tables = []
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == model]
        first = rows[0]
        sliced = bool(first.get("slices"))
        lines = [
            [
                *([row["schedule"]] if row["schedule"] else [row["length"]]),
                *(row["slices" if sliced else "m"], row["mode"], f"{row['seconds']:.3g}"),
                *([ratio(row, rows)] if sliced else ()),
                f"{row['m'] * row['length'] / row['seconds']:.3g}",
                *(f"{row['bubble']:.1%}", f"{max(row['before']) / GIB:.1f}"),
                *(f"{max(row[key]) / GIB:.1f}" for key in ("allocated", "reserved")),
                "yes" if row["fits"] else "no",
                *(f"{row['processor']:.0f}", f"{row['rss'] / GIB:.2f}"),
            ]
            for row in rows
        ]
        columns = ["schedule" if first["schedule"] else "tokens", "slices" if sliced else "m"]
        columns += ["mode", "s a step"]
        columns += ["times"] if sliced else []
        columns += ["tokens a s", "bubble", "stays", "allocated", "reserved", "fits"]
        title = f"{model}: {first['n']} x {first['hardware']}, GiB of the fullest device"
        tables.append(Table([*columns, "CPU s", "laptop GiB"], lines, title))
    return Summary(
        "Large models, predicted by dry runs",
        tables,
        "Predicted and not measured, by data sheets: no kernel reaches these rates. `stays` is "
        "what a device has between steps. The mode `own` is the model's own gradient "
        "checkpointing, layer by layer. The first two steps of a row take two micro-batches, and "
        "the third one, which counts, all. The last columns are what a row took of this machine. "
        "`times` is how many times as fast as the whole sequence in the same mode. `head` "
        "checkpoints the head alone.",
    )
