"""Fork and join: edges of the autograd graph, of which some start a recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.values.structure import is_dense

__all__: list[str] = []


# Fork and join: an edge of the autograd graph between tensors that have nothing in common.
#
# ::
#
#   forward:   a ── fork ── a'        backward:   a ←─ fork ←─ a'
#                    │                                  ↑
#                  phony                              (None)
#                    │                                  │
#              b ── Join ── b'                    b ←─ Join ←─ b'
#
# Backward runs the node that made ``a`` only after the nodes that ``b'`` goes to. The gradient of
# the phony is None: it makes Join run before fork on the host, and no stream wait for another.
#
# :func:`fork` makes ``a'`` as a view of ``a``, and the phony as a copy of no element of ``a'``. The
# backward of both calls no Python, for which all threads of autograd would have to queue. An empty
# view as the phony would keep the memory of ``a`` as long as the phony lives. The view ``a'`` is
# made by ``expand_as``, whose backward hands on the gradient itself. The backward of ``view_as``
# hands on a view of the gradient, to which autograd does not add another gradient in place.


_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Return the phony of a device: a tensor of shape ``(0,)`` that takes no memory.

    A phony that requires a gradient is the edge between two autograd functions: it makes
    one wait for the other without passing any data. Each device has one, since an empty
    tensor takes time to make, too.
    """
    key = (device, requires_grad)
    if key not in _phonies:
        # Later steps use the phony, too. So it must be an ordinary tensor, even if inference mode
        # or a dispatch mode, such as that of fake tensors, is on now.
        with torch.inference_mode(False), _torch.without_modes():
            _phonies[key] = torch.empty(0, device=device, requires_grad=requires_grad)
    return _phonies[key]


def fork(input: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Branch a phony off tensors on one device.

    Returns:
        The same values, and a phony. Backward runs the node that made the input only after each
        node that the phony was joined into. An input that needs no gradient is returned as it is,
        with a phony that needs none. Sparse and nested tensors have no views, so they are not
        ordered.
    """
    tensors = [*input]
    phonies = []
    for k, tensor in enumerate(tensors):
        if tensor.requires_grad and torch.is_grad_enabled() and is_dense(tensor):
            # guard: gradient of a fork
            tensors[k] = tensor.expand_as(tensor)
            # guard: memory of a phony
            phonies.append(torch.as_strided_copy(tensors[k], (0,), (1,)))
    if not phonies:
        return input, get_phony(tensors[0].device, requires_grad=False)
    return tuple(tensors), phonies[0] if len(phonies) == 1 else torch.cat(phonies)


def join(phonies: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Merge phonies that :func:`fork` branched off into tensors.

    Returns:
        The same values. Backward runs the nodes that these values go to before the nodes that the
        phonies were branched off. Tensors that need no gradient, or whose phonies need none, are
        returned as they are.
    """
    if not (needs_backward(phonies) and needs_backward(tensors)):
        return tensors
    joined: tuple[Tensor, ...] = Join.apply(len(phonies), *phonies, *tensors)
    return joined


class Join(torch.autograd.Function):
    """Pass tensors on, and merge phonies: ``count, *phonies, *tensors → *tensors``."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count = count
        return pass_on(ctx, tensors[count:])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *[None] * ctx.count, *grads)


def pass_on(ctx: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Pass the last inputs of an autograd function on as its outputs, each sharing its memory.

    The outputs are detached aliases and not views, so that a layer may change them in place. An
    input that needs no gradient becomes an output that needs none, and a missing gradient stays
    None.
    """
    return keep_requires_grad(ctx, tuple(map(alias, tensors)))


def alias(tensor: Tensor) -> Tensor:
    """The tensor detached from its graph; a copy of a leaf that requires a gradient.

    A leaf may be a parameter. Autograd forbids to change a leaf in place, but would not notice a
    change of its alias.
    """
    base = tensor if tensor._base is None else tensor._base
    # guard: leaves
    return tensor.clone() if base.requires_grad and base.is_leaf else tensor.detach()


def keep_requires_grad(ctx: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make each output of an autograd function need a gradient if the input in its place did.

    The inputs are the last ones of the function, one for each output.
    """
    ctx.set_materialize_grads(False)
    needed = ctx.needs_input_grad[-len(outputs) :]
    if not all(needed):
        ctx.mark_non_differentiable(*[x for x, need in zip(outputs, needed) if not need])
    return outputs


def needs_backward(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd is recording, and a gradient will be asked of one of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class Recompute(torch.autograd.Function):
    """A fork whose backward recomputes first: ``due, *tensors → *tensors, phony``."""

    @staticmethod
    def forward(ctx: Any, due: list[Callable[[], None]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.due = due
        phony = get_phony(tensors[0].device, requires_grad=False).detach()
        return (*pass_on(ctx, tensors), phony)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for recompute in ctx.due:
            recompute()
        return (None, *grads[:-1])


class Unpack(torch.autograd.Function):
    """Make tensors require a gradient that nobody will ask for: ``phony, *tensors → *tensors``.

    As leaves, the tensors would be held by all that is computed from them. As outputs of this
    function, a recomputation lets go of what a layer pops when that layer is done, as the first run
    did.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        return (None, *[None] * len(grads))
