"""Images and their classes, to train and to test on: handwritten digits, or a folder of images.

An image is a tensor of shape ``(3, size, size)`` with values from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

__all__ = ["Images", "batches", "digits", "folder"]

#: One in so many images is for the test, where the data has no such division of its own.
TEST = 5

#: Command that installs a missing package.
EXTRA = "run `pip install '.[benchmarks]'` in a clone of torchgpipe"


@dataclass(frozen=True)
class Images:
    """Images, each with the number of its class.

    Args:
        name: of the data.
        classes: number of classes.
        train: images to train on.
        test: images to test on.
    """

    name: str
    classes: int
    train: Dataset[tuple[Tensor, ...]]
    test: Dataset[tuple[Tensor, ...]]


def digits(size: int) -> Images:
    """The handwritten digits of scikit-learn, 8 by 8 pixels, enlarged to ``size``.

    Raises:
        ImportError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # It has no types.
    except ImportError as error:
        raise ImportError(f"the digits need scikit-learn: {EXTRA}") from error
    found, numbers = map(torch.as_tensor, load_digits(return_X_y=True))
    pixels = (found.float() / 16).view(-1, 1, 8, 8)
    pixels = F.interpolate(pixels, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    train, test = split(numbers.tolist())
    return Images(
        "digits of scikit-learn",
        10,
        TensorDataset(pixels[train], numbers[train]),
        TensorDataset(pixels[test], numbers[test]),
    )


def folder(path: Path, size: int) -> Images:
    """Images of a folder that holds a folder per class, or two such folders, ``train`` and ``val``.

    Raises:
        ImportError: Pillow is missing.
        ValueError: such folders are missing, or have no images.
    """
    if (path / "train").is_dir() and (path / "val").is_dir():
        train, test = files(path / "train"), files(path / "val")
        if train.keys() != test.keys():
            raise ValueError(
                f"train and val must have the same classes (folder: {path}, "
                f"in one alone: {', '.join(sorted(train.keys() ^ test.keys()))}); "
                "remove those folders"
            )
    else:
        found = files(path)
        few = [name for name, images in found.items() if len(images) < 2]
        if few:
            raise ValueError(
                "a class needs an image to train on and one to test on "
                f"(folder: {path / few[0]}); add one, or remove the folder"
            )
        labels = [name for name, images in found.items() for _ in images]
        flat = [image for images in found.values() for image in images]
        train, test = {name: [] for name in found}, {name: [] for name in found}
        for part, rows in zip((train, test), split(labels)):
            for row in rows.tolist():
                part[labels[row]].append(flat[row])
    return Images(path.name, len(train), Files(train, size), Files(test, size))


def files(path: Path) -> dict[str, list[Path]]:
    """Files of each class; classes and files are in the order of their names."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"images of a folder need Pillow: {EXTRA}") from error
    if not path.is_dir():
        raise ValueError(f"the images must be in a folder (folder: {path}); give one that exists")
    known = Image.registered_extensions()
    found = {
        x.name: sorted(y for y in x.iterdir() if y.suffix.lower() in known)
        for x in sorted(path.iterdir())
        if x.is_dir()
    }
    if len(found) < 2:
        raise ValueError(
            f"there must be two classes at least (folder: {path}, folders in it: {len(found)}); "
            "give each class a folder in it"
        )
    empty = [name for name, images in found.items() if not images]
    if empty:
        raise ValueError(
            f"a class must have images (folder: {path / empty[0]}); add some that Pillow reads, "
            "or remove the folder"
        )
    return found


def split(labels: Sequence[str | int]) -> tuple[Tensor, Tensor]:
    """Rows for training, and rows for the test: one in five of each class, and at least one."""
    generator = torch.Generator().manual_seed(0)
    train, test = [], []
    for label in sorted({*labels}):
        rows = torch.tensor([row for row, x in enumerate(labels) if x == label])
        rows = rows[torch.randperm(len(rows), generator=generator)]
        count = max(1, len(rows) // TEST)
        test.append(rows[:count])
        train.append(rows[count:])
    return torch.cat(train), torch.cat(test)


class Files(Dataset[tuple[Tensor, ...]]):
    """Images that are read when they are needed, cut to squares and resized.

    Args:
        classes: files of each class.
        size: pixels on a side.
    """

    def __init__(self, classes: dict[str, list[Path]], size: int) -> None:
        self.size = size
        self.rows = [(path, k) for k, paths in enumerate(classes.values()) for path in paths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        from PIL import Image, ImageOps

        path, label = self.rows[row]
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (self.size, self.size))
        pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1)
        return pixels / 255, torch.tensor(label)


def batches(
    data: Dataset[tuple[Tensor, ...]], rows: Sequence[Tensor], workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches of images and classes.

    Args:
        data: images.
        rows: indices of the images in each mini-batch.
        workers: number of processes that read images; with 0, this process reads them.
    """
    # A loader without a generator would draw from the one that initialises models.
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        data,
        batch_sampler=[x.tolist() for x in rows],
        num_workers=workers,
        generator=torch.Generator(),
    )
    return map(tuple, loader)
