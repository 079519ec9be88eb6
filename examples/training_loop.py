"""Train with all that a training loop usually has, under GPipe and as it is, side by side.

The first loop has parameter groups, a learning-rate schedule, gradient accumulation, gradient
clipping and a moving average of the weights (EMA). The second loop has an optimizer for each
parameter, which steps within backward as soon as the gradient is there. The same model without
GPipe gets the same whole mini-batches, so losses and norms of gradients have to be equal, from the
first step to the last.

    python -m examples.training_loop
    python -m examples.training_loop --steps 200 --chunks 8 --checkpoint always
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.options import CHECKPOINT, at_least
from examples.places import places
from torchgpipe import GPipe

FEATURES, WIDTH, CLASSES, BATCH = 16, 32, 4, 64

Batches = list[tuple[Tensor, Tensor]]


def classifier() -> nn.Sequential:
    """The layers, in double precision, so that rounding is not taken for a difference."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH)]
    for _ in range(3):
        layers += [nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(WIDTH, CLASSES)).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a mini-batch."""
    output = model(x)
    return F.cross_entropy(output, y.to(output.device))


def with_everything(model: nn.Module, plain: nn.Sequential, batches: Batches) -> Iterator[float]:
    """Run a usual loop; yield the loss of each mini-batch, the norms, and the loss of the average.

    Args:
        model: the model to train.
        plain: its layers under their own names: ``model.module`` of a wrapped model.
        batches: the mini-batches to train on; two of them make a step.
    """
    named = dict(plain.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = OneCycleLR(optimizer, max_lr=0.02, total_steps=len(batches) // 2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for k, (x, y) in enumerate(batches[: len(batches) // 2 * 2]):
        loss = loss_of(model, x, y)
        (loss / 2).backward()
        yield loss.item()
        if k % 2 == 1:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        yield loss_of(average, *batches[-1]).item()


def within_backward(model: nn.Module, plain: nn.Sequential, batches: Batches) -> Iterator[float]:
    """Run a loop in which each parameter is updated as soon as its gradient is there, and freed."""
    optimizers = {p: torch.optim.AdamW([p], 0.005) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in batches:
        loss = loss_of(model, x, y)
        loss.backward()
        yield loss.item()


Loop = Callable[[nn.Module, nn.Sequential, Batches], Iterator[float]]
LOOPS: dict[str, Loop] = {"with everything": with_everything, "within backward": within_backward}


def train(loop: Loop, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Train a model with and without GPipe; return what the loops have yielded."""
    torch.manual_seed(0)
    module, devices = classifier(), places(3)
    plain = copy.deepcopy(module).to(devices[0])
    model = GPipe(
        module, [4, 4, 4], devices=devices, chunks=options.chunks, checkpoint=options.checkpoint
    )
    teacher = torch.randn(FEATURES, CLASSES).double()
    inputs = [torch.randn(BATCH, FEATURES).double() for _ in range(options.steps)]
    batches = [(x.to(devices[0]), (x @ teacher).argmax(1).to(devices[0])) for x in inputs]
    return [*loop(model, model.module, batches)], [*loop(plain, plain, batches)]


def main(arguments: list[str] | None = None) -> int:
    """Train in both ways; return 0 if all is as without GPipe, and the losses have fallen."""
    parser = argparse.ArgumentParser(description="Train with all that a training loop usually has.")
    parser.add_argument("--steps", type=at_least(2), default=100, help="mini-batches")
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    right = True
    print(f"{'loss':16}  {'first':>8}  {'last':>8}  {'plain':>8}  difference at any time")
    for name, loop in LOOPS.items():
        found, expected = train(loop, options)
        difference = max(abs(a - b) for a, b in zip(found, expected))
        right &= difference < 1e-9 and found[-1] < found[0] / 2
        print(
            f"{name:16}  {found[0]:8.4f}  {found[-1]:8.4f}  {expected[-1]:8.4f}  {difference:.1e}"
        )
    if not right:
        print("\nNot as it should be: losses or norms differ by 1e-9 or more, or losses have not")
        print("fallen to half.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
