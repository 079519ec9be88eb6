"""Weights that stages in several processes share: one gradient, the sum of all."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.autograd.outcome import Sums
from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.peers import Peers
from torchgpipe.distributed.routes import Routes
from torchgpipe.partition.placement import tables

__all__: list[str] = []

#: The table of a module that has a weight, and its name there.
Place: TypeAlias = tuple[dict[str, Tensor | None], str]


class Tied:
    """The weights of this process that others have, too.

    Args:
        partitions: the layers of all stages, before those of other processes are let go of.
        loss: the loss, which may have weights of the layers.
        routes: in which process each stage is.
        peers: the processes.

    Raises:
        ValueError: several processes have a norm with running statistics, which would differ.
    """

    def __init__(
        self, partitions: Sequence[nn.Module], loss: Any, routes: Routes, peers: Peers
    ) -> None:
        self._peers = peers
        holders: dict[nn.Parameter, set[int]] = {}
        places: dict[nn.Parameter, Place] = {}
        modules = [*zip(routes.placement, partitions)]
        if isinstance(loss, nn.Module):
            modules.append((routes.placement[-1], loss))
        _verify_norms(modules)
        for process, layers in modules:
            for table in tables(layers):
                for name, x in table.items():
                    if isinstance(x, nn.Parameter):
                        holders.setdefault(x, set()).add(process)
                        if process == routes.rank:
                            places[x] = table, name
        #: The weights that other processes have alone.
        self._elsewhere = {
            id(x): weakref.ref(x) for x, ranks in holders.items() if routes.rank not in ranks
        }
        #: Where this process has each weight, and the processes that have it.
        self._found = [
            (*places[x], sorted(ranks))
            for x, ranks in holders.items()
            if len(ranks) > 1 and routes.rank in ranks
        ]

    def verify_here(self, j: int, weights: Iterable[Tensor]) -> None:
        """Check that weights which a stage has met are not those of another process.

        Raises:
            RuntimeError: one of them is.
        """
        for weight in weights:
            found = self._elsewhere.get(id(weight))
            if found is not None and found() is weight:
                raise RuntimeError(
                    "a layer must not use a weight of a layer in another process without having it "
                    "as a parameter, since it has a copy here that nobody trains (stage: "
                    f"{j}, shape: {tuple(weight.shape)}); assign it, as in self.weight = "
                    "embedding.weight, so that both processes get the sum of their gradients"
                )

    def equalise(self) -> None:
        """Give the weights the values that they have in the first of their processes."""
        for weight, ranks in self._weights():
            with torch.no_grad():
                if self._peers.rank != ranks[0]:
                    weight.zero_()
                self._peers.summed(weight, ranks)

    def counted_here(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters without those that another process counts."""
        others = {id(weight) for weight, ranks in self._weights() if ranks[0] != self._peers.rank}
        return [x for x in parameters if id(x) not in others]

    def add_up(self, sums: Sums) -> None:
        """Add the gradients of the other processes."""
        for weight, ranks in self._weights():
            # A process may have frozen it, and another one not.
            wanted = torch.tensor([int(weight.requires_grad)], device=CPU)
            self._peers.summed(wanted, ranks)
            if wanted:
                grad = sums.take(weight)
                self._peers.summed(grad, ranks)
                if weight.requires_grad:
                    sums.add([weight], [grad])

    def _weights(self) -> Iterator[tuple[Tensor, list[int]]]:
        # A weight may have been replaced by another one since.
        for table, name, ranks in self._found:
            weight = table[name]
            if weight is not None:
                yield weight, ranks


def _verify_norms(modules: Iterable[tuple[int, nn.Module]]) -> None:
    """Check that each norm with running statistics is in one process."""
    found: dict[nn.Module, int] = {}
    for process, layers in modules:
        for name, norm in layers.named_modules():
            tracks = getattr(norm, "num_batches_tracked", None) is not None
            if tracks and found.setdefault(norm, process) != process:
                raise ValueError(
                    "a norm with running statistics must be in one process, since each process "
                    f"would have statistics of its own (layer: {name}, processes: "
                    f"{[found[norm], process]}); make a norm for each place, or choose a balance "
                    "that has both places in one process"
                )
