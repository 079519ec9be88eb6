"""The order of courses of several threads."""

import threading

import pytest
import torch

from torchgpipe.autograd.nodes import next_number
from torchgpipe.mapped.threads import Abandoned, Turns

CPU = torch.device("cpu")
META = torch.device("meta")


class Waiting:
    """A call that waits in a thread."""

    def __init__(self, function, *args):
        self.result = None
        self.thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self.thread.start()

    def _run(self, function, *args):
        try:
            function(*args)
            self.result = "went on"
        except Abandoned:
            self.result = "abandoned"

    def waits(self):
        self.thread.join(0.02)
        return self.thread.is_alive()

    def ends(self):
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.result


def test_one_after_another_on_a_stage():
    first, turns = (CPU, 0), Turns(2)
    turns.come(0, first)
    other = Waiting(turns.come, 1, first)
    assert other.waits()
    turns.leave(0)
    assert other.ends() == "went on"


def test_a_stage_that_the_one_before_does_not_come_to():
    turns = Turns(2)
    turns.come(0, (CPU, 0))
    other = Waiting(turns.come, 1, (META, 0))
    assert other.waits()
    # It might still have come.
    turns.leave(0)
    assert other.waits()
    turns.end(0)
    assert other.ends() == "went on"


def test_a_device_has_one_at_a_time():
    a, b, turns = (CPU, 0), (CPU, 1), Turns(2)
    turns.come(0, a)
    turns.leave(0)
    turns.come(1, a)
    other = Waiting(turns.come, 0, b)
    assert other.waits()
    turns.leave(1)
    assert other.ends() == "went on"


def test_who_ends_holds_no_device():
    a, turns = (CPU, 0), Turns(2)
    turns.come(0, a)
    turns.leave(0)
    turns.come(1, a)
    other = Waiting(turns.wait_for_end_before, 1)
    assert other.waits()
    turns.come(0, (CPU, 1))
    turns.end(0)
    assert other.ends() == "went on"


@pytest.mark.parametrize("wait", ["come", "end"])
def test_stop(wait):
    turns = Turns(2)
    turns.come(0, (CPU, 0))
    args = (turns.come, 1, (CPU, 0)) if wait == "come" else (turns.wait_for_end_before, 1)
    other = Waiting(*args)
    assert other.waits()
    turns.stop(1)
    # It may be the first to fail.
    assert other.waits()
    turns.stop(0)
    assert other.ends() == "abandoned"


def test_nodes_are_numbered_as_if_one_thread_had_recorded_all():
    turns, first, numbers = Turns(2), (CPU, 0), []

    def record(i):
        turns.come(i, first)
        numbers.append(next_number())
        x = torch.zeros((), requires_grad=True)
        for _ in range(20 * (1 - i)):
            x.view(())
        numbers.append(next_number())
        turns.end(i)

    for i in range(2):
        assert Waiting(record, i).ends() == "went on"
    begin, end, again, _ = numbers
    assert end - begin == 20
    assert again == end
