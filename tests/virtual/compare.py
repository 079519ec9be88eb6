"""Comparison of virtual devices with the CPU."""

import copy

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map


def name_of(x):
    """Name of a layer of a table as a test."""
    return str(x).partition("\n")[0] if isinstance(x, nn.Module) else None


def tensors(tree):
    """List all tensors of a structure."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def weights(output):
    """The gradients that a backward starts with."""
    return torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.device, output.dtype)


def outcome(device, function, inputs, call=None):
    """Outputs, gradients and buffers of a layer or function on a device."""

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().to(device, copy=True).requires_grad_(x.is_floating_point())

    torch.manual_seed(1)
    layer = copy.deepcopy(function).to(device) if isinstance(function, nn.Module) else function
    inputs = tree_map(moved, inputs)
    # Copies, since layers may write into their input, which a leaf does not allow.
    given = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, inputs)
    outputs = tensors(call(layer, *given) if call else layer(*given))
    assert all(output.device == device for output in outputs)
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [weights(output) for output in differentiable])
    leaves = tensors(inputs)
    if isinstance(layer, nn.Module):
        leaves += [*layer.parameters()]
        outputs += [*layer.buffers()]
    assert all(leaf.grad is None or leaf.grad.device == device for leaf in leaves)
    found = [x for x in outputs + [x.grad for x in leaves] if x is not None]
    return [(x.stride(), x.detach().cpu()) for x in found]


def verify(device, function, *inputs, call=None):
    """Compare a virtual device with the CPU."""
    mine = outcome(device, function, inputs, call)
    reference = outcome(torch.device("cpu"), function, inputs, call)
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
