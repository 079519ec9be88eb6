"""Train two models on handwritten digits, under GPipe and as they are, side by side.

Each model is an nn.Sequential over four partitions, which sit on the accelerators of this machine,
or on the CPU if it has none. The same model without GPipe starts from the same weights and sees the
same batches, so the two losses have to be equal, up to rounding, from the first step to the last.

    python -m examples.digits
    python -m examples.digits --epochs 30 --chunks 4 --checkpoint always
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from examples.options import CHECKPOINT, at_least
from examples.places import places
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time
from torchgpipe.skip import Namespace, pop, skippable, stash

PARTITIONS = 4
BATCH = 96


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution with group normalisation."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(8, outputs), nn.ReLU())


@skippable(stash=["features"])
class Down(nn.Module):
    """Compute features, stash them at full size, and pass them on at half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = convolution(inputs, outputs)

    def forward(self, x: Tensor) -> Iterator[stash]:
        features = self.convolution(x)
        yield stash("features", features)
        return F.max_pool2d(features, 2)


@skippable(pop=["features"])
class Up(nn.Module):
    """Join the output of the coarser level with the features of this level."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = convolution(inputs, outputs)

    def forward(self, x: Tensor) -> Iterator[pop]:
        features = yield pop("features")
        return self.convolution(torch.cat([F.interpolate(x, scale_factor=2), features], dim=1))


def unet() -> nn.Sequential:
    """A small U-Net, in which finer features skip over more layers."""
    fine, coarse = Namespace(), Namespace()
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        Down(1, 16).isolate(fine),
        Down(16, 32).isolate(coarse),
        convolution(32, 64),
        Up(64 + 32, 32).isolate(coarse),
        Up(32 + 16, 32).isolate(fine),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Tokens(nn.Module):
    """Cut an image of 8 by 8 into 9 overlapping patches of 4 by 4, each a token with its place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=2)
        self.place = nn.Parameter(torch.randn(9, width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.patch(x.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2) + self.place


def transformer(width: int = 48, layers: int = 3) -> nn.Sequential:
    """A small Transformer over the patches of an image, without dropout."""

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    return nn.Sequential(
        Tokens(width),
        *[layer() for _ in range(layers)],
        nn.LayerNorm(width),
        nn.Flatten(),
        nn.Linear(9 * width, 10),
    )


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of shape ``(rows, 64)`` and their digits, to train on and to test on."""
    images, digits = load_digits(return_X_y=True)
    split = train_test_split(images / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    x, test_x, y, test_y = map(torch.as_tensor, split)
    return x, y, test_x, test_y


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Make a training step; return its loss."""
    optimizer.zero_grad()
    output = model(x)
    loss = F.cross_entropy(output, y.to(output.device))
    loss.backward()
    optimizer.step()
    return loss.item()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images whose digit the model tells, in percent."""
    model.eval()
    with torch.no_grad():
        right = model(x).argmax(1).cpu() == y
    model.train()
    return 100 * right.double().mean().item()


class Result(NamedTuple):
    """The result of training a model with and without GPipe."""

    difference: float
    """The largest difference between their losses at any step."""
    losses: list[float]
    """The mean loss of each epoch, with GPipe."""
    accuracy: float
    """The accuracy on images that the model was not trained on, in percent, with GPipe."""

    def is_right(self) -> bool:
        """Whether the model trained as it should."""
        falling = self.losses[-1] < self.losses[0] / 2
        return self.difference < 1e-4 and falling and self.accuracy > 97


def train(name: str, make: Callable[[], nn.Sequential], options: argparse.Namespace) -> Result:
    """Train a model with and without GPipe, side by side."""
    torch.manual_seed(0)
    # In double precision: training amplifies the rounding of single precision beyond any bound.
    module, devices = make().double(), places(PARTITIONS)
    plain = copy.deepcopy(module).to(devices[0])
    x, y, test_x, test_y = data()
    sample = x[: max(1, BATCH // options.chunks)]
    balance = balance_by_time(PARTITIONS, module, sample, device=devices[0])
    model = GPipe(
        module,
        balance,
        devices=devices,
        chunks=options.chunks,
        checkpoint=options.checkpoint,
    )
    print(
        f"\n{name}: {len(model)} layers in partitions of {model.balance} on "
        f"{', '.join(map(str, model.devices))}; {options.chunks} micro-batches, "
        f"checkpoint={options.checkpoint!r}"
    )
    x, test_x = x.to(devices[0]), test_x.to(devices[0])
    batches = -(-len(x) // BATCH)
    models = [model, plain]
    optimizers = [torch.optim.AdamW(m.parameters(), weight_decay=0.3) for m in models]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, options.lr, options.epochs * batches)
        for o in optimizers
    ]

    lines = []
    largest = 0.0
    with tqdm(total=options.epochs * batches, desc=name, unit="step", file=sys.stdout) as bar:
        for epoch in range(options.epochs):
            totals = [0.0, 0.0]
            for rows in torch.randperm(len(x)).split(BATCH):
                losses = [step(m, o, x[rows], y[rows]) for m, o in zip(models, optimizers)]
                for schedule in schedules:
                    schedule.step()
                largest = max(largest, abs(losses[0] - losses[1]))
                totals = [a + b * len(rows) / len(x) for a, b in zip(totals, losses)]
                bar.set_postfix_str(f"loss {losses[0]:.4f}, plain {losses[1]:.4f}", refresh=False)
                bar.update()
            lines.append((epoch + 1, *totals))

    print(f"{'epoch':>5}  {'GPipe':>9}  {'plain':>9}  {'difference':>10}")
    shown = -(-options.epochs // 6)
    for epoch, loss, reference in lines:
        if epoch % shown == 0 or epoch in (1, options.epochs):
            print(f"{epoch:5}  {loss:9.6f}  {reference:9.6f}  {loss - reference:10.1e}")
    reached = accuracy(model, test_x, test_y)
    print(f"largest difference of any step {largest:.1e}, test accuracy {reached:.2f} %")
    return Result(largest, [loss for _, loss, _ in lines], reached)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train two models on digits, with and without GPipe."
    )
    parser.add_argument("--epochs", type=at_least(1), default=8)
    parser.add_argument("--lr", type=float, default=0.003, help="the highest learning rate")
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=1,
        help="threads of an operator on the CPU; small operators need no more",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Train both models; return 0 if both trained as they should."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    results = [
        train("U-Net", unet, options),
        train("transformer", transformer, options),
    ]
    if all(result.is_right() for result in results):
        print("\nBoth trained as without GPipe: equal losses within 1e-4, and above 97 % accuracy.")
        return 0
    print("\nNot as it should be: the losses differ by 1e-4 or more, or have not fallen to half, ")
    print("or the accuracy is not above 97 %.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
