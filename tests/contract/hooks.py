"""Hooks."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as of_all_modules

from tests.contract.promises import Otherwise, promise
from tests.contract.values import batch
from tests.contract.wrapped import assert_same_grads, linears, plain_step, trained
from torchgpipe import is_recomputing

M = 4


def hooked(make, hook, *, chunks=M, layers=None):
    """Check steps of layers with hooks against the plain layers with the same hooks.

    Args:
        make: wraps layers.
        hook: called with layers and a list, registers hooks that log tensors by some key.
        chunks: the micro-batches of the plain layers: one where hooks see sums over all of them.
        layers: the layers.

    Returns:
        What the hooks of the wrapped layers have logged in two steps.
    """
    layers = linears(6, 6, 6) if layers is None else layers
    model = make(layers)
    found, expected = [], []
    hook(model.layers, found)
    hook(layers, expected)
    for _ in range(2):
        x, y, *moved = batch(8, model)
        # PyTorch warns of backward hooks whose layer's input needs no gradient.
        plain_step(layers, x.requires_grad_(), y, chunks=chunks)
        model.step(moved[0].detach().requires_grad_(), moved[1])
        assert_same_grads(model, layers)
    found = model.all(found)
    same(found, expected)
    return found


def same(found, expected):
    """Check that two logs are equal, in whatever order, as each wrapper has one of its own."""
    found, expected = [sorted(log, key=_by_value) for log in (found, expected)]
    assert [key for key, _ in found] == [key for key, _ in expected]
    torch.testing.assert_close([x for _, x in found], [x for _, x in expected])


def _by_value(entry):
    key, x = entry
    return key, x.sum().item()


def kept(log, key, x):
    log.append((key, x.detach().cpu().clone()))


# Of tensors.


class Idle(nn.Linear):
    """A layer with a weight that it does not use, as experts without tokens have."""

    def __init__(self):
        super().__init__(6, 6)
        self.idle = nn.Parameter(torch.rand(6))


@promise(
    "Hooks of parameters run once per step, with the gradient of the mini-batch, and change it; "
    "those of a parameter without a gradient do not run.",
    modes=True,
    devices=True,
)
def parameters(make):
    def hook(layers, log):
        for name, x in layers.named_parameters():
            x.register_hook(lambda grad, name=name: kept(log, name, grad))
            x.register_hook(lambda grad: grad.clamp(-0.01, 0.01) * 3)
            x.register_post_accumulate_grad_hook(
                lambda x, name=name: kept(log, f"{name} accumulated", x.grad)
            )
            x.register_hook(lambda grad: pytest.fail("removed")).remove()

    layers = nn.Sequential(Idle(), nn.Tanh(), Idle(), nn.Tanh())
    assert len(hooked(make, hook, chunks=1, layers=layers)) == 2 * 8


@promise("Hooks of several gradients at once run once per step.")
def several(make):
    def hook(layers, log):
        for half in (layers[:2], layers[2:]):
            both = [*half.parameters()]
            register_multi_grad_hook(both, lambda grads: [kept(log, "all", x) for x in grads])
            register_multi_grad_hook(both, lambda x: log.append(("any", torch.ones(1))), mode="any")

    assert len(hooked(make, hook, chunks=1)) == 2 * 2 * 3


@promise("Hooks of the input run once per step, and change its gradient.", modes=True, devices=True)
def inputs(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    x, y, *moved = batch(8, model)
    grads, log = [], []
    for run, leaf, target in ((layers, x, y), (model, *moved)):
        leaf = leaf.detach().requires_grad_()
        leaf.register_hook(lambda grad: kept(log, "input", grad))
        leaf.register_hook(lambda grad: grad * 2)
        plain_step(run, leaf, target) if run is layers else run.step(leaf, target)
        grads.append(leaf.grad)
    assert_same_grads(model, layers)
    (found,) = [x for x in model.all([grads[1]]) if x is not None]
    torch.testing.assert_close(found.cpu(), grads[0])
    plain, *own = log
    same(model.all(own), [plain])


class Inner(nn.Module):
    """A layer that hooks tensors of its own, and the nodes behind them."""

    def __init__(self):
        super().__init__()
        self.linear, self.log, self.kept = nn.Linear(6, 6), [], []

    def forward(self, x):
        y = self.linear(x)
        if not is_recomputing():
            y.retain_grad()
            self.kept.append(y)
        y.register_hook(lambda grad: kept(self.log, "tensor", grad))
        y.register_hook(lambda grad: grad * 2)
        y.grad_fn.register_hook(lambda of_inputs, grads: kept(self.log, "node", grads[0]))
        y.grad_fn.register_prehook(lambda grads: (grads[0].tanh(),))
        return y.sin()


@promise(
    "Hooks of tensors and nodes in a layer run once per micro-batch, and change gradients.",
    modes=True,
    devices=True,
    eager=True,
)
def within_layers(make):
    kept = []

    def hook(layers, log):
        kept.append([])
        for k in (0, 2):
            layers[k].log, layers[k].kept = log, kept[-1]

    layers = nn.Sequential(Inner(), nn.Tanh(), Inner(), nn.Tanh())
    assert len(hooked(make, hook, layers=layers)) == 2 * M * 2 * 2
    own, plain = [torch.stack([x.grad.cpu().sum() for x in some]) for some in kept]
    assert len(own)
    assert all((x - plain).abs().min() < 1e-6 for x in own)


# Of modules.


@promise(
    "Forward hooks of layers run once per micro-batch, and again where ``is_recomputing()``.",
    modes=True,
    eager=True,
)
def forward(make):
    again = []

    def hook(layers, log):
        def look(key, x):
            (again if is_recomputing() else log).append((key, x.detach()))

        for k, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, args, k=k: look(f"{k} before", args[0]))
            layer.register_forward_hook(lambda _, args, out, k=k: look(f"{k} after", out))

    assert len(hooked(make, hook)) == 2 * M * 4 * 2
    most = 2 * 4 * 2 * {"never": 0, "except_last": M - 1, "always": M}[make.again]
    assert int(make.again == "always") <= len(again) <= most


@promise("Forward hooks of layers change arguments and outputs.", modes=True, eager=True)
def changed_in_forward(make):
    def hook(layers, log):
        for layer in layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
            layer.register_forward_hook(lambda _, args, out: out + args[0].mean(1, keepdim=True))
            layer.register_forward_hook(
                lambda _, args, kwargs, out: out.sigmoid(), with_kwargs=True, prepend=True
            )

    hooked(make, hook)


@promise(
    "Backward hooks of layers run once per micro-batch with its gradients, and change them.",
    modes=True,
    devices=True,
    eager=True,
)
def backward(make):
    def hook(layers, log):
        for k, layer in enumerate(layers):

            def before(_, grads, k=k):
                kept(log, f"{k} before", grads[0])
                return (grads[0] * 2,)

            def after(_, of_inputs, grads, k=k):
                kept(log, f"{k} after", grads[0])
                return None if of_inputs[0] is None else (of_inputs[0].tanh(),)

            layer.register_full_backward_pre_hook(before)
            layer.register_full_backward_hook(after)

    assert len(hooked(make, hook)) == 2 * M * 4 * 2


@promise("Hooks of all modules run for each layer and micro-batch.", modes=True, eager=True)
def of_all(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    number, log = {id(layer): k for k, layer in enumerate(model.layers)}, []

    def look(kind):
        def hook(layer, *_):
            # Forward hooks run in recomputations, too.
            if id(layer) in number and (kind > 1 or not is_recomputing()):
                log.append((number[id(layer)], kind))

        return hook

    with ExitStack() as stack:
        for kind, register in enumerate(
            (
                of_all_modules.register_module_forward_pre_hook,
                of_all_modules.register_module_forward_hook,
                of_all_modules.register_module_full_backward_pre_hook,
                of_all_modules.register_module_full_backward_hook,
            )
        ):
            stack.callback(register(look(kind)).remove)
        x, y = batch(8, model)[2:]
        model.step(x.requires_grad_(), y)
    assert sorted(model.all(log)) == sorted([(k, kind) for k in range(4) for kind in range(4)] * M)
    model.zero_grad()
    trained(model, layers)
    assert len(model.all(log)) == 4 * 4 * M


@promise(
    "Hooks of the wrapper run once per step.",
    otherwise={
        "Pipe": Otherwise(
            "Its training step is a method, ``step``, which is no call of the module.", r"ran: \[\]"
        )
    },
)
def of_the_wrapper(make):
    model = make(linears(6, 6, 6))
    log = []
    model.model.register_forward_pre_hook(lambda _, args: log.append("before"))
    model.model.register_forward_hook(lambda _, args, out: log.append("after"))
    model.step(*torch.rand(2, 8, 6))
    assert log == ["before", "after"], f"hooks that ran: {log}"


# Other uses.


@promise(
    "An optimizer may step in a hook, as soon as a gradient is complete, and free it.",
    modes=True,
    devices=True,
)
def optimizer(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    for some in (layers, model.layers):
        for x in some.parameters():
            inner = torch.optim.Adam([x], 0.1)

            def update(x, inner=inner):
                inner.step()
                x.grad = None

            x.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        x, y, *moved = batch(8, model)
        torch.testing.assert_close(model.step(*moved).cpu(), plain_step(layers, x, y))
    assert not [*filter(torch.is_tensor, model.grads.values())]


@promise(
    "The caller's hooks for saved tensors see what the step saves, and what they return is used.",
    modes=True,
    devices=True,
    eager=True,
)
def saved_tensors(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    packed, unpacked = [], []

    def pack(x):
        assert not torch.is_grad_enabled()
        packed.append(tuple(x.shape))
        return x.detach().clone(), len(packed)

    def unpack(found):
        unpacked.append(tuple(found[0].shape))
        return found[0]

    for around in (saved_tensors_hooks(pack, unpack), save_on_cpu()):
        x, y, *moved = batch(8, model)
        plain_step(layers, x, y)
        with around:
            model.step(*moved)
        assert_same_grads(model, layers)
    packed, unpacked = model.all(packed), model.all(unpacked)
    assert (2, 6) in packed
    assert {*packed} == {*unpacked}
