"""Default generators: one thread at a time, and none that waits for another."""

import threading
import time

import torch

from tests.support import fresh
from torchgpipe.ambient.generators import get_state, set_state

CPU = torch.device("cpu")


class CountingGenerator:
    """A generator that notes how many threads use it at a time."""

    def __init__(self):
        self.inside, self.most = 0, 0

    def get_state(self):
        self.inside += 1
        time.sleep(0.01)
        self.most = max(self.most, self.inside)
        self.inside -= 1

    def set_state(self, state):
        self.get_state()


def test_one_thread_at_a_time_uses_a_generator(monkeypatch):
    generator = CountingGenerator()
    monkeypatch.setattr(torch, "default_generator", generator)
    threads = [threading.Thread(target=lambda: set_state(CPU, get_state(CPU))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert generator.most == 1


def test_threads_do_not_block_each_other_at_a_generator():
    """Python may let another thread run while PyTorch holds the lock of a generator."""
    program = """
import gc, threading, time, torch
from torchgpipe.ambient.generators import get_state, set_state
class Garbage:
    def __init__(self):
        self.own = self
    def __del__(self):
        time.sleep(0.0001)
gc.set_threshold(1, 1, 1)
def run():
    for _ in range(30):
        Garbage()
        set_state(torch.device("cpu"), get_state(torch.device("cpu")))
threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    assert fresh.run(program) == (0, "", "")
