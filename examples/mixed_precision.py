"""Train a model in mixed precision, under GPipe and as it is, side by side.

There are four ways: autocast in bfloat16; autocast in float16, with a GradScaler; all weights in
bfloat16; and one partition in bfloat16, the others in float32. The model without GPipe gets the
micro-batches one after another, in the same precision, so the losses have to be equal, from the
first step to the last. A second table shows the rounding errors of gradients for several numbers of
micro-batches, with the cache of autocast and without it.

    python -m examples.mixed_precision
    python -m examples.mixed_precision --steps 100 --chunks 8 --checkpoint always
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.options import CHECKPOINT, at_least
from examples.places import places
from torchgpipe import GPipe

FEATURES, WIDTH, CLASSES, BATCH = 32, 64, 8, 256


class Cast(nn.Module):
    """Cast the input to another dtype; backward casts the gradient to the dtype of the input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        return input.to(self.dtype)


def classifier() -> nn.Sequential:
    """The layers, for partitions of four, four and two."""
    torch.manual_seed(0)
    ends = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
    middle = [x for _ in range(3) for x in (nn.GELU(), nn.Linear(WIDTH, WIDTH))]
    return nn.Sequential(ends[0], nn.LayerNorm(WIDTH), *middle, nn.GELU(), ends[1])


def with_middle_in(dtype: torch.dtype) -> nn.Sequential:
    """The layers with the second partition in another dtype, and casts: five, five and two."""
    layers = classifier()
    # Values are cast before they leave their device, since fewer bytes take less time to copy.
    middle = layers[4:8].to(dtype)
    return nn.Sequential(*layers[:4], Cast(dtype), *middle, Cast(torch.float32), *layers[8:])


def step(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    x: Tensor,
    y: Tensor,
    dtype: torch.dtype | None,
) -> float:
    """Make a training step, as without GPipe; return its loss."""
    optimizer.zero_grad()
    # Autocast belongs around forward alone. Recomputations cast as the first run did.
    with nullcontext() if dtype is None else torch.autocast(x.device.type, dtype):
        output = model(x)
        loss = F.cross_entropy(output, y.to(output.device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def train(
    module: nn.Sequential,
    balance: list[int],
    options: argparse.Namespace,
    inputs: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
) -> tuple[list[float], list[float]]:
    """Train a model with and without GPipe; return the losses of each."""
    devices, chunks = places(3), options.chunks
    plain = copy.deepcopy(module).to(devices[0])
    model = GPipe(module, balance, devices=devices, chunks=chunks, checkpoint=options.checkpoint)

    def one_after_another(x: Tensor) -> Tensor:
        return torch.cat([plain(part) for part in x.tensor_split(chunks)])

    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    losses = []
    for forward, trained in ((model, model), (one_after_another, plain)):
        optimizer = torch.optim.AdamW(trained.parameters(), 0.005)
        scaler = torch.amp.GradScaler(devices[0].type, enabled=dtype == torch.float16)
        torch.manual_seed(0)
        batches = [torch.randn(BATCH, FEATURES) for _ in range(options.steps)]
        losses.append(
            [
                step(
                    forward,
                    optimizer,
                    scaler,
                    x.to(devices[0], inputs),
                    (x @ teacher).argmax(1).to(devices[0]),
                    dtype,
                )
                for x in batches
            ]
        )
    return losses[0], losses[1]


def rounding(chunks: int, cache: bool) -> float:
    """The error of gradients under autocast, relative to gradients in double precision."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))
    exact = classifier().double()
    F.cross_entropy(exact(x.double()), y).backward()
    model = GPipe(classifier(), [4, 4, 2], devices=places(3), chunks=chunks)
    device = model.devices[0]
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache):
        loss = F.cross_entropy(model(x.to(device)), y.to(model.devices[-1]))
    loss.backward()
    found, expected = (
        torch.cat([p.grad.cpu().double().flatten() for p in m.parameters() if p.grad is not None])
        for m in (model, exact)
    )
    return ((found - expected).norm() / expected.norm()).item()


def main(arguments: list[str] | None = None) -> int:
    """Train in each precision; return 0 if all losses are as without GPipe, and have fallen."""
    parser = argparse.ArgumentParser(description="Train in mixed precision.")
    parser.add_argument("--steps", type=at_least(1), default=60)
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bfloat16, parts = torch.bfloat16, [4, 4, 2]
    found = {
        "autocast in bfloat16": train(classifier(), parts, options, dtype=bfloat16),
        "autocast in float16": train(classifier(), parts, options, dtype=torch.float16),
        "model in bfloat16": train(classifier().to(bfloat16), parts, options, inputs=bfloat16),
        "a partition in bfloat16": train(with_middle_in(bfloat16), [5, 5, 2], options),
    }
    right = True
    print(f"{'loss':24}  {'first':>8}  {'last':>8}  {'plain':>8}  difference of any step")
    for name, (losses, reference) in found.items():
        first, last, plain = losses[0], losses[-1], reference[-1]
        difference = max(abs(a - b) for a, b in zip(losses, reference))
        right &= difference < 0.02 and last < first / 2
        print(f"{name:24}  {first:8.4f}  {last:8.4f}  {plain:8.4f}  {difference:.1e}")
    print(f"\n{'rounding in gradients':24}  {'cache':>8}  {'no cache':>8}")
    for m in (1, 4, 16, 64):
        cached, own = rounding(m, cache=True), rounding(m, cache=False)
        print(f"{m:3} micro-batches {cached:17.2%}  {own:8.2%}")
    right &= own < cached
    if not right:
        print("\nNot as it should be: losses differ by 0.02 or more, or have not fallen to half,")
        print("or gradients are rounded no more with the cache than without it.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
