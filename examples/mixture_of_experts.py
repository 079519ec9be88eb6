"""A small decoder with a mixture of experts, whose exchanges of tokens hide behind other cells.

Each token goes to one of four experts. Where experts are on several machines, tokens are exchanged
with them, there and back, in forward and in backward. Here a stand-in takes the time of that, and
nothing of the device's arithmetic. Four virtual accelerators take the time of the matrix products::

    python -m examples.mixture_of_experts
    python -m examples.mixture_of_experts --chunks 32

Stages are graphs. Where a schedule computes two cells at once, the exchanges of one hide behind the
arithmetic of the other.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.options import at_least
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.graphs import communicates
from torchgpipe.schedule import Schedule, named
from torchgpipe.testing import load, observe

WORKERS, WIDTH, TOKENS, EXPERTS, VOCABULARY = 4, 16, 8, 4, 32

#: The milliseconds of an exchange, and of each kind of matrix product.
EXCHANGE = 1.0
PRODUCTS = dict.fromkeys(("mm", "addmm", "bmm"), 1.0)


def define() -> None:
    """Make the operator that stands for the exchange, and say that it communicates."""
    ops: Any = torch.ops.virtual_accelerator

    @torch.library.custom_op("torchgpipe_examples::exchange", mutates_args=())
    def exchange(x: Tensor) -> Tensor:
        ops.busy(x, EXCHANGE, "exchange")
        return x.clone()

    @exchange.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, grad: Tensor) -> Any:
        return exchange(grad)

    exchange.register_autograd(backward)
    communicates(torch.ops.torchgpipe_examples.exchange)


class Experts(nn.Module):
    """Add the output of each token's expert to the features ``(rows, length, width)``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.inner = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.outer = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        exchange: Any = torch.ops.torchgpipe_examples.exchange
        tokens = self.norm(x).flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        # A place for each token at each expert, empty but for the token's own expert.
        chosen = F.one_hot(weights.argmax(-1), EXPERTS).to(x.dtype)
        sent = exchange(chosen.t().unsqueeze(-1) * tokens)
        found = exchange(torch.bmm(F.gelu(torch.bmm(sent, self.inner)), self.outer))
        share = (chosen * weights).t().unsqueeze(-1)
        output: Tensor = x + (found * share).sum(0).view_as(x)
        return output


class Attention(nn.Module):
    """Add causal self-attention to the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        future = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        output: Tensor = x + self.output(attended)
        return output


def blocks() -> list[nn.Module]:
    """Blocks of attention and experts, the first with an embedding, the last with a head."""
    torch.manual_seed(0)
    found: list[nn.Module] = [nn.Sequential(Attention(), Experts()) for _ in range(2 * WORKERS)]
    found[0] = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), found[0])
    found[-1] = nn.Sequential(found[-1], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return found


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def schedules(chunks: int) -> dict[str, Schedule]:
    """Schedules without cells side by side, and with them."""
    return {
        "1f1b": named("1f1b", WORKERS, chunks),
        "zero_bubble_v": named("zero_bubble_v", WORKERS, chunks),
        "dualpipe_v": named("dualpipe_v", WORKERS, chunks),
        "1f1b of pairs": named("1f1b", WORKERS, chunks // 2).pair(),
    }


def step(
    schedule: Schedule, layers: list[nn.Module], tokens: Tensor
) -> tuple[float, float, Tensor]:
    """The virtual milliseconds of a step, those of its exchanges per device, and all gradients."""
    devices = load(WORKERS)
    layers = copy.deepcopy(layers)
    count = len(schedule.placement)
    each = len(layers) // count
    model = GPipe(
        nn.Sequential(*layers),
        [each] * count,
        devices=[devices[w] for w in schedule.placement],
        chunks=schedule.chunks,
        checkpoint="never",
    )
    training = ScheduledLoss(model, loss, schedule, stages="graph")
    input, target = tokens.to(model.devices[0]), tokens.to(model.devices[-1])
    training.costs(input, target)
    training(input, target)
    with observe(costs=PRODUCTS) as seen:
        found = training(input, target)
    found.backward()
    exchanges = sum(span.end - span.start for span in seen.spans if span.name == "exchange")
    grads = [x.grad.flatten().cpu() for x in layers_of(layers) if x.grad is not None]
    return seen.makespan, exchanges / WORKERS, torch.cat(grads)


def layers_of(layers: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters of all blocks."""
    return [x for layer in layers for x in layer.parameters()]


def main(argv: list[str] | None = None) -> int:
    """Print a table of schedules; return 0 if all gradients are equal."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--chunks", type=at_least(2), default=16, help="micro-batches, even")
    chunks = options.parse_args(argv).chunks // 2 * 2
    load(WORKERS)
    if not hasattr(torch.ops.torchgpipe_examples, "exchange"):
        define()
    layers = blocks()
    tokens = torch.randint(VOCABULARY, (2 * chunks, TOKENS))
    print(f"{'schedule':16}{'ms':>8}{'exchanges':>12}")
    found = []
    for name, schedule in schedules(chunks).items():
        time, exchanges, grads = step(schedule, layers, tokens)
        found.append(grads)
        print(f"{name:16}{time:8.0f}{exchanges:12.0f}")
    same = all(torch.allclose(found[0], x, atol=1e-5) for x in found)
    print("All gradients are equal" if same else "Not as it should be: gradients differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
