"""Gradients over several processes: of replicas, of shared weights, and of sharded layers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe._torch import pipelining
from torchgpipe._torch.attributes import modules_of
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.checks import is_number, verify
from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.peers import Peers, Routes, digest, first_difference, resolved
from torchgpipe.engine.outcome import Sums
from torchgpipe.partition.placement import TableEntry, is_shard, is_sharded, tables

__all__: list[str] = []


def verify_not_parallel(module: nn.Module) -> None:
    """Check that DistributedDataParallel wraps none of the layers.

    Raises:
        TypeError: it wraps one.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.parallel.DistributedDataParallel):
            raise TypeError(
                "a layer must not be in DistributedDataParallel, whose hooks see no gradient of a "
                "cell, so that its processes would train different weights without an error "
                f"(layer: {name}); pass Pipe(..., replicas=group), or shard the layers with "
                "fully_shard() after wrapping them"
            )


def equalise(module: nn.Module, replicas: Peers) -> None:
    """Give parameters and buffers the values that they have in the first pipeline."""
    named = [*module.named_parameters(), *module.named_buffers()]
    verify_same(digest(repr([(name, tuple(x.shape), x.dtype) for name, x in named])), replicas)
    with torch.no_grad():
        for _, x in named:
            replicas.fill(x, 0)


def verify_same(number: int, replicas: Peers) -> None:
    """Check that a number that stands for the parameters is the same in all pipelines.

    Raises:
        ValueError: it is not.
    """
    if difference := first_difference(["parameters"], replicas.gathered([number])):
        raise ValueError(
            "replicas must have the same parameters, and the same of them frozen, since their "
            f"gradients are averaged ({difference}); make and freeze the same layers in all of them"
        )


def average(weights: Iterable[Tensor], sums: Sums, replicas: Peers) -> None:
    """Average the gradients of a step over other pipelines."""
    weights = [*weights]
    reached = sums.reached()
    # A weight that got a gradient in no pipeline gets none, as in the plain model.
    reached_in = replicas.gathered([id(x) in reached for x in weights]) if weights else []
    weights = [x for x, *in_pipelines in zip(weights, *reached_in) if any(in_pipelines)]
    grads = [(weight, resolved(sums.take(weight))) for weight in weights]
    works = [dist.all_reduce(grad, group=replicas.group, async_op=True) for _, grad in grads]
    for (weight, grad), work in zip(grads, works):
        assert work is not None
        work.wait()
        sums.add([weight], [grad.div_(replicas.size)])


def verify_norm(max_norm: Any, norm_type: Any) -> None:
    """Check the arguments of :meth:`Pipe.clip_grad_norm_`.

    Raises:
        ValueError: they are no norms.
    """
    rule, remedy = "the type of a norm is a positive number", "pass 2.0, or math.inf"
    verify(_is_norm(norm_type) and norm_type, rule, "norm_type", norm_type, remedy)
    rule, remedy = "a norm is a number that is not negative", "pass such as 1.0"
    verify(_is_norm(max_norm), rule, "max_norm", max_norm, remedy)


def _is_norm(value: Any) -> bool:
    """Whether a value is a number that is not negative, or infinity."""
    return is_number(value) and value >= 0


