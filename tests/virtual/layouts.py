"""Tensors in layouts that models have, and what functions make of them on two devices."""

import torch
from torch.utils._pytree import tree_leaves, tree_map


def channels_last(x):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def permuted(x):
    """Dimension 0 is the innermost one in memory, as after an einsum."""
    if x.dim() < 2:
        return x
    order = [*range(1, x.dim()), 0]
    return x.permute(order).contiguous().permute([order.index(k) for k in range(x.dim())])


def with_gaps(x):
    if x.dim() < 1 or x.numel() == 0:
        return x
    memory = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    memory[..., ::2] = x
    return memory[..., ::2]


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": channels_last,
    "permuted": permuted,
    "with gaps": with_gaps,
}


def outcome(device, function, value, layout=LAYOUTS["contiguous"]):
    """The outputs and the gradients of a function, on a device, or the CPU.

    Args:
        device: the device; None for the CPU.
        function: the function.
        value: its arguments; further devices in them are replaced, too.
        layout: makes tensors, and the gradients of the outputs, of another layout.
    """

    def placed(x):
        if isinstance(x, torch.device | str) and device is not None and str(x) == "cpu":
            return device
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            return x
        y = layout(x.detach())
        there = torch.empty_strided(
            y.shape, y.stride(), dtype=y.dtype, device="cpu" if device is None else device
        )
        return there.copy_(y).requires_grad_(x.requires_grad)

    arguments = tree_map(placed, tuple(value))
    torch.manual_seed(0)
    outputs = [x for x in tree_leaves(function(*arguments)) if isinstance(x, torch.Tensor)]
    wanted = [x for x in outputs if x.requires_grad]
    inputs = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.requires_grad]
    found = [*outputs]
    if wanted and inputs:
        torch.manual_seed(1)
        grads = [placed(_random(x)) for x in wanted]
        found += torch.autograd.grad(wanted, inputs, grads, allow_unused=True)
    present = [x for x in found if x is not None]
    assert device is None or all(x.device == device for x in present)
    return [x.detach().cpu() for x in present]


def _random(like):
    # PyTorch 2.11 draws other numbers for 16 bits than for 32.
    wide = torch.promote_types(like.dtype, torch.float)
    return torch.rand(like.shape, dtype=wide, device="cpu").to(like.dtype)


def verify(device, function, value, layout, reference=None):
    """Compare a virtual device with the CPU."""
    if reference is None:
        reference = outcome(None, function, value, layout)
    mine = outcome(device, function, value, layout)
    assert len(mine) == len(reference)
    for a, b in zip(mine, reference):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
