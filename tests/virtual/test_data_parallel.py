"""DistributedDataParallel around GPipe, in two processes with virtual accelerators each."""

import copy
import datetime
import os
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from tests.support.fresh import METHOD, preload
from tests.support.helpers import MODES, assert_no_races
from tests.support.size import rotated
from torchgpipe import GPipe
from torchgpipe.testing import load, observe

# DistributedDataParallel imports the compiler.
preload("torch._dynamo", "torch.distributed")

RANKS, STEPS = 2, 2
SETTINGS = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
]
#: Of four partitions.
PLACES = {"apart": (0, 1, 2, 3), "in pairs": (0, 0, 1, 1)}
CASES = [
    (setting, mode, [*PLACES][(k + setting) % 2])
    for (k, mode), setting in rotated([*enumerate(MODES)], range(len(SETTINGS)))
]


class Relay(distributed.ProcessGroup):
    """A process group for virtual accelerators, which passes tensors to gloo on the CPU."""

    def __init__(self, gloo):
        super().__init__(gloo.rank(), gloo.size())
        self.gloo = gloo

    def getBackendName(self):  # noqa: N802  # A name of torch's.
        return "relay"

    def allreduce(self, tensors, options):
        return self.relay(tensors, self.gloo.allreduce, options)

    def broadcast(self, tensors, options):
        return self.relay(tensors, self.gloo.broadcast, options)

    def allgather(self, outputs, inputs, options):
        lists = [[x.cpu() for x in some] for some in outputs]
        self.gloo.allgather(lists, [x.cpu() for x in inputs], options).wait()
        for some, values in zip(outputs, lists):
            for x, value in zip(some, values):
                x.copy_(value)
        return done(outputs)

    def relay(self, tensors, collective, options):
        values = [x.detach().cpu() for x in tensors]
        collective(values, options).wait()
        for x, value in zip(tensors, values):
            x.detach().copy_(value)
        return done(tensors)


def done(result):
    future = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def train(rank, devices, setting, mode, place):
    torch.manual_seed(0)
    layers = nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4)]
    )
    reference = copy.deepcopy(layers)
    places = [devices[j] for j in PLACES[place]]
    wrapped = GPipe(layers, [1] * 4, devices=places, chunks=4, checkpoint=mode)
    with observe(jitter=rank) as seen:
        model = DistributedDataParallel(wrapped, **SETTINGS[setting])
        for _ in range(STEPS):
            x = torch.randn(16, 4)
            model.zero_grad()
            reference.zero_grad()
            model(x.chunk(RANKS)[rank].to(places[0])).square().mean().backward()
            reference(x).square().mean().backward()
            for one, other in zip(layers.parameters(), reference.parameters()):
                assert_close(one.grad.cpu(), other.grad)
    assert_no_races(seen)


def work(rank, folder):
    torch.set_num_threads(1)
    devices = load(4)
    store = distributed.FileStore(f"{folder}/store", RANKS)

    def relay(store, rank, size, timeout):
        return Relay(distributed.ProcessGroupGloo(store, rank, size, timeout))

    distributed.Backend.register_backend("relay", relay, devices=["virtual"])
    limit = datetime.timedelta(seconds=20)
    distributed.init_process_group(
        "virtual:relay", store=store, rank=rank, world_size=RANKS, timeout=limit
    )
    outcomes = {}
    for case in CASES:
        try:
            train(rank, devices, *case)
            outcomes[case] = ""
        except BaseException:
            outcomes[case] = traceback.format_exc()
            break  # The other process may wait for a message that will not come.
    torch.save(outcomes, f"{folder}/{rank}.pt")
    os._exit(0)


@pytest.fixture(scope="module")
def outcomes():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(work, (folder,), RANKS, start_method=METHOD)
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, outcomes):
    """Gradients are those of one process, without races, whatever the threads of autograd do."""
    for found in outcomes:
        assert found.get(case, "not reached") == ""