def total_norm(parameters: Iterable[nn.Parameter], norm_type: float, peers: Peers) -> Tensor:
    """Compute the norm of the gradients of all stages.

    Args:
        parameters: the parameters of this process; one that several processes have is given in one.
        norm_type: the type of the norm: a positive number, or infinity.
        peers: the processes.

    Returns:
        The norm, of shape ``()``, in all processes.
    """
    grads = [x.grad for x in parameters if x.grad is not None]
    norm = nn.utils.get_total_norm(grads, norm_type).to(peers.device)
    if is_shard(norm):
        # The norm of gradients that FSDP2 has sharded is a DTensor: each process has the norm of
        # its shards, and full_tensor() combines these norms.
        whole: Any = norm
        norm = whole.full_tensor()
    norm = norm.double() if norm.device.type != "mps" else norm.float()
    if norm_type == torch.inf:
        # ReduceOp.MAX may ignore NaN. As infinity, NaN in one process makes the norm infinite.
        norm = norm.nan_to_num(nan=torch.inf)
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=peers.group)
        return norm
    norm = norm**norm_type
    dist.all_reduce(norm, group=peers.group)
    return norm ** (1 / norm_type)


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
        places: dict[nn.Parameter, TableEntry] = {}
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
        #: For each weight that only other processes have, by its id, a weak reference to the
        #: weight, by which :meth:`verify_here` finds that a stage uses it.
        self._elsewhere = {
            id(x): weakref.ref(x) for x, ranks in holders.items() if routes.rank not in ranks
        }
        #: For each weight that this process and others have: the ``_parameters`` of a module here,
        #: the weight's name in that dict, and the ranks of all processes that have the weight.
        self._shared = [
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
            reference = self._elsewhere.get(id(weight))
            if reference is not None and reference() is weight:
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
            # Gradients are added if any process trains the weight, and any has a gradient of it.
            told = [int(weight.requires_grad), int(id(weight) in sums.reached())]
            wanted = torch.tensor(told, device=CPU)
            self._peers.summed(wanted, ranks)
            if wanted.all():
                grad = sums.take(weight)
                self._peers.summed(grad, ranks)
                if weight.requires_grad:
                    sums.add([weight], [grad])

    def _weights(self) -> Iterator[tuple[Tensor, list[int]]]:
        # Read from the module's dict each time, since a weight may have been replaced.
        for table, name, ranks in self._shared:
            weight = table[name]
            if weight is not None:
                yield weight, ranks


def _verify_norms(modules: Iterable[tuple[int, nn.Module]]) -> None:
    """Check that each norm with running statistics is in one process."""
    ranks: dict[nn.Module, int] = {}
    for process, layers in modules:
        for name, norm in layers.named_modules():
            tracks = getattr(norm, "num_batches_tracked", None) is not None
            if tracks and ranks.setdefault(norm, process) != process:
                raise ValueError(
                    "a norm with running statistics must be in one process, since each process "
                    f"would have statistics of its own (layer: {name}, processes: "
                    f"{[ranks[norm], process]}); make a norm for each place, or choose a balance "
                    "that has both places in one process"
                )


# Layers that FSDP2 has sharded: each of their processes has a shard, and is in another pipeline.
#
# FSDP2 gathers parameters before a layer runs, and reduces their gradients when backward is
# through the layer. In a pipeline that would be once for each micro-batch. So the parameters of a
# stage are whole for all of a step, and their gradients are reduced once, at the end of the step.
# The backward of a cell adds nothing to ``grad`` of the parameters, so FSDP2 has nothing to reduce
# before the end.


def sharded_in(partitions: Sequence[nn.Module]) -> list[Any]:
    """The outermost sharded modules."""
    outermost: list[Any] = []
    inner: set[nn.Module] = set()
    for partition in partitions:
        for module in modules_of(partition):
            if is_sharded(module) and module not in inner:
                outermost.append(module)
                inner.update(module.modules())
    return outermost


@contextmanager
def unsharded(modules: Sequence[Any]) -> Iterator[None]:
    """Gather all parameters for a ``with`` block, and let go of them after it."""
    for module in modules:
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
        if _is_finalized_by_hand(module):
            module.set_manual_backward_finalization(True)
        else:
            module.set_is_last_backward(False)
        for layer in module.modules():
            if is_sharded(layer):
                layer.unshard()
    try:
        yield
    finally:
        for module in modules:
            if _is_finalized_by_hand(module):
                # FSDP raises if a failed step has not come to reduce(), which ends the backward.
                with suppress(RuntimeError):
                    module.set_manual_backward_finalization(False)
            for layer in module.modules():
                if is_sharded(layer):
                    layer.reshard()


def reduce(modules: Sequence[Any]) -> None:
    """Reduce the gradients of whole parameters to those of their shards."""
    for module in modules:
        if _is_finalized_by_hand(module):
            module.set_requires_gradient_sync(True)
            module.set_reshard_after_backward(True)
            module.finalize_backward()
        else:
            pipelining.reduce_gradients(module)


def _is_finalized_by_hand(module: Any) -> bool:
    """Whether FSDP itself can reduce after several backwards, as it can from PyTorch 2.15 on."""
    return hasattr(module, "finalize_backward")
