"""The beginning of a cell's graph, for cells whose backward runs by itself."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe import _torch
from torchgpipe.autograd.phony import get_phony

__all__: list[str] = []

MESSAGE = (
    b"under a schedule, a gradient must come by the loss, since the stages before this one have "
    b"run their backward already (gradient of: a value that a layer has kept, such as an auxiliary "
    b"loss); have the layer return it as an output, and add it in the loss function"
)


def enter(*tensors: Tensor) -> tuple[list[Tensor], list[GradientEdge]]:
    """Make tensors the beginning of a graph.

    Unlike leaves, the tensors that it returns are not kept alive by their graph, and layers may
    change them in place.

    Returns:
        The tensors, and the edges at which backward of the cell ends, with their gradients.
    """
    # What arrives is a leaf, which the graph would keep for the gradient.
    # guard: letting go of what arrives
    detached = [x.detach() for x in tensors]
    phony = get_phony(detached[0].device, requires_grad=True)
    _, *found = _torch.dead_end(MESSAGE, 1 + len(detached))(phony, *detached)
    edges = [get_gradient_edge(x) for x in found]
    for k, x in enumerate(detached):
        if type(x) is not type(found[k]):
            # The node has made a plain tensor of it.
            found[k] = found[k].as_subclass(type(x))
            vars(found[k]).update(vars(x))
    return found, edges
