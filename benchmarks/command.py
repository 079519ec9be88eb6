"""What the command lines of all benchmarks have in common."""

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
    """Prints the description as it is, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS, [], False) or "(default" in text:
            return text
        default = action.default
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        return f"{text} (default: {shown})".lstrip()


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that explains the benchmark, with the option ``--output``.

    Args:
        name: of the benchmark.
        doc: the docstring of its module.
    """
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=doc, formatter_class=Formatter
    )
    parser.add_argument(
        "--output",
        type=json_file,
        metavar="FILE.json",
        help="where the result goes; .md and .png go beside it (default: into benchmarks/results)",
    )
    return parser


def json_file(text: str) -> Path:
    """The argument of ``--output``."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(
            f"the result is JSON (file: {text}); name it {path.with_suffix('.json')}"
        )
    try:
        # Not when all has been measured.
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"its folder cannot be made (file: {text}, reason: {error.strerror}); name another"
        ) from None
    return path


def output(options: argparse.Namespace, name: str) -> Path:
    """Where the result goes: what ``--output`` says, or among the results by its name."""
    path: Path = options.output or RESULTS / f"{name}.json"
    return path


def add_device(parser: argparse.ArgumentParser, *devices: str) -> None:
    """Adds the option ``--device``, of which the first is the default."""
    parser.add_argument(
        "--device",
        choices=devices,
        default=devices[0],
        help="where it runs; virtual accelerators need a C++ compiler",
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses arguments, and checks that there is a GPU if one is asked for."""
    options = parser.parse_args(argv)
    if getattr(options, "device", None) == "cuda" and not torch.cuda.is_available():
        parser.error("there must be a GPU that CUDA knows (device: cuda); take another --device")
    return options


def add_scale(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--scale``."""
    parser.add_argument(
        "--scale",
        type=at_least(1),
        nargs=3,
        metavar=("CHANNELS", "SIZE", "SAMPLES"),
        help="what channels are divided by, pixels on a side, and the most samples in a mini-batch "
        f"(default: as in the papers; {' '.join(map(str, SCALE))} where the CPU computes them)",
    )
