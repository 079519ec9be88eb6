"""Train a ResNet of timm under GPipe, beside the ResNet as timm has it.

The forward of timm's ResNet runs its children one after the other, so they go into an
nn.Sequential as they are, under their names. Batch normalisations see micro-batches. So timm's
model gets the micro-batches, too, one after another, and both learn the same. timm's ModelEmaV3
keeps a moving average of the weights, and the average is tested at the end.

    pip install timm
    python -m examples.image_model
    python -m examples.image_model --model resnet18 --epochs 2
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import OrderedDict

import timm
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

from examples.options import CHECKPOINT, at_least
from examples.places import places
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_size

PARTITIONS = 4
BATCH = 32


def sequential(model: nn.Module) -> nn.Sequential:
    """The same layers as in timm's ResNet, in an nn.Sequential, with the same state_dict."""
    return nn.Sequential(OrderedDict(model.named_children()))


def images(rows: int) -> tuple[Tensor, Tensor]:
    """Stripes in noise, of shape ``(rows, 3, 32, 32)``, and their direction, one of four."""
    way = torch.randint(4, (rows,))
    angle = way.double() * torch.pi / 4
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    stripes = (along + 6 * torch.rand(rows, 1, 1)).sin().unsqueeze(1)
    return stripes + 0.5 * torch.randn(rows, 3, 32, 32, dtype=torch.double), way


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images whose direction the model tells, in percent."""
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1).cpu() == y).double().mean().item()


def main(arguments: list[str] | None = None) -> int:
    """Train a ResNet with and without GPipe; return 0 if both learn the same."""
    parser = argparse.ArgumentParser(description="Train a ResNet with and without GPipe.")
    parser.add_argument("--model", default="test_resnet", help="any ResNet of timm")
    parser.add_argument("--epochs", type=at_least(2), default=3)
    parser.add_argument("--rows", type=at_least(BATCH), default=256, help="how many to train on")
    # The last features have one pixel, and a batch normalisation needs two values per channel.
    parser.add_argument(
        "--chunks",
        type=int,
        choices=range(1, BATCH // 2 + 1),
        metavar="CHUNKS",
        default=4,
        help="micro-batches, each of two rows at least",
    )
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = timm.create_model(options.model, pretrained=False, num_classes=4).double()
    layers = sequential(copy.deepcopy(plain))
    x, y = images(options.rows)
    test_x, test_y = images(128)
    devices = places(PARTITIONS)
    balance = balance_by_size(PARTITIONS, layers, x[:BATCH], chunks=options.chunks)
    model = GPipe(
        layers, balance, devices=devices, chunks=options.chunks, checkpoint=options.checkpoint
    )
    x, test_x = x.to(devices[0]), test_x.to(devices[0])
    plain.to(devices[0])
    print(f"{len(model)} layers in partitions of {model.balance} on {[*map(str, model.devices)]}")

    averages = [ModelEmaV3(model, decay=0.9), ModelEmaV3(plain, decay=0.9)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.003) for each in (model, plain)]
    history, largest = [], 0.0
    for epoch in range(options.epochs):
        order = torch.randperm(len(x))[: len(x) // BATCH * BATCH].split(BATCH)
        total = 0.0
        for rows in order:
            output = model(x[rows])
            loss = F.cross_entropy(output, y[rows].to(output.device))
            # timm's model runs on the micro-batches one after another.
            parts = [plain(part) for part in x[rows].tensor_split(options.chunks)]
            reference = F.cross_entropy(torch.cat(parts), y[rows].to(parts[0].device))
            for optimizer, each in zip(optimizers, (loss, reference)):
                optimizer.zero_grad()
                each.backward()
                optimizer.step()
            averages[0].update(model)
            averages[1].update(plain)
            largest = max(largest, abs(loss.item() - reference.item()))
            total += loss.item() / len(order)
        history.append(total)
        print(f"epoch {epoch + 1}: loss {total:.6f}, largest difference so far {largest:.1e}")

    plain.eval(), model.eval()
    with torch.no_grad():
        close = torch.allclose(model(test_x).cpu(), plain(test_x).cpu(), atol=1e-4)
    reached = [accuracy(average.module, test_x, test_y) for average in averages]
    print(f"accuracy of the averages: {reached[0]:.1f} % with GPipe, {reached[1]:.1f} % without")
    plain.load_state_dict(model.module.state_dict())  # By the names that timm has.
    if close and largest < 1e-4 and reached[0] == reached[1] and history[-1] < history[0]:
        print("\nBoth learnt the same.")
        return 0
    print(
        "\nNot as it should be: the losses, outputs or averages differ, or the loss has not fallen."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
