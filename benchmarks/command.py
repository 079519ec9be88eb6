"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.models.experiments import SCALE
from benchmarks.report.files import RESULTS
from examples.options import at_least

__all__ = ["add_device", "add_scale", "at_least", "output", "parse", "parser"]


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Print the description as it is, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS, [], False) or "(default" in text:
            return text
        default = action.default
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        return f"{text} (default: {shown})".lstrip()


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that describes the command, with the option ``--output``.

    Args:
        name: of the command.
        doc: docstring of its module.
    """
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=doc, formatter_class=Formatter
    )
    parser.add_argument(
        "--output",
        type=json_file,
        metavar="FILE.json",
        help="file of the result, with .md beside it (default: in benchmarks/results)",
    )
    return parser


def json_file(text: str) -> Path:
    """Parse the argument of ``--output``."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(
            f"the result is JSON (file: {text}); name it {path.with_suffix('.json')}"
        )
    try:
        # Make the folder now: an error after hours of measuring would come too late.
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"its folder cannot be made (file: {text}, reason: {error.strerror}); name another"
        ) from None
    return path


def output(options: argparse.Namespace, name: str) -> Path:
    """The file of the result: the one that ``--output`` names, or the default in its folder."""
    path: Path = options.output or RESULTS / f"{name}.json"
    return path


def add_device(parser: argparse.ArgumentParser, *devices: str) -> None:
    """Add the option ``--device``; the first device is the default."""
    parser.add_argument(
        "--device",
        choices=devices,
        default=devices[0],
        help="kind of device; virtual accelerators need a C++ compiler",
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse arguments, and check that there is a GPU if ``--device cuda`` asks for one."""
    options = parser.parse_args(argv)
    if getattr(options, "device", None) == "cuda" and not torch.cuda.is_available():
        parser.error("there must be a GPU that CUDA knows (device: cuda); take another --device")
    return options


def add_scale(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--scale``."""
    parser.add_argument(
        "--scale",
        type=at_least(1),
        nargs=3,
        metavar=("CHANNELS", "SIZE", "SAMPLES"),
        help="divisor of channels, pixels on a side, and the most samples in a mini-batch "
        f"(default: as in the papers; {' '.join(map(str, SCALE))} where the CPU computes them)",
    )
