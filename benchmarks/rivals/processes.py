"""Libraries that are measured side by side, each in a process of its own.

torchgpipe 0.0.7 has the name of ours, so they cannot share a process. The processes stay alive, and
answer one request at a time: the parent asks one while the others are blocked, in as many rounds as
it likes, so that what disturbs the machine disturbs all of them.
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

#: Where libraries of PyPI are unpacked.
INSTALLED = ROOT / ".venv" / "rivals"

#: Those that can be had there, by the name of the rival.
REQUIREMENTS = {"0.0.7": "torchgpipe==0.0.7", "fairscale": "fairscale==0.4.13"}


class UnavailableError(RuntimeError):
    """A rival cannot take part."""

    @property
    def reason(self) -> str:
        """Its last line that says what was wrong: notes on where it was come behind that."""
        lines = [x for x in str(self).splitlines() if not x.startswith("raised in ")]
        return lines[-1] if lines else "no reason given"


@dataclass(frozen=True)
class Rival:
    """A library, and the folder that it is imported from.

    Args:
        name: what it is called in results.
        library: a key of :data:`benchmarks.rivals.library.PIPELINES`.
        folder: what is put on the module search path.
        version: what was measured: a requirement, or a commit.
    """

    name: str
    library: str
    folder: Path
    version: str | None


def checkout(name: str, folder: Path) -> Rival:
    """A checkout of torchgpipe.

    Raises:
        UnavailableError: there is none.
    """
    if not (folder / "torchgpipe" / "__init__.py").is_file():
        raise UnavailableError(f"this is no checkout of torchgpipe (folder: {folder})")
    return Rival(name, "torchgpipe", folder.resolve(), commit(folder))


def installed(name: str) -> Rival:
    """A library of PyPI, which is installed apart from everything else when it is missing.

    Raises:
        UnavailableError: it could not be installed.
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
    return Rival(name, requirement.partition("==")[0], folder, requirement)


class Running:
    """The process of a rival, for a ``with`` block.

    It starts at once, and the block waits until its library is imported: it raises
    :exc:`UnavailableError` if that cannot be, or has no such devices.

    Args:
        rival: whose it is.
        device: ``"cpu"``, ``"cuda"`` or ``"virtual"``.
        count: how many devices.
        threads: how many compute an operator.
    """

    def __init__(self, rival: Rival, device: str, count: int, threads: int = 1) -> None:
        self.rival = rival
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rivals.library"]
        self.process = subprocess.Popen(
            [*command, rival.library, str(rival.folder), device, str(count), str(threads)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def make(self, name: str, **arguments: Any) -> None:
        """Makes the ``module:Class`` that :meth:`call` speaks to, in place of the last one.

        Raises:
            UnavailableError: it raised.
        """
        self._ask(make=name, arguments=arguments)

    def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method of what was made, and waits for its result.

        Raises:
            UnavailableError: it raised.
        """
        return self._ask(call=method, arguments=arguments)

    def drop(self) -> None:
        """Lets go of what was made, and of its memory."""
        self._ask(drop=True)

    def close(self) -> None:
        """Ends the process."""
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
        with suppress(BrokenPipeError):  # The answer, which is missing then, says so.
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
    """Adds the options that choose rivals."""
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
    """Keeps processes that are started within a ``with`` block on so many cores, if possible."""
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
    """Starts the processes of rivals.

    Args:
        stack: closes them.
        names: of the rivals; those that are not of PyPI are made of this checkout.
        against: other checkouts, ``[NAME=]FOLDER`` each.
        device: ``"cpu"``, ``"cuda"`` or ``"virtual"``.
        count: how many devices.
        threads: how many compute an operator.

    Returns:
        The processes, and why other rivals are left out.
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
