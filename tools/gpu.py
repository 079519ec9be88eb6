"""The first hour with GPUs: every check and benchmark that waits for them, and one report.

``make gpu`` calls it. Each part is a process of its own, so that one that fails or hangs takes
nothing else along. The report is written after each part.

    python tools/gpu.py
    python tools/gpu.py --parts checks dry_run --folder gpu
    python tools/gpu.py --device virtual
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """A part of the report."""

    question: str
    command: list[str]
    """The arguments of ``python -m`` on GPUs."""
    virtual: list[str]
    """Those on virtual accelerators, at small size; empty if only GPUs can answer."""
    minutes: float
    """The most that it may take."""


SMALL = ["--n", "2", "--m", "4", "--width", "32", "--rows", "2", "--steps", "2"]

PARTS = {
    "promises": Part(
        "Do wrappers keep their promises on real streams?",
        ["pytest", "tests/gpu", "--quiet", "--tb=short"],
        [],
        20,
    ),
    "checks": Part(
        "Are gradients right and the same in each step, is a step as long as its limit, and as a "
        "dry run predicts it?",
        ["benchmarks", "accelerators", "--device", "cuda"],
        ["benchmarks", "accelerators", "--device", "virtual", *SMALL],
        5,
    ),
    "one_gpu": Part(
        "Do partitions that share a GPU overlap?",
        ["benchmarks", "one_gpu", "--device", "cuda"],
        ["benchmarks", "one_gpu", "--device", "virtual", "--repeat", "1"],
        5,
    ),
    "host": Part(
        "From which time of a cell on are devices the bottleneck, and not the host?",
        ["benchmarks", "host_bound", "--devices", "cuda"],
        [
            *("benchmarks", "host_bound", "--devices", "virtual", "--models", "tiny layers"),
            *("--n", "2", "--m", "2", "--seconds", "0", "--steps", "1", "--modes", "never"),
        ],
        5,
    ),
    "instructions": Part(
        "What does an instruction of a schedule cost the host?",
        ["benchmarks", "instructions", "--device", "cuda", "--seconds", "3"],
        [],
        5,
    ),
    "schedules": Part(
        "How fast are schedules, beside torch.distributed.pipelining?",
        ["benchmarks", "schedules", "--device", "cuda"],
        [],
        10,
    ),
    "memory": Part(
        "How much memory do the papers' models take?",
        ["benchmarks", "memory", "--device", "cuda", "--grid"],
        [],
        10,
    ),
    "speed": Part(
        "How fast are the papers' models, beside torchgpipe 0.0.7 and others?",
        ["benchmarks", "speed", "--device", "cuda", "--rounds", "2"],
        [],
        20,
    ),
    "ablation": Part(
        "What does each part of the engine bring?",
        ["benchmarks", "ablation", "--device", "cuda"],
        [],
        10,
    ),
}


def run(name: str, device: str, folder: Path) -> str:
    """Run a part; return its section of the report."""
    part = PARTS[name]
    command = part.command if device == "cuda" else part.virtual
    if not command:
        return f"## {part.question}\n\nOnly GPUs can answer this.\n"
    file = folder / f"{name}.json"
    is_test = command[0] == "pytest"
    more = [] if is_test else ["--output", str(file)]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command, *more],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60 * part.minutes,
        )
        failed = f"failed (status: {done.returncode})" if done.returncode else ""
        told = done.stdout if is_test else done.stderr
    except subprocess.TimeoutExpired:
        failed, told = f"was stopped after {part.minutes:g} minutes", ""
    seconds = time.monotonic() - begin
    head = f"## {part.question}\n\n`python -m {' '.join(command)}`: {seconds:.0f} s.\n"
    if failed:
        last = "\n".join(told.splitlines()[-12:])
        return f"{head}\n**It {failed}.**\n\n```\n{last}\n```\n"
    if is_test:
        return f"{head}\n{''.join(told.strip().splitlines()[-1:])}\n"
    _, _, text = file.with_suffix(".md").read_text("utf-8").partition("\n\n")
    return f"{head}\n{text}"


def main(arguments: list[str] | None = None) -> int:
    """Write the report; return 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "virtual"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.md"
    sections: list[str] = []
    for name in options.parts:
        print(f"{name}: {PARTS[name].question}", flush=True)
        sections.append(run(name, options.device, folder))
        report.write_text("\n".join([f"# Accelerators ({options.device})\n", *sections]), "utf-8")
    print(report)
    return int(any("**It " in section for section in sections))


if __name__ == "__main__":
    sys.exit(main())
