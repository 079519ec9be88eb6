"""Run the tests in processes side by side, show their progress, and sum up what came of them.

Accelerators are made before the first backward of a process, so ``tests/virtual`` has processes of
its own, and each computes on one core. Needs nothing but pytest; ``make test`` calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

#: The paths that each process tests; without any, all that the others do not. The last one is the
#: shortest, and takes what the others leave of the processor. More processes take more, since each
#: imports torch, its compiler and Transformers: 15 seconds of the CPU.
PROCESSES = {
    "virtual": ["tests/virtual"],
    "others": [],
    "contract": ["tests/contract", "tests/schedule"],
}

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "tests"

#: Seconds between two reports of progress, on a terminal and in a log.
TERMINAL, LOG = 2.0, 15.0


class Tests:
    """Pytest in a process, which writes to a log."""

    def __init__(self, name: str, python: list[str]) -> None:
        self.name = name
        paths = PROCESSES[name]
        if not paths:
            paths = [f"--ignore={path}" for some in PROCESSES.values() for path in some]
        self.log = LOGS / f"{name}.log"
        self.began = self.ended = time.monotonic()
        with self.log.open("wb") as file:
            # In a session of its own, so that its children end with it.
            self.process = subprocess.Popen(
                [*python, "-m", "pytest", "-q", "-rfEs", "--color=no", *paths],
                cwd=ROOT,
                # Pytest keeps the assertions that it has rewritten as bytecode.
                env={k: x for k, x in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(os.nice, 10 if name == [*PROCESSES][-1] else 0),
            )

    def running(self) -> bool:
        """Whether the process still runs."""
        if self.process.poll() is None:
            self.ended = time.monotonic()
            return True
        return False

    def text(self) -> str:
        """The text that the process wrote so far."""
        return self.log.read_text("utf-8", "replace")

    def progress(self) -> str:
        """The share of tests that are done, in percent, and the number that failed so far."""
        lines = re.findall(r"^([.sFExX]+) +\[ *(\d+)%\]$", self.text(), re.MULTILINE)
        failed = sum(len(re.findall("[FE]", outcomes)) for outcomes, _ in lines)
        percent = lines[-1][1] if lines else "0"
        return f"{self.name} {percent} %" + (f" ({failed} failed)" if failed else "")

    def failures(self) -> str:
        """The report of pytest on failures, or all that it wrote if it did not come to a report."""
        text = self.text()
        found = re.search(r"^=+ (ERRORS|FAILURES) =+$", text, re.MULTILINE)
        return text[found.start() :] if found else text

    def skips(self) -> list[str]:
        """The reasons of skips, as pytest says them."""
        return re.findall(r"^SKIPPED .*$", self.text(), re.MULTILINE)

    def outcomes(self) -> Counter[str]:
        """The numbers of tests by outcome; a process that died counts as a failed test."""
        summary = re.findall(r"^=*(.+) in [\d.]+s\b.*$", self.text(), re.MULTILINE)
        counts: Counter[str] = Counter()
        for number, outcome in re.findall(r"(\d+) (\w+)", summary[-1] if summary else ""):
            counts["failed" if outcome.startswith("error") else outcome] += int(number)
        if self.process.returncode and not counts["failed"]:
            counts["failed"] = 1
        return counts

    def end(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def watch(processes: list[Tests]) -> None:
    """Report progress until the last process has ended."""
    terminal = sys.stderr.isatty()
    reported = time.monotonic()
    while [process for process in processes if process.running()]:
        time.sleep(0.2)
        if time.monotonic() - reported > (TERMINAL if terminal else LOG):
            reported = time.monotonic()
            line = "   ".join(process.progress() for process in processes)
            # On a terminal, each line takes the place of the one before.
            sys.stderr.write(f"\r{line}\x1b[K" if terminal else f"{line}\n")
            sys.stderr.flush()
    if terminal:
        sys.stderr.write("\r\x1b[K")


def said(counts: Counter[str]) -> str:
    """Outcomes in pytest's words."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coverage", action="store_true", help="record which lines run")
    options = parser.parse_args()
    python = [sys.executable] + (["-m", "coverage", "run"] if options.coverage else [])

    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes: list[Tests] = []
    try:
        processes += [Tests(name, python) for name in PROCESSES]
        watch(processes)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in processes:
            process.end()
        print("\ninterrupted")
        return 130

    for process in processes:
        if process.process.returncode:
            print(f"\n{process.name} ended with status {process.process.returncode}:\n")
            print(process.failures())
    skips = [skip for process in processes for skip in process.skips()]
    print("\n".join(skips), end="\n\n" if skips else "")
    total: Counter[str] = Counter()
    for process in processes:
        counts = process.outcomes()
        total += counts
        seconds = process.ended - process.began
        print(f"{process.name:10}{said(counts)} in {seconds:.0f} s")
    print(said(total))
    return int(any(process.process.returncode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
