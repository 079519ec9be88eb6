"""Hooks run as on the plain model, once per micro-batch, and may change their arguments."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from tests.support.helpers import Plain
from torchgpipe import GPipe, is_recomputing

M = 3
#: How many forwards of a layer there are besides the first ones.
RECOMPUTED = {"never": 0, "except_last": M - 1, "always": M}


class Scale(nn.Module):
    """A layer that hooks tensors of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))
        self.gradients, self.kept = [], []

    def forward(self, x):
        y = x * self.weight
        y.register_hook(self.gradients.append)
        y.register_hook(lambda grad: grad * 2)
        if not is_recomputing():
            self.kept.append(y)
            y.retain_grad()
        return y.sin()


def again(model, module):
    """Whether a module runs a second time under checkpointing.

    A linear layer alone in its partition needs only its input and its weight, which exist anyway.
    """
    return module in list(model.partitions[1].modules())


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Sequential(Scale(), nn.GELU()), nn.Linear(4, 2)
    ).double()


@pytest.fixture(params=RECOMPUTED)
def mode(request):
    return request.param


@pytest.fixture
def models(device, mode):
    """The plain model and the wrapped one."""
    wrapped = GPipe(layers(), [1, 2, 1], devices=[device] * 3, chunks=M, checkpoint=mode)
    return Plain(layers().to(device), M), wrapped


@pytest.fixture
def input(device):
    return torch.randn(7, 3, dtype=torch.double, device=device)


def step(model, input):
    """The output and all gradients."""
    x = input.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *[p.grad for p in model.parameters()]]


def same(a, b):
    """Check that two lists of tensors are equal, and not empty."""
    torch.testing.assert_close(b, a)
    assert all(x is not None for x in a)


# Of parameters and tensors.


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_of_a_parameter_runs_once_per_backward(register, models, input):
    """Hooks of parameters see the sum over all micro-batches."""
    found = []
    for model in models:
        calls = []
        for name, parameter in enumerate(model.parameters()):

            def hook(x, name=name, parameter=parameter, calls=calls):
                calls.append((name, (x if x is not parameter else x.grad).clone()))

            getattr(parameter, register)(hook)
        for _ in range(2):
            step(model, input)
        found.append(sorted(calls, key=lambda call: call[0]))
    assert [name for name, _ in found[1]] == [k // 2 for k in range(10)]
    same(*found)


def test_hook_of_a_parameter_changes_its_gradient(models, input):
    for model in models:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-0.1, 0.1) * 3)
    same(*[step(model, input) for model in models])


def test_hooks_of_the_input_and_of_the_output(models, input):
    found = []
    for model in models:
        calls = []
        x = input.clone().requires_grad_()
        x.register_hook(lambda grad, calls=calls: calls.append(grad.clone()))
        x.register_hook(lambda grad: grad * 2)
        output = model(x)
        output.register_hook(lambda grad, calls=calls: calls.append(grad.clone()))
        output.register_hook(lambda grad: grad.tanh())
        output.retain_grad()
        output.square().sum().backward()
        found.append([*calls, output.grad, x.grad])
    assert len(found[1]) == 4
    same(*found)


def test_hooks_of_tensors_within_a_layer_run_once_per_micro_batch(models, input):
    """The hooks of a recomputation are thrown away with its graph."""
    found = []
    for model in models:
        gradients = step(model, input)
        scale = model[2][0]
        assert len(scale.gradients) == len(scale.kept) == M
        found.append([*gradients, *scale.gradients, *[y.grad for y in scale.kept]])
    same(*found)


def test_hook_of_a_node_runs_once_per_backward(models, input):
    for model in models:
        calls = []
        output = model(input)
        output.grad_fn.register_hook(lambda *args, calls=calls: calls.append("node"))
        output.grad_fn.register_prehook(lambda *args, calls=calls: calls.append("pre"))
        output.sum().backward()
        assert calls == ["pre", "node"]


@pytest.mark.parametrize("when", ["all", "any"])
def test_hook_of_several_gradients(when, models, input):
    found = []
    for model in models:
        calls = []
        parameters = list(model.parameters())

        def several(grads, calls=calls):
            calls.append(grads)

        torch.autograd.graph.register_multi_grad_hook(parameters, several, mode=when)
        model(input).square().sum().backward()
        assert len(calls) == 1
        found.append([p.grad for p in parameters] + list(calls[0] if when == "all" else []))
    same(*found)


# Of modules, in forward.


def test_forward_hooks_run_again_in_recompute(models, mode, input):
    _, model = models
    calls = []
    for module in [*model.partitions, *model.partitions.modules()]:
        module.register_forward_pre_hook(
            lambda m, args: calls.append((m, "before", is_recomputing()))
        )
        module.register_forward_hook(
            lambda m, args, output: calls.append((m, "after", is_recomputing()))
        )
    step(model, input)
    for module in model.partitions.modules():
        if module is model.partitions:
            continue
        times = 2 if module in list(model.partitions) else 1
        for when in ("before", "after"):
            assert calls.count((module, when, False)) == M * times
            repeated = RECOMPUTED[mode] * again(model, module)
            assert calls.count((module, when, True)) == repeated * times


