"""A module computes with copies of weights whose home is another device, and leaves them there."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchgpipe.partition.placement import Lent, places_of

CPU, META = torch.device("cpu"), torch.device("meta")


def test_places():
    home, away, other, alone = (nn.Linear(2, 2) for _ in range(4))
    away.weight = home.weight
    other.bias, other.inner = None, away
    devices = [(home, CPU), (away, META), (other, META), (alone, CPU)]
    away.bias = nn.Parameter(torch.empty(2, device=META))
    other.weight = nn.Parameter(torch.empty(2, 2, device=META))
    found = places_of(devices)
    place = (away._parameters, "weight")
    assert found == [[(home._parameters, "weight")], [place], [place], None]


def test_places_of_a_module_on_two_devices():
    module = nn.Linear(2, 2)
    places = [(module._parameters, name) for name in ("weight", "bias")]
    assert places_of([(module, CPU), (module, META)]) == [places, places]


def test_a_table_that_is_lent_elsewhere_counts_without_a_place_of_its_own():
    """Another thread may call the module while its buffer stands aside."""
    norm = nn.BatchNorm1d(2)
    outer = nn.Sequential(norm)
    at_home, away = places_of([(norm, CPU), (outer, META)])
    assert len(away) == 5
    assert {name for _, name in at_home} == {"weight", "bias"}


def lend(module, log=None):
    def bring(tensors):
        if log is not None:
            log.append(len(tensors))
        return [x + x for x in tensors]

    return Lent([(module._parameters, "weight")], bring, nullcontext())


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_pytorch_find_the_copies_again(reentrant):
    module = nn.Linear(2, 2, bias=False)
    weight, again = module.weight, partial(checkpoint, use_reentrant=reentrant)

    def within(x):
        return again(module, module(x).sin()).sin()

    x, twice = torch.rand(1, 2, requires_grad=True), nn.Parameter(2 * weight.detach())
    lend(module).call(lambda: again(within, x)).sum().backward()
    ((x @ twice.T).sin() @ twice.T).sin().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * twice.grad)
    assert module.weight is weight


def test_threads_take_turns():
    module, both = nn.Linear(2, 2), threading.Barrier(2)
    lent = Lent([(module._parameters, "weight")], list, threading.RLock())

    def meet():
        # With the lock nobody else comes.
        with pytest.raises(threading.BrokenBarrierError):
            both.wait(0.1)

    with ThreadPoolExecutor(2) as threads:
        for task in [threads.submit(lent.call, meet) for _ in range(2)]:
            task.result()


@pytest.mark.parametrize("way", ["in place", "data", "replaced"])
def test_changes_would_be_lost(way):
    module = nn.Linear(2, 2, bias=False)

    def change():
        with torch.no_grad():
            if way == "replaced":
                module.weight = nn.Parameter(2 * module.weight)
            elif way == "data":
                module.weight.data = 2 * module.weight
            else:
                module.weight.mul_(2)

    with pytest.raises(RuntimeError, match=r"must not be changed, or replaced.*\[\(2, 2\)\]"):
        lend(module).call(change)
