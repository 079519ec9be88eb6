"""Rival libraries, each in a process of its own.

torchgpipe 0.0.7 has the name of ours, so they cannot share a process. The processes stay alive, and
the parent asks one at a time, in rounds, while the others are idle. Thus a disturbance of the
machine hits all rivals alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report.machine import ROOT, commit

#: Folder of the libraries that come from PyPI.
INSTALLED = ROOT / ".venv" / "rivals"

#: Requirements of the rivals that come from PyPI, by name.
REQUIREMENTS = {"0.0.7": "torchgpipe==0.0.7"}


class UnavailableError(RuntimeError):
    """A rival cannot take part."""

    @property
    def reason(self) -> str:
        """The last line that says what went wrong; notes on the place come after it."""
        lines = [x for x in str(self).splitlines() if not x.startswith("raised in ")]
        return lines[-1] if lines else "no reason given"


@dataclass(frozen=True)
class Rival:
    """A torchgpipe, and the folder to import it from.

    Args:
        name: in results.
        folder: to put on the module search path.
        version: a requirement, or a commit.
    """

    name: str
    folder: Path
    version: str | None


def checkout(name: str, folder: Path) -> Rival:
    """A checkout of torchgpipe as a rival.

    Raises:
        UnavailableError: the folder is not a checkout.
    """
    if not (folder / "torchgpipe" / "__init__.py").is_file():
        raise UnavailableError(f"this is no checkout of torchgpipe (folder: {folder})")
    return Rival(name, folder.resolve(), commit(folder))


def installed(name: str) -> Rival:
    """A library of PyPI as a rival; pip installs it into a folder of its own if it is missing.

    Raises:
        UnavailableError: pip failed.
    """
    requirement = REQUIREMENTS[name]
    folder = INSTALLED / requirement
    if not folder.exists():
        unfinished = folder.with_name(f"{requirement}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(unfinished), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise UnavailableError(
                f"{requirement} could not be installed ({reason[0]}); to try by hand: "
                f"pip install --no-deps --target {folder} {requirement}"
            )
        unfinished.rename(folder)
    return Rival(name, folder, requirement)


class Running:
    """The process of a rival, for a ``with`` block.

    The process starts at once. Entering the block waits until the process has imported the library,
    and raises :exc:`UnavailableError` if the library or the devices are missing.

    Args:
        rival: to run.
        device: ``"cpu"``, ``"cuda"`` or ``"virtual"``.
        count: number of devices.
        threads: number of threads that compute an operator.
    """

    def __init__(self, rival: Rival, device: str, count: int, threads: int = 1) -> None:
        self.rival = rival
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rivals.library"]
        self.process = subprocess.Popen(
            [*command, str(rival.folder), device, str(count), str(threads)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def make(self, name: str, **arguments: Any) -> None:
        """Make an object of ``module:Class`` in the process, in place of the previous one.

        Raises:
            UnavailableError: making it raised an error.
        """
        self._ask(make=name, arguments=arguments)

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the object in the process, and wait for the result.

        Raises:
            UnavailableError: the method raised an error.
        """
        return self._ask(call=method, arguments=arguments)

    def drop(self) -> None:
        """Free the object in the process, and its memory."""
        self._ask(drop=True)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Running:
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # The missing answer reports that.
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise UnavailableError(f"its process ended (status: {self.process.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise UnavailableError(answer["error"].strip())
        return answer["value"]


def add_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the options that choose rivals."""
    parser.add_argument("--rivals", nargs="+", choices=names, default=names, help="who takes part")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="[NAME=]CHECKOUT",
        help="another checkout of torchgpipe as a further rival",
    )


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Keep processes that start within a ``with`` block on ``count`` cores, if possible."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def start(
    stack: ExitStack,
    names: Sequence[str],
    against: Sequence[str],
    device: str,
    count: int,
    threads: int = 1,
) -> tuple[list[Running], dict[str, str]]:
    """Start the processes of rivals.

    Args:
        stack: ends them.
        names: of the rivals; names that are not in :data:`REQUIREMENTS` mean this checkout.
        against: other checkouts, ``[NAME=]FOLDER`` each.
        device: ``"cpu"``, ``"cuda"`` or ``"virtual"``.
        count: number of devices.
        threads: number of threads that compute an operator.

    Returns:
        The processes, and the reasons why rivals are left out, by name.
    """
    running, left_out = [], {}
    makers: dict[str, Callable[[], Rival]] = {
        name: partial(installed, name) if name in REQUIREMENTS else partial(checkout, name, ROOT)
        for name in names
    }
    for text in against:
        name, equals, path = text.partition("=")
        makers[name] = partial(checkout, name, Path(path if equals else text))
    started = []
    for name, make in makers.items():
        try:
            started.append(Running(make(), device, count, threads))
        except UnavailableError as error:
            left_out[name] = error.reason
    for process in started:
        try:
            running.append(stack.enter_context(process))
        except UnavailableError as error:
            left_out[process.rival.name] = error.reason
    return running, left_out
