"""The layout of skips: which partition stashes each skip, and which one pops it.

The layers declare what they stash and pop, so the layout is known before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import isgeneratorfunction
from itertools import pairwise

from torch import nn

from torchgpipe.partition.arguments import verify_a_module
from torchgpipe.skip.skippable import skips
from torchgpipe.skip.tracker import Skip, describe

__all__ = ["verify_skippables"]


class SkipLayout:
    """The skips that lead from one partition to another.

    Args:
        partitions: the number of partitions.
        ends: for each skip, the partition that stashes it and the one that pops it.
    """

    def __init__(self, partitions: int, ends: dict[Skip, tuple[int, int]]) -> None:
        #: For each partition, the skips that it stashes for another one, and that other one.
        self.stashed: list[dict[Skip, int]] = [{} for _ in range(partitions)]
        #: For each partition, the skips that another one has stashed for it, and that other one.
        self.popped: list[dict[Skip, int]] = [{} for _ in range(partitions)]
        for skip, (source, target) in ends.items():
            if source != target:
                self.stashed[source][skip] = target
                self.popped[target][skip] = source
        #: The partitions that a skip leads from and to, as schedules know them.
        self.pairs = sorted({x for x in ends.values() if x[0] != x[1]})


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Find out between which partitions skips lead."""
    source: dict[Skip, int] = {}
    target: dict[Skip, int] = {}
    for j, partition in enumerate(partitions):
        for layer in partition.modules():
            stashed, popped = skips(layer)
            source.update(dict.fromkeys(stashed, j))
            target.update(dict.fromkeys(popped, j))
    return SkipLayout(len(partitions), {skip: (source[skip], j) for skip, j in target.items()})


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip is stashed once, and popped once by a later layer.

    A skip that a layer both stashes and pops, within itself, may repeat in other such layers.

    Args:
        module: the layers, with skippable ones anywhere within them. A layer may run the layers
            within it in any order.

    Raises:
        TypeError: a skip is not stashed once and popped once, or a layer yields and is not
            skippable; the message lists every fault.
    """
    verify_a_module(module, "module")
    faults: list[str] = []
    stashed: dict[Skip, str] = {}
    popped: dict[Skip, str] = {}
    closed: set[Skip] = set()
    for child, layer in module._modules.items():
        if layer is None:
            continue
        faults += _undecorated(child, layer)
        found = [(path, *skips(submodule)) for path, submodule in layer.named_modules(prefix=child)]
        here = _closed(found)
        for path, stashes, _ in found:
            for skip in stashes:
                if skip in stashed and not (skip in here and skip in closed):
                    faults.append(
                        f"{path} stashes {describe(skip)}, which {stashed[skip]} has stashed before"
                    )
                stashed.setdefault(skip, path)
                closed |= here & {skip}
        for path, _, pops in found:
            for skip in pops:
                if skip in popped and not (skip in here and skip in closed):
                    faults.append(
                        f"{path} pops {describe(skip)}, which {popped[skip]} has popped before"
                    )
                elif skip not in stashed:
                    faults.append(f"{path} pops {describe(skip)}, which no layer before it stashes")
                popped.setdefault(skip, path)
    faults += [
        f"{path} stashes {describe(skip)}, which no layer pops"
        for skip, path in stashed.items()
        if skip not in popped
    ]
    if faults:
        raise TypeError(
            "every skip must be stashed by one layer and popped by one that comes later, or by "
            f"turns within one layer (faults: {len(faults)}); declare both ends with @skippable, "
            "and put layers of one class into namespaces with isolate(Namespace()):\n"
            + "\n".join(f"- {fault}" for fault in faults)
        )


def _closed(layers: Sequence[tuple[str, list[Skip], list[Skip]]]) -> set[Skip]:
    """Find the skips that one layer both stashes and pops, and pops before it stashes them again.

    Args:
        layers: the path of the layer, and of each layer within it, and what it stashes and pops.
    """
    ends: dict[Skip, list[str]] = {}
    for _, stashes, pops in layers:
        for kind, skips_of_kind in (("stash", stashes), ("pop", pops)):
            for skip in skips_of_kind:
                ends.setdefault(skip, []).append(kind)
    return {
        skip
        for skip, kinds in ends.items()
        if len(kinds) % 2 == 0 and all(a != b for a, b in pairwise(kinds))
    }


def _undecorated(path: str, layer: nn.Module) -> Iterator[str]:
    """Report layers that yield and are not skippable: the next layer would get a generator."""
    if isgeneratorfunction(layer.forward):
        yield (
            f"{path} ({type(layer).__name__}) yields in forward, and its class is not decorated "
            "with @skippable"
        )
    elif getattr(layer.forward, "__func__", None) is nn.Sequential.forward:
        # Other layers may run the generators of the layers within them.
        for child, inner in layer._modules.items():
            if inner is not None:
                yield from _undecorated(f"{path}.{child}", inner)
