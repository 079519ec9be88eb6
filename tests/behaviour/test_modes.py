"""Layers see what the caller has set, whichever thread runs them; on accelerators, too."""

import contextvars
import copy
import gc
import threading
import weakref
from collections import Counter
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from tests.support.helpers import MODES, Plain, wrap
from tests.support.long_runs import eventually
from tests.unit.ambient.test_context import DispatchMode
from torchgpipe import is_recomputing
from torchgpipe.ambient.context import Modes

WIDTH = 4

variable = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def places(device):
    """Devices of two partitions."""
    return [device] * 2


class Look(nn.Module):
    """A layer that records what is set, in each of its runs."""

    def __init__(self, seen):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = seen

    def forward(self, x):
        modes = Modes.current()
        if is_recomputing():
            # The one thing that may differ: no weights are kept for a block around backward.
            modes = modes._replace(cache=self.cache)
        self.cache = modes.cache
        self.seen.append((is_recomputing(), modes, variable.get(), torch.ones(1).device))
        variable.set("changed")
        return self.linear(x).tanh()


def rows(model, count=6, **options):
    return torch.rand(count, WIDTH, device=model.devices[0], **options)


def test_autocast_of_each_type_of_device(places):
    seen = []
    model = wrap(nn.Sequential(Look(seen), Look(seen)), places)
    kinds = {device.type for device in model.devices}
    x = rows(model)
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, torch.float16, cache_enabled=False))
        output = model(x)
    assert output.dtype == torch.float16
    output.float().sum().backward()
    assert len(seen) == 12
    for _, modes, *_ in seen:
        assert {x.kind for x in modes.autocast if x.enabled and x.dtype == torch.float16} == kinds
        assert not modes.cache
    # What a layer sets is gone after it.
    assert {value for _, _, value, _ in seen} == {variable.get()} == {"unset"}


class Custom(torch.autograd.Function):
    """A function with modes of its own in backward, where its saved tensors are recomputed."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu")
        return grad @ weight.t(), x.t() @ grad


class CustomLayer(nn.Linear):
    def forward(self, x):
        return Custom.apply(x.sin(), self.weight).tanh()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_recomputation_within_a_backward_in_other_modes(device, order):
    layers = [CustomLayer(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    module = nn.Sequential(*[layers[k] for k in order])
    found = []
    for mode in MODES:
        model = wrap(copy.deepcopy(module), ["cpu", "cpu"], mode)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.ones(6, WIDTH))
        before = Modes.current()
        output.float().sum().backward()
        assert Modes.current() == before
        found.append([x.grad for x in model.parameters() if x.grad is not None])
    assert all(same(found[0], other) for other in found[1:])


def test_nothing_of_the_caller_s_is_held_after_backward(places):
    model = wrap(made(), places)
    store = Packs()
    ref = weakref.ref(store)
    output = model(rows(model).requires_grad_())
    with store.hooks():
        # A graph that is not gone when backward is over.
        output.sum().backward()
    del store
    gc.collect()
    # Threads of autograd drop their objects after a moment.
    assert eventually(lambda: ref() is None)
    held = {}
    variable.set(held)
    held["loss"] = model(rows(model)).sum()
    held["loss"].backward()
    variable.set("unset")
    ref = StorageWeakRef(held["loss"].untyped_storage())
    del held
    assert eventually(lambda: (gc.collect() and ref.expired()) or ref.expired())


def test_number_of_threads_follows_the_caller(places, mode):
    seen = []
    model = wrap(nn.Sequential(Look(seen), Look(seen)), places, mode)
    before = torch.get_num_threads()
    try:
        for count in (2, 3, 1):
            seen.clear()
            torch.set_num_threads(count)
            model(rows(model)).sum().backward()
            assert {modes.threads for _, modes, *_ in seen} == {count}
            assert torch.get_num_threads() == count
            # As many as threads to come begin with.
            begins = []
            thread = threading.Thread(
                target=lambda found=begins: found.append(torch.get_num_threads())
            )
            thread.start()
            thread.join()
            assert begins == [count]
    finally:
        torch.set_num_threads(before)


class Residual(nn.Module):
    """A layer that saves several tensors for backward, the last of which is no weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x.sin()).tanh()


