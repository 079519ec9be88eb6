"""Processes of their own, without the time that ``import torch`` takes in each.

The first one starts a server that imports torch, and the server forks itself for each process. The
process of the tests cannot be forked for that: its autograd may have threads. A soak takes
interpreters that are new in all.
"""

import os
import runpy
import subprocess
import sys
import warnings
from multiprocessing import Pipe, get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.size import SOAK

#: How to start processes, also for torch.multiprocessing.
METHOD = "spawn" if SOAK else "forkserver"

_context = get_context(METHOD)
_modules = ["torch"]


def preload(*names):
    """Have the server import more modules; only before the first process."""
    _modules.extend(names)
    if not SOAK:
        _context.set_forkserver_preload(_modules)


preload()

_popen = subprocess.Popen


def popen(command, **options):
    """``subprocess.Popen``, which forks the server for a command ``python -W ignore -m MODULE``."""
    if SOAK or command[:4] != [sys.executable, "-W", "ignore", "-m"]:
        return _popen(command, **options)
    return _Program(*command[4:], **options)


class _Program:
    """A process with the attributes of ``subprocess.Popen`` that the benchmarks need."""

    def __init__(self, module, *arguments, cwd, env, stdin, stdout, text, encoding):
        theirs_in, mine_in = Pipe(duplex=False)
        mine_out, theirs_out = Pipe(duplex=False)
        self._process = _context.Process(
            target=_run, args=(module, arguments, cwd, env, theirs_in, theirs_out)
        )
        self._process.start()
        theirs_in.close()
        theirs_out.close()
        self.stdin = os.fdopen(os.dup(mine_in.fileno()), "w", encoding=encoding)
        self.stdout = os.fdopen(os.dup(mine_out.fileno()), encoding=encoding)
        mine_in.close()
        mine_out.close()

    @property
    def returncode(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.returncode

    def kill(self):
        self._process.kill()


def _run(module, arguments, folder, environment, requests, answers):
    """Be ``python -W ignore -m module``."""
    os.dup2(requests.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    requests.close()
    answers.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    warnings.simplefilter("ignore")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run(program):
    """Run source text in a process of its own; return its status, and what it prints."""
    if SOAK:
        return run_new(program)
    with TemporaryDirectory() as folder:
        process = _context.Process(target=_be, args=(program, folder))
        process.start()
        process.join()
        out, err = (Path(folder, name).read_text("utf-8") for name in ("out", "err"))
        return process.exitcode, out, err


def _be(program, folder):
    """Be ``python -W ignore -c program``, and write into files of a folder."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY), number)
    sys.argv[:] = ["-c"]
    warnings.simplefilter("ignore")
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def run_new(program):
    """Run source text in a new interpreter, as for a program about what is imported.

    The server has imported torch, and what other tests have it import.
    """
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = _popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = done.communicate()
    return done.returncode, out, err
