"""A pass that replaces operators by PyTorch's own Python functions, where there are such.

``torch.ops.aten.mm.default`` looks its arguments up in a declaration, and takes a microsecond more
than :func:`torch.mm`, which was generated for these arguments. The operator is the same.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from torchgpipe._torch.graphs import schema_of

__all__: list[str] = []

#: Operators with a function of the same name that takes the same arguments.
FUNCTIONS = {"abs", "add", "addmm", "addcmul", "addcdiv", "amax", "baddbmm", "bmm", "cat"}
FUNCTIONS |= {"clone", "conj", "convolution", "cos", "cumsum", "div", "embedding", "eq"}
FUNCTIONS |= {"erf", "exp", "ge", "gt", "index_select", "le", "log", "log_softmax"}
FUNCTIONS |= {"logical_and", "logical_not", "logical_or", "lt", "masked_fill", "matmul"}
FUNCTIONS |= {"mean", "mm", "mul", "native_batch_norm", "native_dropout"}
FUNCTIONS |= {"native_layer_norm", "ne", "neg", "permute", "pow", "prod", "reciprocal"}
FUNCTIONS |= {"relu", "rsqrt", "select", "sigmoid", "sign", "sin", "softmax", "sqrt"}
FUNCTIONS |= {"squeeze", "sub", "sum", "t", "tanh", "transpose", "tril", "triu", "unsqueeze"}
FUNCTIONS |= {"where"}
#: Operators with a tensor method of the same name that takes the same arguments.
METHODS = {"expand", "reshape", "view"}


def call_directly(graph: Graph) -> None:
    """Replace operators in a graph by functions and methods of PyTorch."""
    for node in graph.nodes:
        name = _name(node)
        if name in METHODS:
            node.op, node.target = "call_method", name
        elif name in FUNCTIONS and callable(function := getattr(torch, name, None)):
            node.target = function


def _name(node: Node) -> str:
    """The name of an operator if all its arguments are positional; an empty string otherwise."""
    schema = schema_of(node.target)
    if schema is None or node.kwargs or not schema.name.startswith("aten::"):
        return ""
    name: str = schema.name.removeprefix("aten::")
    return name
