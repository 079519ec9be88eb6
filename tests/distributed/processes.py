"""Processes that compute together: started once, and sent many cases.

A case is a function of a module, called in each of the processes with their group, which raises if
something is not as it should be. After a failure the processes are started anew, since some of them
may wait for others.
"""

import datetime
import os
import pickle
import socket
import traceback
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import wait

import pytest
import torch

from tests.support.fresh import preload
from torchgpipe._torch.dynamo import VERSION

#: Why there is no pipeline over several processes with an older PyTorch, if this is one.
OLD = "the runtime of PyTorch 2.13 or newer" if VERSION < (2, 13) else ""

#: The most processes of a case.
SIZE = 4

#: In how many seconds a case is taken to hang.
TIMEOUT = 30

#: In how many seconds processes start.
START = 120

# A server that has imported what takes long, and most cases, forks itself for each process.
_context = get_context("forkserver")
preload("pytest", "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp")
if not OLD:
    preload("tests.contract.across")
    preload(*[f"tests.distributed.test_{name}" for name in ("failures", "mutated", "pipe", "ties")])


class Processes:
    """The processes; with an older PyTorch, tests that need them are skipped.

    Args:
        size: their number.
    """

    def __init__(self, size=SIZE):
        if OLD:
            pytest.skip(OLD)
        self._size = size
        self._workers = []

    def run(self, function, size, *args, **kwargs):
        """Call ``function(group, *args, **kwargs)`` in so many processes; return what they return.

        Raises:
            AssertionError: a process raised, ended or hung.
        """
        found = self.outcomes(function, size, *args, **kwargs)
        if any(error for error, _ in found):
            self.stop()
        assert not any(error for error, _ in found), "\n".join(error for error, _ in found if error)
        return [value for _, value in found][:size]

    def outcomes(self, function, size, *args, **kwargs):
        """Call a function; return what each process raised, as text, and what it returned."""
        if not self._workers:
            self._start()
        path = f"{function.__module__}:{function.__qualname__}"
        for _, connection in self._workers:
            connection.send((path, size, args, kwargs))
        found = []
        for rank, (process, connection) in enumerate(self._workers):
            try:
                hangs = not wait([connection, process.sentinel], TIMEOUT)
                found.append((f"rank {rank} hangs", None) if hangs else _received(connection))
            except EOFError:
                process.join()
                found.append((f"rank {rank} ended: {process.exitcode}", None))
        return found

    def _start(self):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(self._size):
            mine, theirs = Pipe()
            process = _context.Process(
                target=work, args=(rank, self._size, theirs, port), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, mine))
        for _, connection in self._workers:
            assert connection.poll(START), "the processes do not start"
            connection.recv()

    def stop(self):
        """Kill the processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []


def _received(connection):
    return pickle.loads(connection.recv_bytes())


def work(rank, count, connection, port):
    """Do what the tests ask for, until they end."""
    # What PyTorch logs of failures, which these tests cause.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://localhost:{port}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    groups = {size: torch.distributed.new_group(range(size)) for size in range(1, count + 1)}
    connection.send("ready")
    while True:
        try:
            case, size, args, kwargs = connection.recv()
        except EOFError:
            # The tests are over. Threads of a group may still wait for others.
            os._exit(0)
        module, name = case.split(":")
        error, value = "", None
        torch.manual_seed(0)
        try:
            if rank < size:
                function = getattr(import_module(module), name)
                value = function(groups[size], *args, **kwargs)
        except BaseException:
            error = f"rank {rank}:\n{traceback.format_exc()}"
        connection.send_bytes(pickle.dumps((error, value)))