def test_hooks_of_the_wrapper_run_once_per_step(models, input):
    found = []
    for model in models:
        calls = []
        model.register_forward_pre_hook(lambda m, args, c=calls: c.append(args[0].detach()))
        model.register_forward_hook(lambda m, args, output, c=calls: c.append(output.detach()))
        model.register_full_backward_hook(lambda m, gin, gout, c=calls: c.extend([*gin, *gout]))
        model.register_full_backward_pre_hook(lambda m, gout, c=calls: c.extend(gout))
        step(model, input)
        found.append(calls)
    assert len(found[1]) == 5
    same(*found)


def test_forward_hooks_change_inputs_and_outputs(models, input):
    for model in models:
        for k in range(4):
            model[k].register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
            model[k].register_forward_hook(lambda m, args, output: output + args[0].mean())
            model[k].register_forward_hook(
                lambda m, args, kwargs, output: output.sigmoid(), with_kwargs=True, prepend=True
            )
    same(*[step(model, input) for model in models])


def test_forward_hook_of_a_partition_changes_what_goes_on(models, input):
    reference, model = models
    model.partitions[1].register_forward_hook(lambda m, args, output: output * 2)
    reference[2].register_forward_hook(lambda m, args, output: output * 2)
    same(*[step(model, input) for model in models])


# Of modules, in backward.


def backward_hooked(model, modules):
    """Collect the arguments of the backward hooks of some modules."""
    calls = []
    for k, module in enumerate(modules):

        def before(m, grad_output, k=k):
            calls.append((k, "before", [x.clone() for x in grad_output]))

        def after(m, grad_input, grad_output, k=k):
            calls.append((k, "after", [x.clone() for x in (*grad_input, *grad_output)]))

        module.register_full_backward_pre_hook(before)
        module.register_full_backward_hook(after)
    return calls


def test_backward_hooks_run_once_per_micro_batch_with_the_plain_gradients(models, input):
    found = []
    for model in models:
        calls = backward_hooked(model, [model[0], model[1], model[2], model[2][0], model[3]])
        step(model, input)
        assert len(calls) == M * 5 * 2
        found.append([x for *_, some in sorted(calls, key=lambda c: c[:2]) for x in some])
    same(*found)


def test_backward_hooks_of_a_partition(models, input):
    reference, model = models
    calls, expected = (
        backward_hooked(model, [model.partitions[1]]),
        backward_hooked(reference, [nn.Identity()]),
    )
    reference[1].register_full_backward_hook(
        lambda m, gin, gout: expected.append((0, "after", [x.clone() for x in gin]))
    )
    step(model, input), step(reference, input)
    after = [some[:1] for _, when, some in calls if when == "after"]
    assert len(calls) == 2 * M
    same([some for *_, some in expected], after)


def test_backward_hooks_change_gradients(models, input):
    for model in models:
        for k in range(4):
            model[k].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))
            model[k].register_full_backward_hook(lambda m, gin, gout: (gin[0].tanh(),))
    same(*[step(model, input) for model in models])


@contextmanager
def of_all_modules(calls):
    """Global hooks, which record the modules that PyTorch calls them for."""
    registered = [
        global_hooks.register_module_forward_pre_hook(
            lambda m, args: calls.append((m, "forward before", is_recomputing()))
        ),
        global_hooks.register_module_forward_hook(
            lambda m, args, output: calls.append((m, "forward", is_recomputing()))
        ),
        global_hooks.register_module_full_backward_pre_hook(
            lambda m, grads: calls.append((m, "backward before", is_recomputing()))
        ),
        global_hooks.register_module_full_backward_hook(
            lambda m, gin, gout: calls.append((m, "backward", is_recomputing()))
        ),
    ]
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def test_global_hooks(models, mode, input):
    reference, model = models
    calls = []
    with of_all_modules(calls):
        found = step(model, input)
    same(step(reference, input), found)
    for layer in model.module.modules():
        if layer is model.module:
            continue
        for when in ("forward before", "forward", "backward before", "backward"):
            assert calls.count((layer, when, False)) == M
            repeated = RECOMPUTED[mode] * again(model, layer)
            if when.startswith("backward"):
                repeated = 0
            assert calls.count((layer, when, True)) == repeated
    assert calls.count((model, "forward", False)) == 1


# An optimizer in backward.


def update_in_backward(model, make):
    """Update each parameter as soon as its gradient is complete, and free the gradient."""
    for parameter in model.parameters():
        optimizer = make([parameter], lr=0.01)

        def update(parameter, optimizer=optimizer):
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_optimizer_in_backward(make, models, input):
    for model in models:
        update_in_backward(model, make)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            model(input).square().sum().backward()
        assert not any(map(torch.equal, before, model.parameters()))
    same(*[[p.detach() for p in model.parameters()] for model in models])


def test_optimizer_in_the_backward_of_one_of_two_graphs(models, input):
    """The other graph needs the parameters as they were."""
    for model in models:
        update_in_backward(model, torch.optim.SGD)
        first, second = model(input), model(input)
        first.square().sum().backward()
        before = [p.detach().clone() for p in model.parameters() if p.dim() == 2]
        with pytest.raises(RuntimeError, match="modified by an inplace|not be changed in place"):
            second.square().sum().backward()
        # Of the last layer the bias alone may have been updated.
        assert all(map(torch.equal, before, [p for p in model.parameters() if p.dim() == 2]))
