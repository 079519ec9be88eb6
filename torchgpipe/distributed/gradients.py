"""Gradients over several processes: their average over replicas, and their norm over all stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.autograd.outcome import Sums
from torchgpipe.checks import is_number, verify
from torchgpipe.distributed.peers import Peers, digest
from torchgpipe.partition.sharding import is_shard

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
    """Give parameters and buffers the values that they have in the first pipeline.

    Args:
        module: the layers of this process.
        replicas: the processes with the same stages.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    verify_same(digest(repr([(name, tuple(x.shape), x.dtype) for name, x in named])), replicas)
    with torch.no_grad():
        for _, x in named:
            own = x.contiguous()
            replicas.fill(own, 0)
            if own is not x:
                x.copy_(own)


def verify_same(number: int, replicas: Peers) -> None:
    """Check that a number that stands for the parameters is the same in all pipelines.

    Raises:
        ValueError: it is not.
    """
    found = [x for (x,) in replicas.gathered([number])]
    if len({*found}) > 1:
        raise ValueError(
            "replicas must have the same parameters, and the same of them frozen, since their "
            "gradients are averaged (first replica with the same ones, by rank: "
            f"{[found.index(x) for x in found]}); make and freeze the same layers in all of them"
        )


def average(weights: Iterable[Tensor], sums: Sums, replicas: Peers) -> None:
    """Average the gradients of a step over other pipelines.

    Args:
        weights: the weights, in the same order in all processes.
        sums: their gradients.
        replicas: the processes with the same stages.
    """
    found = [(weight, sums.take(weight).contiguous()) for weight in weights]
    works = [dist.all_reduce(grad, group=replicas.group, async_op=True) for _, grad in found]
    for (weight, grad), work in zip(found, works):
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
    own = nn.utils.get_total_norm(grads, norm_type).to(peers.device)
    if is_shard(own):
        # Shards of a norm, whose sum FSDP2 has not computed yet.
        whole: Any = own
        own = whole.full_tensor()
    own = own.double() if own.device.type != "mps" else own.float()
    if norm_type == torch.inf:
        # The largest of several numbers is one of them that is a number.
        own = own.nan_to_num(nan=torch.inf)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=peers.group)
        return own
    own = own**norm_type
    dist.all_reduce(own, group=peers.group)
    return own ** (1 / norm_type)
