"""The sequence numbers of nodes, by which autograd chooses among nodes that are ready.

Backward runs the one with the highest number first: what was recorded last. But each thread counts
for itself. Where several threads record, one after another, a thread must go on where the one
before it has stopped.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import Node

from torchgpipe import _torch

__all__: list[str] = []


def next_number() -> int:
    """The sequence number of the node that this thread records next."""
    number: int = _torch.next_node()
    return number


def number_of(node: Node) -> int:
    """The sequence number of a node."""
    number: int = node._sequence_nr()
    return number


def number_from(first: int) -> None:
    """Let the nodes that this thread records from now on have numbers from ``first`` on.

    Only recording a node counts the number up, so unused nodes are recorded (a microsecond each).
    """
    missing = first - next_number()
    if missing > 0 and torch.is_grad_enabled():
        leaf = torch.empty((), device="cpu", requires_grad=True)
        for _ in range(missing):
            leaf.view(())
