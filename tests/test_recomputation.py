"""A recomputation does what the forward did, in its modes, or an error says where it did not."""

import copy
import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.helpers import CPUS, Apply, note_of, plain, run_pipeline
from torchgpipe import GPipe, is_recomputing, verify_recomputation

MODES = ["never", "except_last", "always"]
CHECKPOINTED = ["except_last", "always"]
M = 3


class Differs(nn.Module):
    """Computes something else the second time, in one of the micro-batches."""

    def __init__(self, first, second, rows):
        super().__init__()
        self.first, self.second, self.rows = first, second, rows

    def forward(self, x):
        differs = is_recomputing() and bool((x[:, 0] == self.rows).any())
        return (self.second if differs else self.first)(x)


class Add(torch.autograd.Function):
    """Saves what it is told to."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        found = ctx.saved_tensors
        return (grad, *[None for _ in found])


def saving(*shapes, dtype=torch.float):
    return lambda x: Add.apply(x, *[torch.ones(shape, dtype=dtype) for shape in shapes])


def wrap(*layers, balance=None, device="cpu", mode="always"):
    balance = balance or [1] * len(layers)
    return GPipe(
        nn.Sequential(*layers), balance, devices=[device] * len(balance), chunks=M, checkpoint=mode
    )


def numbered():
    """An input of which each micro-batch knows its number."""
    return torch.arange(M).repeat_interleave(2)[:, None].expand(-1, 2).float().requires_grad_()


# What differs, and where.

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
    model = wrap(*layers, balance=[1, 3], mode=mode)
    x = numbered()
    output = model(x)
    with pytest.raises(RuntimeError, match="must save the same tensors") as caught:
        output.sum().backward()
    assert pytest.raises(RuntimeError, match=message).matches(caught.value)
    assert "by layer 2" in str(caught.value)
    note = note_of(caught.value)
    assert note.startswith("raised in partition 1, micro-batch 1")
    # Of this micro-batch, and of those that come after it in backward, there is no gradient.
    assert x.grad is None
    assert model[0].weight.grad is None


def test_note_names_the_layer_that_saves_otherwise():
    first, second, _ = DIFFERENCES["shape"]
    model = wrap(nn.Tanh(), Differs(first, second, rows=2), nn.Tanh(), balance=[1, 2])
    model[0].forward = lambda x: x * 1
    with pytest.raises(RuntimeError) as caught:
        model(numbered()).sum().backward()
    assert note_of(caught.value) == "raised in partition 1, micro-batch 2, layer 1 (Differs)"


def test_layers_that_save_each_other_s_tensors_are_an_error():
    """In number, shape and dtype nothing differs."""
    layers = [Differs(saving(1, 1), saving(1), 0), Differs(saving(1), saving(1, 1), 0)]
    loss = wrap(*layers, balance=[2])(numbered()).sum()
    message = "recomputation: .* by layer 1, forward: .* by layer 0"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@pytest.mark.parametrize("mode", CHECKPOINTED)
def test_error_of_a_layer_in_its_second_run_is_named_too(mode):
    def fail(x):
        raise KeyError("again")

    model = wrap(nn.Identity(), Differs(torch.exp, fail, rows=0), balance=[1, 1], mode=mode)
    with pytest.raises(KeyError, match="again") as caught:
        model(numbered()).sum().backward()
    assert note_of(caught.value) == "raised in partition 1, micro-batch 0, layer 1 (Differs)"
    assert not is_recomputing()


def test_a_layer_may_differ_if_it_saves_the_same():
    """The gradient is that of the second run then: to be found out by verify_recomputation()."""
    model = wrap(Differs(torch.sin, lambda x: (x * 1).sin(), rows=1))
    x = numbered()
    model(x).sum().backward()
    assert torch.equal(x.grad, x.cos())


# verify_recomputation().

VALUES = {
    "other values": (lambda x: (x + 1).sin(), lambda x: (x + 2).sin()),
    "NaN": (lambda x: (x + 1).sin(), lambda x: (x + torch.nan).sin()),
    "an integer": (
        lambda x: x.gather(1, torch.zeros(len(x), 1, dtype=torch.long)) * x,
        lambda x: x.gather(1, torch.ones(len(x), 1, dtype=torch.long)) * x,
    ),
    "a mask": (lambda x: x.where(x > 0, x * 2), lambda x: x.where(x > 9, x * 2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_other_values_are_found(name):
    model = wrap(nn.Identity(), Differs(*VALUES[name], rows=1), balance=[1, 1])
    with verify_recomputation():
        loss = model(numbered()).sum()
    with pytest.raises(RuntimeError, match=r"compute the same values as .*layer: 1, ") as caught:
        loss.backward()
    assert note_of(caught.value) == "raised in partition 1, micro-batch 1, layer 1 (Differs)"
    # It is looked for where it is asked for.
    model(numbered()).sum().backward()


def test_counter_that_is_not_held_back_is_found():
    class Noise(nn.Module):
        step = 0

        def forward(self, x):
            self.step += 1
            return (x + self.step).exp()

    model = wrap(Noise(), mode="always")
    with verify_recomputation(), pytest.raises(RuntimeError, match="must compute the same values"):
        model(numbered()).sum().backward()


class NaN(nn.Module):
    def forward(self, x):
        return (x + torch.tensor([torch.nan, torch.inf], device=x.device)).sin() + x.exp()


EQUAL = {
    "NaN": lambda: [NaN(), nn.Linear(2, 2)],
    "dropout": lambda: [nn.Dropout(0.5), nn.Linear(2, 2), nn.AlphaDropout(0.3)],
    "batch norm": lambda: [nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2, momentum=None)],
    "in place": lambda: [nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ELU(inplace=True)],
    "attention": lambda: [Attention(), nn.GRU(2, 2), First()],
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(2, 1, dropout=0.2)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class First(nn.Module):
    def forward(self, value):
        return value[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_pass(name, autocast, mode, device):
    layers = EQUAL[name]()
    model = wrap(*layers, balance=[1, len(layers) - 1], device=device, mode=mode)
    x = torch.randn(6, 2, device=device, requires_grad=True)
    found = []
    for verification in (verify_recomputation(), nullcontext()):
        torch.manual_seed(1)
        with verification, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            output = model(x)
        found.append(torch.autograd.grad(output.float().sum(), [x, *model.parameters()]))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("make", [lambda: [nn.RReLU()], lambda: [nn.LSTM(64, 64), First()]])
def test_value_that_is_written_after_it_was_saved_passes(make):
    """As the noise of the one layer; or never, as some bytes in the workspace of the other."""
    layers = make()
    model = wrap(*layers, balance=[len(layers)], mode="always")
    junk = [torch.full((2, 64), 7.0) for _ in range(9)]
    del junk
    with verify_recomputation():
        model(torch.randn(6, 64, requires_grad=True)).sum().backward()


def test_value_that_is_changed_after_the_forward_passes():
    model = wrap(nn.Linear(2, 2), Apply(torch.exp), mode="always")
    with verify_recomputation():
        output = model(torch.rand(6, 2))
    with torch.no_grad():
        output.mul_(2)
    output.sum().backward()


@pytest.mark.parametrize("chunks", [1, 4])
def test_error_of_an_early_layer_comes_when_later_ones_may_have_gradients(chunks):
    """As in the plain model; those of its own partition and of earlier ones have none."""
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
    """Also where all was recomputed, and only then found to be wrong."""
    second = Apply(lambda x: x.exp() + 1) if verified else saving(1)
    model = wrap(nn.Linear(2, 2), Differs(torch.exp, lambda x: second(x).exp(), 0))
    with verify_recomputation() if verified else nullcontext():
        loss = model(numbered()).sum()
    model[1].rows = model[0](numbered()[:1])[0, 0].item()
    with pytest.raises(RuntimeError, match="must compute the same|must save the same"):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="nor can backward go on"):
        loss.backward()


@pytest.mark.parametrize("mode", CHECKPOINTED)
def test_values_put_elsewhere_between_forward_and_backward(mode):
    """Nobody counts that as a change in place, but it is one."""
    model = wrap(nn.Linear(2, 2), nn.Tanh(), balance=[2], mode=mode)
    loss = model(numbered()).sum()
    model[0].weight.data = model[0].weight.data * 2
    with pytest.raises(RuntimeError, match="parameters must not be changed"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_buffer_that_the_layer_changes_after_its_use_is_an_error(mode):
    """Also where that is behind the last tensor to be recomputed."""

    class Grow(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x):
            y = x * (x.exp() * self.scale).tanh()
            self.scale.mul_(3)
            return y

    model = wrap(Grow(), mode=mode)
    model.chunks = 1
    loss = model(numbered()).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("end", ["forward", "retained", "backward"])
def test_empty_tensors_keep_nothing_alive(end):
    """As of a mixture of experts, of which one has nothing to do."""
    refs = []

    def function(x):
        empty = x[:0].exp().relu()
        y = torch.cat([x.exp(), empty]).relu()
        refs.append(weakref.ref(y))
        return y * 1

    gc.collect()
    gc.disable()
    try:
        model = wrap(Apply(function), balance=[1])
        x = numbered().requires_grad_()
        refs.append(weakref.ref(x))
        loss = model(x).sum()
        if end != "forward":
            loss.backward(retain_graph=end == "retained")
        del x, loss, model
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", MODES)
def test_hooks_that_are_always_called_are_called_in_a_second_run_too(mode):
    calls = []
    layer = Apply(lambda x: x * x.exp())
    layer.register_forward_hook(lambda *_: calls.append(is_recomputing()), always_call=True)
    wrap(layer, mode=mode)(numbered()).sum().backward()
    assert calls.count(False) == M
    assert calls.count(True) == {"never": 0, "except_last": M - 1, "always": M}[mode]


@pytest.mark.parametrize("mode", MODES)
def test_layer_that_writes_what_is_its_own_and_uses_it(mode):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.ones(2))

        def forward(self, x):
            if not is_recomputing():
                self.average.mul_(0.9).add_(x.detach().mean(0))
            else:
                self.average.mul_(1)
            return (x * self.average).exp()

    reference = nn.Sequential(nn.Linear(2, 2), Average())
    model = GPipe(copy.deepcopy(reference), [1, 1], devices=["cpu"] * 2, chunks=1, checkpoint=mode)
    for run in (reference, model):
        run(numbered()).sum().backward()
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("mode", MODES)
def test_threads_that_differentiate_one_graph(mode):
    model = wrap(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), mode=mode)
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


@pytest.mark.parametrize("mode", MODES)
def test_graph_is_let_go_that_hooks_have_kept(mode):
    model = wrap(nn.Linear(2, 2), nn.Tanh(), mode=mode)
    kept = []
    handle = model[0].register_forward_hook(lambda _, args, output, kept=kept: kept.append(output))
    model(numbered()).sum().backward()
    handle.remove()
    output = weakref.ref(kept[0])
    del handle, kept
    gc.collect()
    assert output() is None


class Unused(torch.autograd.Function):
    """Tells what gradient it got."""

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
    """On several devices layers behind it are differentiated, but for the last micro-batch."""
    linear, seen = nn.Linear(2, 2), []
    layers = nn.Linear(2, 2), Apply(lambda x: (x, Unused.apply(linear(x), seen)))
    partitions = [nn.Sequential(layer) for layer in layers]
    devices = CPUS[:2] if n == 2 else [torch.device("cpu")] * 2
    output = run_pipeline(partitions, devices, torch.rand(2 * M, 2), chunks=M)
    output[0].sum().backward()
    assert seen == ([] if n == 1 else [0] * (M - 1))


def test_double_backward_and_two_graphs_pass():
    model = wrap(nn.Linear(2, 2), nn.Tanh(), balance=[1, 1])
    x = torch.randn(6, 2, requires_grad=True)
    with verify_recomputation():
        outputs = [model(x), model(x * 2)]
    for output in outputs:
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        grad.square().sum().backward()


# The modes of the forward.


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.4), nn.Linear(4, 2))
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_switched_between_forward_and_backward(mode, training, device):
    """The gradients are those of the mode of the forward, and the modes stay switched."""
    model = wrap(*layers(), balance=[2, 1], device=device, mode=mode).train(training)
    reference = copy.deepcopy(model)
    x = torch.randn(6, 3, device=device)
    torch.manual_seed(1)
    reference(x).square().sum().backward()
    torch.manual_seed(1)
    loss = model(x).square().sum()
    model.train(not training)
    loss.backward()
    assert {module.training for module in model.modules()} == {not training}
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(reference.buffers(), model.buffers()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_switched_alone(mode, device):
    """As those who freeze norms do after ``model.train()``."""
    model = wrap(*layers(), balance=[2, 1], device=device, mode=mode)
    model[1].eval()
    reference = copy.deepcopy(model.module)
    reference[2][0].p = model[2][0].p = 0.0
    x = torch.randn(6, 3, device=device)
    plain(reference, x, M).square().sum().backward()
    loss = model(x).square().sum()
    model.train()
    loss.backward()
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def hook_removed(layer, loss):
    handle = layer.register_forward_hook(lambda layer, args, y: y * 1.5)
    output = loss()
    handle.remove()
    return output


def hook_added(layer, loss):
    output = loss()
    layer.register_forward_pre_hook(lambda layer, args: (args[0] * 1.5,))
    layer.register_forward_hook(lambda layer, args, kwargs, y: y * 1.5, with_kwargs=True)
    return output


def frozen(layer, loss):
    output = loss()
    layer.requires_grad_(False)
    return output


def unfrozen(layer, loss):
    layer.requires_grad_(False)
    output = loss()
    layer.requires_grad_(True)
    return output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [hook_removed, hook_added, frozen, unfrozen])
def test_changed_between_forward_and_backward(change, mode):
    """The graph of the forward counts, and what was changed stays so."""
    reference = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh())
    model = wrap(*copy.deepcopy(reference), balance=[1, 3], mode=mode)
    x = torch.randn(6, 2)
    found = []
    for layers, run in ((reference, lambda x: plain(reference, x, M)), (model, model)):
        change(layers[2], lambda run=run: run(x).square().sum()).backward()
        layer = layers[2]
        hooks = [len(layer._forward_hooks), len(layer._forward_hooks_with_kwargs)]
        found.append([*hooks, len(layer._forward_pre_hooks), layer.weight.requires_grad])
    assert found[0] == found[1]
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("mode", MODES)
def test_parameter_changed_in_place_is_an_error(mode, device):
    """Torch's own without checkpointing; with it, also of what torch needs no more."""
    model = wrap(*layers(), balance=[2, 1], device=device, mode=mode)
    loss = model(torch.rand(6, 3, device=device)).sum()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace|not be changed in") as caught:
        loss.backward()
    if mode == "always":
        assert note_of(caught.value) == f"raised in partition 0, micro-batch {M - 1}"
    assert all(p.grad is None for p in [*model.partitions[0].parameters()])


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_step_between_forward_and_backward_is_an_error(mode, device):
    model = wrap(*layers(), balance=[2, 1], device=device, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(x := torch.rand(6, 3, device=device)), model(x)
    first.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace|not be changed in place"):
        second.square().sum().backward()
    assert all(p.grad is None for p in model.partitions[0].parameters())


@pytest.mark.parametrize("mode", MODES)
def test_parameters_changed_after_backward(mode, device):
    model = wrap(*layers(), balance=[2, 1], device=device, mode=mode)
    for _ in range(2):
        model(torch.rand(6, 3, device=device)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)


@pytest.mark.parametrize("checkpoint", MODES)
def test_layer_that_changes_its_parameters(device, checkpoint):
    def module():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 2)).to(device)

    model = GPipe(module(), [1, 1], devices=[device] * 2, chunks=2, checkpoint=checkpoint)
    reference = module()
    x = torch.tensor([0, 1, 2, 3, 4, 0], device=device)
    for _ in range(2):
        expected, output = plain(reference, x, 2), model(x)
        assert torch.equal(expected, output)
        expected.sum().backward()
        output.sum().backward()
        for p, q in zip(reference.parameters(), model.parameters()):
            assert torch.allclose(p, q)
            assert torch.allclose(p.grad, q.grad)
