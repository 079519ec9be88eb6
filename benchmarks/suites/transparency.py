r"""Losses and final accuracy of a training, plain and under GPipe.

A ResNet trains on images until it converges: plain on whole mini-batches, and under GPipe with
several numbers of partitions, from the same weights and on the same mini-batches. Two comparisons:

- With group normalisation instead of batch normalisation, in double precision. Then nothing couples
  the images of a mini-batch, so the losses must be equal at each step, up to rounding.
- With batch normalisation, in single precision, with several seeds. Under GPipe, batch
  normalisation sees micro-batches, so the trainings differ, and only their accuracies must be the
  same within noise.

The images are the digits of scikit-learn, or a folder of images, which needs Pillow. They are
resized and not augmented, so accuracies are below those of papers. By default, each partition has a
virtual accelerator of its own. On GPUs, this command trains ResNet-101 on ImageNet, without the
first comparison, which takes long there:

    python -m benchmarks transparency --images imagenet --model resnet101 --device cuda \
        --batch 256 --epochs 90 --exact-epochs 0 --workers 16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from benchmarks import command
from benchmarks.models import resnet, resnet101
from benchmarks.models.images import Images, batches, digits, folder
from benchmarks.progress import progress
from benchmarks.report.files import head, publish
from benchmarks.rivals.convergence import Course, Outcome, Variant, count, grouped
from benchmarks.suites.tables.transparency import Row, summarise
from examples.options import at_least
from torchgpipe.balance import balance_by_time
from torchgpipe.testing import UnavailableError, load

__all__ = ["main", "summarise"]

MODELS: dict[str, Callable[[int], nn.Sequential]] = {
    "resnet": partial(resnet, [1, 1, 1], width=16),
    "resnet101": resnet101,
}

#: Number of losses to keep of a training, roughly.
KEPT = 500


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    parser = command.parser("transparency", __doc__)
    positive = at_least(1)
    parser.add_argument(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="with a folder of images for each class, or train and val with such folders "
        "(default: digits)",
    )
    parser.add_argument("--size", type=positive, help="pixels (default: 32, and 224 with --images)")
    parser.add_argument("--model", choices=MODELS, default="resnet", help="11 layers deep, or 101")
    parser.add_argument("--n", type=positive, nargs="+", default=[1, 2, 4], help="partitions")
    parser.add_argument("--chunks", type=positive, default=4, help="micro-batches")
    parser.add_argument(
        "--seeds", type=positive, default=5, help="number of trainings of each kind"
    )
    parser.add_argument("--epochs", type=positive, default=12)
    parser.add_argument(
        "--exact-epochs",
        type=at_least(0),
        help="of the training in double precision; 0 leaves it out (default: as --epochs)",
    )
    parser.add_argument("--batch", type=positive, default=96, help="images in a mini-batch")
    parser.add_argument("--lr", type=float, default=0.1, help="the highest learning rate")
    parser.add_argument(
        "--device",
        default="virtual",
        help="virtual (the default), of which each partition has one; cpu, which they share; or a "
        "type of accelerator, such as cuda",
    )
    parser.add_argument("--workers", type=at_least(0), default=0, help="processes that read images")
    return parser


def devices_of(kind: str, n: int) -> list[torch.device]:
    """Devices of a kind, of which the command needs n at most.

    Raises:
        ValueError: the machine has no such devices.
        UnavailableError: virtual accelerators cannot be loaded.
    """
    if kind == "cpu":
        return [torch.device("cpu")]
    if kind == "virtual":
        return load(n)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        raise ValueError(
            f"the machine must have such a device (device: {kind!r}); "
            f"take --device {accelerator.type if accelerator else 'cpu'}"
        )
    return [torch.device(kind, k) for k in range(torch.accelerator.device_count())]


def verify(options: argparse.Namespace, images: Images, layers: nn.Sequential) -> None:
    """Check the options.

    Raises:
        ValueError: the mini-batch is too large or too small, or there are too many partitions.
    """
    rows = count(images.train)
    if options.batch > rows:
        raise ValueError(
            "a mini-batch must not have more images than there are to train on "
            f"(batch: {options.batch}, images: {rows}); take --batch {rows} or less"
        )
    if options.batch < 2 * options.chunks:
        raise ValueError(
            "batch normalisation needs two images in a micro-batch "
            f"(batch: {options.batch}, chunks: {options.chunks}); "
            f"take --batch {2 * options.chunks} or more, or fewer chunks"
        )
    if max(options.n) > len(layers):
        raise ValueError(
            f"each partition must have a layer (n: {max(options.n)}, layers: {len(layers)}); "
            f"take --n {len(layers)} or less"
        )


def plan(options: argparse.Namespace) -> Course:
    """Training in single precision that the options ask for.

    Raises:
        ValueError: the options are impossible.
        ImportError: the package that reads the images is missing.
        UnavailableError: virtual accelerators cannot be loaded.
    """
    size = options.size or (224 if options.images else 32)
    images = folder(options.images, size) if options.images else digits(size)
    make = partial(MODELS[options.model], images.classes)
    layers = make()
    verify(options, images, layers)
    devices = devices_of(options.device, max(options.n))
    rows = [torch.arange(options.batch // options.chunks)]
    ((sample, _),) = batches(images.train, rows, 0)
    # On virtual accelerators layers take no time.
    timed = torch.device("cpu") if options.device == "virtual" else devices[0]
    balances = {n: balance_by_time(n, layers, sample, timeout=0.1, device=timed) for n in options.n}
    return Course(
        images=images,
        make=make,
        dtype=torch.float32,
        devices=devices,
        balances=balances,
        chunks=options.chunks,
        epochs=options.epochs,
        batch=options.batch,
        rate=options.lr,
        workers=options.workers,
    )


def measure(course: Course, seeds: int, exact_epochs: int) -> Iterator[Row]:
    """Train each variant without batch normalisation, and with it for each seed; yield rows."""
    make = course.make
    exact = replace(course, make=lambda: grouped(make()), dtype=torch.float64, epochs=exact_epochs)
    variants = [Variant(), *map(Variant, course.balances)]
    jobs = [("exact", exact, x, 0) for x in variants if exact_epochs]
    variants += [Variant(n, deferred=True) for n in course.balances]
    jobs += [("batch", course, x, seed) for seed in range(seeds) for x in variants]
    plain: Outcome | None = None
    for part, setting, variant, seed in progress(jobs, "transparency", "training"):
        outcome = setting.run(variant, seed)
        if variant.n is None:
            plain = outcome
        assert plain is not None
        row: Row = {
            "part": part,
            "variant": variant.name,
            "n": variant.n,
            "deferred": variant.deferred,
        }
        row |= {"seed": seed, "accuracy": outcome.accuracy, "digests": outcome.digests}
        if part == "exact":
            row["loss_difference"] = outcome.difference_of_losses(plain)
            row["weight_difference"] = outcome.difference_of_parameters(plain)
            row["every"] = -(-len(outcome.losses) // KEPT)
            row["losses"] = outcome.losses[:: row["every"]]
        else:
            steps = len(outcome.losses) // setting.epochs
            row["last_loss"] = mean(outcome.losses[-steps:])
        yield row


def main(argv: Sequence[str]) -> None:
    """Measure and publish."""
    reads = parser()
    options = reads.parse_args(argv)
    torch.set_num_threads(1)
    try:
        course = plan(options)
    except UnavailableError as error:
        reads.error(f"{error}, or take --device cpu")
    except (ImportError, ValueError) as error:
        reads.error(str(error))
    exact_epochs = options.epochs if options.exact_epochs is None else options.exact_epochs
    images = course.images
    found = head(
        "transparency",
        argv,
        model=options.model,
        images={
            "name": images.name,
            "classes": images.classes,
            "train": count(images.train),
            "test": count(images.test),
        },
        device=options.device,
        devices=len(course.devices),
        balances=course.balances,
        chunks=options.chunks,
        batch=options.batch,
        epochs=options.epochs,
        exact_epochs=exact_epochs,
        seeds=options.seeds,
        lr=options.lr,
    )
    torch.backends.cudnn.deterministic = True
    rows = list(measure(course, options.seeds, exact_epochs))
    publish(command.output(options, "transparency"), found, rows, summarise)
