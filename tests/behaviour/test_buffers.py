"""Buffers: norms count every micro-batch once; a recomputation repeats other writes."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contract.state_of_layers import Whiten
from tests.support.helpers import plain, same_buffers, same_gradients, wrap

M = 3

#: For each norm, the shape of a row.
NORMS = {
    "BatchNorm1d": (lambda **kw: nn.BatchNorm1d(4, **kw), (4,)),
    "large": (lambda **kw: nn.BatchNorm1d(2**14 + 1, **kw), (2**14 + 1,)),
    "BatchNorm2d": (lambda **kw: nn.BatchNorm2d(4, **kw), (4, 3, 2)),
    "InstanceNorm2d": (
        lambda **kw: nn.InstanceNorm2d(4, track_running_stats=True, **kw),
        (4, 3, 2),
    ),
}


def norms(name, **options):
    """Two norms between layers with parameters."""
    make, shape = NORMS[name]
    torch.manual_seed(0)
    return nn.Sequential(
        nn.PReLU(), make(**options), nn.PReLU(), nn.Sequential(make(**options), nn.Tanh())
    ).double(), (7, *shape)


# Norms.


def test_forward_of_another_kind_before_backward(mode, device):
    """Evaluation between forward and backward reads statistics, and a recomputation keeps them."""
    module, shape = norms("BatchNorm1d")
    reference = copy.deepcopy(module).to(device)
    model = wrap(module, device, mode)
    x = torch.randn(shape, dtype=torch.double, device=device)
    found = []
    for owner, forward in ((reference, lambda x: plain(reference, x, M)), (model, model)):
        loss = forward(x).square().sum()
        owner.eval()
        with torch.no_grad():
            found.append(forward(x))
        owner.train()
        loss.backward()
        found.append(forward(x).detach())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    same_gradients(reference, model)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_training_forward_before_the_backward_of_an_evaluation(name, counts, mode, device):
    """A forward in training changes the statistics, and a recomputation finds the earlier ones."""
    module, shape = norms(name)
    for x in module.modules():
        if not counts and hasattr(x, "num_batches_tracked"):
            x.num_batches_tracked = None
    reference = copy.deepcopy(module).to(device)
    model = wrap(module, device, mode)
    x = torch.randn(shape, dtype=torch.double, device=device)
    for _ in range(2):
        # Nothing is known of the buffers in the first step.
        for owner, forward in ((reference, lambda x: plain(reference, x, M)), (model, model)):
            owner.eval()
            loss = forward(x).square().sum()
            owner.train()
            forward(2 * x)
            loss.backward()
        same_gradients(reference, model)
        same_buffers(reference, model)


@pytest.mark.filterwarnings("error")
def test_lazy_norm_that_begins_in_eval(device):
    module = nn.Sequential(nn.PReLU(), nn.LazyBatchNorm1d(), nn.PReLU(), nn.Tanh())
    model = wrap(module, device, "always")
    module[1].eval()
    model(torch.randn(7, 4, device=device)).sum().backward()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_between_forward_and_backward(duplicate, mode, device):
    module, shape = norms("BatchNorm1d")
    model = wrap(module, device, mode)
    x = torch.randn(shape, dtype=torch.double, device=device)
    loss = model(x).square().sum()
    twin = duplicate(model)
    loss.backward()
    same_buffers(model, twin)
    twin(x).square().sum().backward()
    assert model[1].num_batches_tracked.item() == M
    assert twin[1].num_batches_tracked.item() == 2 * M


# Large buffers.


class Table(nn.Module):
    """A layer that reads a buffer, of which autograd saves a view, and writes to another buffer."""

    SIZE = 12345

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.rand(self.SIZE, 4))
        self.register_buffer("cache", torch.zeros(9, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        with torch.no_grad():
            self.cache[: len(x)] = x
        return self.norm(x * self.table[: len(x)])


class Sizes(TorchDispatchMode):
    """A mode that records the size of all memory that operators allocate."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            given = [x for x in args if isinstance(x, torch.Tensor)]
            storages = [x.untyped_storage().data_ptr() for x in given]
            if output.untyped_storage().data_ptr() not in storages:
                self.made.append(output.numel())
        return output


class Note(nn.Module):
    """A layer that runs others under `Sizes`, since the mode reaches no worker by itself."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.sizes = layer, Sizes()

    def forward(self, x):
        with self.sizes:
            return self.layer(x)


def test_large_buffers_are_not_cloned(mode, device):
    """The first step makes copies, to learn which buffers the layers change."""
    note = Note(Table())
    model = wrap(nn.Sequential(nn.Linear(4, 4), note), device, mode)
    places = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    model(torch.rand(6, 4, device=device)).sum().backward()
    note.sizes.made.clear()
    with Sizes() as outside:
        output = model(torch.rand(6, 4, device=device))
        output.sum().backward()
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == places
    # The caller's thread also recomputes: on the CPU, backward is its own.
    assert note.sizes.made
    assert outside.made
    assert max(note.sizes.made + outside.made) < Table.SIZE


def test_clone_would_be_seen():
    with Sizes() as sizes:
        Table().table.clone()
    assert max(sizes.made) >= Table.SIZE


def test_buffers_are_not_kept_alive(mode, device):
    """After backward, nothing that a step keeps for its recomputations holds a buffer."""
    model = wrap(nn.Sequential(nn.Linear(4, 4), Table()), device, mode)
    model(torch.rand(6, 4, device=device)).sum().backward()
    buffer = weakref.ref(model[1].table)
    del model[1].table
    assert buffer() is None


# Other writes to buffers.


def test_saved_buffer_that_is_written_to(device):
    """Values that backward needs are lost, as in plain PyTorch. Checkpointing computes them."""
    module = nn.Sequential(nn.Linear(4, 4), Whiten()).to(device)
    model = wrap(copy.deepcopy(module), device, "never")
    x = torch.rand(6, 4, device=device)
    for output in (plain(module, x, M), model(x)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