def made():
    torch.manual_seed(1)
    return nn.Sequential(Residual(), Residual())


def test_flops_by_layer(places):
    """Modes that follow layers see them in one thread, one layer at a time."""
    model = wrap(made(), places, "never")
    with FlopCounterMode(display=False) as counter:
        model(rows(model))
    counts = {name: sum(x.values()) for name, x in counter.get_flop_counts().items()}
    layers = [counts[f"GPipe.partitions.{j}.{j}.linear"] for j in range(2)]
    assert layers == [6 * WIDTH * WIDTH * 2] * 2


class Packs:
    """Hooks that record their arguments, and return them."""

    def __init__(self):
        self.packed, self.unpacked = [], []

    def hooks(self):
        def pack(x):
            assert not torch.is_grad_enabled()
            self.packed.append(tuple(x.shape))
            return x.detach().clone(), len(self.packed)

        def unpack(packed):
            x, _ = packed
            assert not torch.is_grad_enabled()
            self.unpacked.append(tuple(x.shape))
            return x

        return saved_tensors_hooks(pack, unpack)


def gradients(model, x, within):
    x = x.clone().requires_grad_()
    with within:
        output = model(x)
    grads = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    return [tensor.detach().cpu() for tensor in (output, *grads)]


def same(one, other):
    return all(torch.allclose(a, b) for a, b in zip(one, other, strict=True))


def test_hooks_see_what_they_see_in_the_plain_model(places):
    module = made()
    plain, model = Plain(copy.deepcopy(module), 3), wrap(module, places, "never")
    x, expected, found = rows(model), Packs(), Packs()
    reference = gradients(plain, x.cpu(), expected.hooks())
    assert same(gradients(model, x, found.hooks()), reference)
    assert Counter(found.packed) == Counter(expected.packed)
    assert Counter(found.unpacked) == Counter(expected.unpacked)


def test_hooks_see_what_checkpointing_keeps(places):
    """Hooks see the input of each checkpointed cell once, and all saved tensors of other cells."""
    module = made()
    plain, model = Plain(copy.deepcopy(module), 3), wrap(module, places)
    x = rows(model)
    reference = gradients(plain, x.cpu(), nullcontext())
    found = Packs()
    assert same(gradients(model, x, found.hooks()), reference)
    assert found.packed == found.unpacked == [(2, WIDTH)] * 6
    model.checkpoint = "except_last"
    last = Packs()
    gradients(Plain(copy.deepcopy(plain.module), 1), x.cpu()[:2], last.hooks())
    found = Packs()
    assert same(gradients(model, x, found.hooks()), reference)
    assert Counter(found.packed) == Counter([(2, WIDTH)] * 4) + Counter(last.packed)


def test_hook_that_unpacks_no_tensor(places):
    model = wrap(made(), places)
    with saved_tensors_hooks(lambda x: x.detach(), lambda x: None):
        loss = model(rows(model)).sum()
    with pytest.raises(TypeError, match=r"must return a tensor \(returned: NoneType\)"):
        loss.backward()


def test_hooks_that_are_disabled(places):
    model = wrap(made(), places)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none of these"),
        pytest.raises(RuntimeError, match="none of these"),
    ):
        model(rows(model))
    model.checkpoint = "never"
    with torch.autograd.graph.disable_saved_tensors_hooks("none of these"):
        model(rows(model)).sum().backward()


def test_entering_leaves_nothing_behind(places):
    """Modes that count in ``__enter__`` or ``__exit__`` are not entered again."""
    calls = []

    class Counting(DispatchMode):
        def __enter__(self):
            calls.append("enter")
            return super().__enter__()

        def __exit__(self, *args):
            calls.append("exit")
            return super().__exit__(*args)

    model = wrap(made(), places)
    with ExitStack() as stack:
        stack.enter_context(Counting())
        loss = model(rows(model)).sum()
    loss.backward()
    assert calls == ["enter", "exit"]
