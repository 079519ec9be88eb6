"""Ask a GPU for what it knows, in parts of at most 100 seconds, with one report.

``make gpu`` calls it. Parts stand in the order of what their figures are worth, so twelve minutes
give the most of them. Each is a process of its own, so that one that fails or hangs takes nothing
else along; it stops by itself when its time is over, and writes what it has. A part that ended for
the same commit is kept, so a run that was cut off goes on where it was.

    python tools/gpu.py
    python tools/gpu.py --parts clock steps --folder gpu
    python tools/gpu.py --device virtual
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

#: Seconds after which a part begins nothing more, and those after which it is stopped.
ENOUGH, MOST = 75, 100


class Part(NamedTuple):
    """A part of the report."""

    question: str
    command: list[str]
    """The arguments of ``python -m`` on GPUs."""
    virtual: list[str]
    """Those on virtual accelerators, at the least size."""
    gpus: int = 1
    """The least number of GPUs."""


#: Stands for the folder of the report.
FOLDER = "{folder}"
HARDWARE = ["--hardware", f"{FOLDER}/hardware.json"]
SMALL = ["--n", "2", "--m", "4", "--width", "32", "--rows", "2", "--steps", "2"]
LEAST = ["--n", "2", "--m", "2", "--seconds", "0", "--steps", "1", "--modes", "never"]
FOUR = ["--experiments", "unet/pipeline-4", "resnet101/pipeline-4", "amoebanetd/n4m32"]
UNET = ["--experiments", "unet/pipeline-1", "unet/pipeline-2"]


def trained(*names: str) -> list[str]:
    """The arguments of a part that measures training steps beside dry runs."""
    return ["benchmarks", "accelerators", "--device", "cuda", *HARDWARE, "--trained", *names]


PARTS = {
    "clock": Part(
        "Which share of its data sheet does the GPU reach, by size, and how late is its host?",
        ["torchgpipe.testing.measure", "--output", f"{FOLDER}/hardware.json"],
        ["torchgpipe.testing.measure", "--virtual", "--output", f"{FOLDER}/hardware.json"],
    ),
    "promises": Part(
        "Do wrappers keep their promises on real streams? Each in one mode.",
        ["pytest", "tests/gpu", "--quiet", "--tb=short"],
        ["pytest", "tests/gpu", "--quiet", "--collect-only"],
    ),
    "steps": Part(
        "Are gradients right and the same in each step? How long are steps beside dry runs?",
        trained("equal layers", "GPT, never"),
        ["benchmarks", "accelerators", "--device", "virtual", *SMALL, *HARDWARE],
    ),
    "more_steps": Part(
        "How long are steps that recompute or offload, beside dry runs?",
        [
            *trained("GPT, always", "GPT, offload", "U-Net (5, 64), except_last"),
            "--wrappers",
        ],
        ["benchmarks", "accelerators", "--device", "virtual", *SMALL, "--wrappers"],
    ),
    "speed": Part(
        "How fast is GPipe, beside torchgpipe 0.0.7 and the plain model?",
        ["benchmarks", "speed", "--device", "cuda", "--rounds", "2", *UNET],
        ["benchmarks", "speed", "--device", "virtual", "--rounds", "1", "--rivals", "ours", *UNET],
    ),
    "host": Part(
        "From which time of a cell on are devices the bottleneck, and not the host?",
        ["benchmarks", "host_bound", "--devices", "cuda", "--n", "4", "--models", "tiny layers"],
        ["benchmarks", "host_bound", "--devices", "virtual", "--models", "tiny layers", *LEAST],
    ),
    "mapped": Part(
        "What does a mapped module cost the host, beside Accelerate?",
        ["benchmarks", "mapped", "--device", "cuda", "--seconds", "2"],
        [
            *("benchmarks", "mapped", "--device", "virtual", "--seconds", "0", "--repeat", "1"),
            *("--blocks", "4", "--m", "2"),
        ],
    ),
    "one_gpu": Part(
        "Do partitions that share a GPU overlap?",
        ["benchmarks", "one_gpu", "--device", "cuda", "--repeat", "5"],
        ["benchmarks", "one_gpu", "--device", "virtual", "--repeat", "1"],
    ),
    "broken_step": Part(
        "Is memory whole after a step that failed in the middle, and empty_cache()?",
        ["pytest", "tests/gpu/test_failed_step.py", "--quiet", "--tb=short"],
        ["pytest", "tests/gpu/test_failed_step.py", "--quiet", "--collect-only"],
    ),
    "memory": Part(
        "How much memory do the papers' models take?",
        ["benchmarks", "memory", "--device", "cuda", "--grid"],
        [
            *("benchmarks", "memory", "--device", "virtual", "--experiments", "--grid", "unet"),
            *("--n", "1", "--m", "1", "--modes", "never", "--rivals", "ours"),
        ],
    ),
    "speed_ups": Part(
        "How much faster are several GPUs, with real copies between them?",
        ["benchmarks", "speed", "--device", "cuda", "--rounds", "2", *FOUR],
        [],
        gpus=2,
    ),
    "nccl": Part(
        "Does Pipe train over NCCL?",
        ["pytest", "tests/gpu/test_nccl.py", "--quiet", "--tb=short"],
        ["pytest", "tests/gpu/test_nccl.py", "--quiet", "--collect-only"],
        gpus=2,
    ),
}


def run(name: str, device: str, folder: Path) -> str:
    """Run a part; return its section of the report."""
    part = PARTS[name]
    if device == "virtual" and not part.virtual:
        return f"## {part.question}\n\nOnly GPUs can answer this.\n"
    command = [
        x.format(folder=folder) for x in (part.command if device == "cuda" else part.virtual)
    ]
    file = folder / f"{name}.json"
    is_benchmark = command[0] == "benchmarks"
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command, *(["--output", str(file)] if is_benchmark else [])],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=MOST,
            env=os.environ | {"BENCHMARK_SECONDS": str(ENOUGH)},
        )
        failed = f"failed (status: {done.returncode})" if done.returncode else ""
        told = done.stderr if is_benchmark else done.stdout
    except subprocess.TimeoutExpired as error:
        failed, told = f"was stopped after {MOST} seconds", (error.stdout or b"").decode()
    seconds = time.monotonic() - begin
    head = f"## {part.question}\n\n`python -m {' '.join(command)}`: {seconds:.0f} s.\n"
    if failed:
        last = "\n".join(told.splitlines()[-12:])
        return f"{head}\n**It {failed}.**\n\n```\n{last}\n```\n"
    if not is_benchmark:
        return f"{head}\n```\n{told.strip()[-2000:]}\n```\n"
    _, _, text = file.with_suffix(".md").read_text("utf-8").partition("\n\n")
    left_out = [line for line in told.splitlines() if line.startswith("left out")]
    return "\n".join([head, text, *left_out])


def commit() -> str:
    """The commit of this checkout, and whether files differ from it."""
    described = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--match="]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Write the report; return 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "virtual"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--again", action="store_true", help="also the parts that have ended")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve() / options.device / (commit() or "no commit")
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.md"
    count = sum(1 for x in Path("/proc/driver/nvidia/gpus").glob("*"))
    sections: list[str] = []
    for name in options.parts:
        ended = folder / f"{name}.section"
        if options.device == "cuda" and count < PARTS[name].gpus:
            sections.append(f"## {PARTS[name].question}\n\nNot run: GPUs: {count}.\n")
        elif ended.exists() and not options.again:
            sections.append(ended.read_text("utf-8"))
        else:
            print(f"{name}: {PARTS[name].question}", flush=True)
            sections.append(run(name, options.device, folder))
            if "**It " not in sections[-1]:
                ended.write_text(sections[-1], "utf-8")
        report.write_text("\n".join([f"# What GPUs say ({options.device})\n", *sections]), "utf-8")
    print(report)
    return int(any("**It " in section for section in sections))


if __name__ == "__main__":
    sys.exit(main())
