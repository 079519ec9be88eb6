r"""What training comes to under GPipe, and without it: the losses, and the accuracy at the end.

A ResNet is trained on images until it has converged, plain on whole mini-batches, and under GPipe
over several numbers of partitions, from the same weights and on the same mini-batches. It is done
in two ways:

- With group normalisation instead of batch normalisation, in double precision. Nothing couples the
  images of a mini-batch then, so the losses have to be equal at each step, up to rounding.
- As it is, in single precision, with several seeds. Batch normalisation sees micro-batches under
  GPipe, so this is another training, and its accuracy has to be the same within noise.

It trains on the digits of scikit-learn, or on any folder of images, for which it needs Pillow. They
are resized, and nothing is done to them at random, so accuracies are below those of papers. Without
GPUs, each partition has a virtual accelerator of its own. On GPUs, this is ResNet-101 on ImageNet;
the first way takes long there, so it is left out:

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

#: Of a list of losses, about so many are kept.
KEPT = 500


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = command.parser("transparency", __doc__)
    positive = at_least(1)
    parser.add_argument(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="that has a folder of images for each class, or train and val with such folders "
        "(default: digits)",
    )
    parser.add_argument("--size", type=positive, help="pixels (default: 32, and 224 with --images)")
    parser.add_argument("--model", choices=MODELS, default="resnet", help="11 layers deep, or 101")
    parser.add_argument("--n", type=positive, nargs="+", default=[1, 2, 4], help="partitions")
    parser.add_argument("--chunks", type=positive, default=4, help="micro-batches")
    parser.add_argument("--seeds", type=positive, default=5, help="how many")
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
    """The devices of a kind, of which n are needed at most.

    Raises:
        ValueError: there are none.
        UnavailableError: there can be no virtual ones.
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
    """Finds what cannot be trained.

    Raises:
        ValueError: the size of a mini-batch, or the number of partitions.
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
    """The training in single precision that options ask for.

    Raises:
        ValueError: it is not possible.
        ImportError: there is nothing that reads the images.
        UnavailableError: there can be no virtual accelerators.
    """
    size = options.size or (224 if options.images else 32)
    images = folder(options.images, size) if options.images else digits(size)
    make = partial(MODELS[options.model], images.classes)
    layers = make()
    verify(options, images, layers)
    devices = devices_of(options.device, max(options.n))
    rows = [torch.arange(options.batch // options.chunks)]
    ((sample, _),) = batches(images.train, rows, 0)
    # In virtual time, layers take none.
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
    """A row for each variant without batch normalisation, and for each and each seed with it."""
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
    """Trains, and publishes the result."""
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
