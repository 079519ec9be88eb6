"""A recomputation does what the forward did, or an error says where it did not."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support.helpers import CPUS, Apply, note_of, run_pipeline, wrap
from tests.support.recomputation import CHECKPOINTED, Differs, M, numbered, saving
from torchgpipe import GPipe, is_recomputing, verify_recomputation

DIFFERENCES = {
    "fewer": (saving(1, 2, 3), saving(1, 2), r"recomputation: nothing more, forward: shape \(3,\)"),
    "none": (saving(4), lambda x: x * 1, r"recomputation: nothing more, forward: shape \(4,\)"),
    "shape": (saving(1, 2), saving(1, 3), r"recomputation: shape \(3,\).*forward: shape \(2,\)"),
    "dimensions": (saving((2, 1)), saving(2), r"shape \(2,\) .*forward: shape \(2, 1\)"),
    "dtype": (saving(1), saving(1, dtype=torch.double), "torch.float64 by .* torch.float32 by"),
}


@pytest.mark.parametrize("mode", CHECKPOINTED)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_error_says_what_differs_and_where(name, mode):
    first, second, message = DIFFERENCES[name]
    layers = [nn.Linear(2, 2), nn.Identity(), Differs(first, second, rows=1), nn.Identity()]
    torch.nn.init.eye_(layers[0].weight), torch.nn.init.zeros_(layers[0].bias)
    model = wrap(layers, mode=mode, balance=[1, 3])
    x = numbered()
    output = model(x)
    with pytest.raises(RuntimeError, match="must save the same tensors") as caught:
        output.sum().backward()
    assert pytest.raises(RuntimeError, match=message).matches(caught.value)
    assert "by layer 2" in str(caught.value)
    note = note_of(caught.value)
    assert note.startswith("raised in partition 1, micro-batch 1")
    # This micro-batch has no gradient, nor have the ones that come after it in backward.
    assert x.grad is None
    assert model[0].weight.grad is None


def test_note_names_the_layer_that_saves_otherwise():
    first, second, _ = DIFFERENCES["shape"]
    model = wrap([nn.Tanh(), Differs(first, second, rows=2), nn.Tanh()], balance=[1, 2])
    model[0].forward = lambda x: x * 1
    with pytest.raises(RuntimeError) as caught:
        model(numbered()).sum().backward()
    assert note_of(caught.value) == "raised in partition 1, micro-batch 2, layer 1 (Differs)"


def test_layers_that_save_each_other_s_tensors_are_an_error():
    """Saved tensors do not differ in number, shape or dtype, but in their layer."""
    layers = [Differs(saving(1, 1), saving(1), 0), Differs(saving(1), saving(1, 1), 0)]
    loss = wrap(layers, balance=[2])(numbered()).sum()
    message = "recomputation: .* by layer 1, forward: .* by layer 0"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_a_layer_may_differ_if_it_saves_the_same():
    """The gradient is that of the recomputation, which only verify_recomputation() notices."""
    model = wrap([Differs(torch.sin, lambda x: (x * 1).sin(), rows=1)])
    x = numbered()
    model(x).sum().backward()
    assert torch.equal(x.grad, x.cos())


@pytest.mark.parametrize("chunks", [1, 4])
def test_error_of_an_early_layer_comes_when_later_ones_may_have_gradients(chunks):
    """Later layers have gradients as in the plain model; the layer's partition has none."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model = GPipe(layers, [2, 1, 1], devices=["cpu"] * 3, chunks=chunks, checkpoint="always")
    loss = model(torch.rand(4, 2)).sum()
    with torch.no_grad():
        layers[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="parameters must not be changed in place"):
        loss.backward()
    assert [layer.weight.grad is None for layer in layers if len(layer._parameters)] == [
        True,
        True,
        chunks > 1,
    ]


@pytest.mark.parametrize("verified", [False, True])
def test_no_backward_goes_on_after_a_recomputation_has_failed(verified):
    """Backward stops even if all slots are full before the error."""
    second = Apply(lambda x: x.exp() + 1) if verified else saving(1)
    model = wrap([nn.Linear(2, 2), Differs(torch.exp, lambda x: second(x).exp(), 0)])
    with verify_recomputation() if verified else nullcontext():
        loss = model(numbered()).sum()
    model[1].rows = model[0](numbered()[:1])[0, 0].item()
    with pytest.raises(RuntimeError, match="must compute the same|must save the same"):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="nor can backward go on"):
        loss.backward()


@pytest.mark.parametrize("end", ["forward", "retained", "backward"])
def test_empty_tensors_keep_nothing_alive(end):
    """An expert of a mixture that gets no rows makes such tensors."""
    refs = []

    def function(x):
        empty = x[:0].exp().relu()
        y = torch.cat([x.exp(), empty]).relu()
        refs.append(weakref.ref(y))
        return y * 1

    gc.collect()
    gc.disable()
    try:
        model = wrap([Apply(function)], balance=[1])
        x = numbered().requires_grad_()
        refs.append(weakref.ref(x))
        loss = model(x).sum()
        if end != "forward":
            loss.backward(retain_graph=end == "retained")
        del x, loss, model
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_hooks_that_are_always_called_are_called_in_a_recomputation_too(mode):
    calls = []
    layer = Apply(lambda x: x * x.exp())
    layer.register_forward_hook(lambda *_: calls.append(is_recomputing()), always_call=True)
    wrap([layer], mode=mode)(numbered()).sum().backward()
    assert calls.count(False) == M
    assert calls.count(True) == {"never": 0, "except_last": M - 1, "always": M}[mode]


def test_threads_that_differentiate_one_graph(mode):
    model = wrap([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)], mode=mode)
    for _ in range(5):
        loss = model(numbered()).sum()
        weight = model[0].weight
        start, found = threading.Barrier(3), []

        def differentiate(loss=loss, weight=weight, start=start, found=found):
            start.wait()
            found.extend(torch.autograd.grad(loss, weight, retain_graph=True))

        threads = [threading.Thread(target=differentiate) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert all(torch.equal(gradient, found[0]) for gradient in found)


def test_graph_is_let_go_that_hooks_have_kept(mode):
    model = wrap([nn.Linear(2, 2), nn.Tanh()], mode=mode)
    kept = []
    handle = model[0].register_forward_hook(lambda _, args, output, kept=kept: kept.append(output))
    model(numbered()).sum().backward()
    handle.remove()
    output = weakref.ref(kept[0])
    del handle, kept
    gc.collect()
    assert output() is None


class Unused(torch.autograd.Function):
    """A function that records the number of nonzero items of its gradient."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(grad.count_nonzero().item())
        return grad, None


@pytest.mark.parametrize("n", [1, 2])
def test_output_that_the_loss_does_not_use(n):
    """Backward runs after such an output on several devices, but for the last micro-batch."""
    linear, seen = nn.Linear(2, 2), []
    layers = nn.Linear(2, 2), Apply(lambda x: (x, Unused.apply(linear(x), seen)))
    partitions = [nn.Sequential(layer) for layer in layers]
    devices = CPUS[:2] if n == 2 else [torch.device("cpu")] * 2
    output = run_pipeline(partitions, devices, torch.rand(2 * M, 2), chunks=M)
    output[0].sum().backward()
    assert seen == ([] if n == 1 else [0] * (M - 1))
