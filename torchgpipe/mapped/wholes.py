"""Wholes: the modules of any model that a device map keeps whole, called blocks.

A list has no code between its entries, be it an ``nn.ModuleList`` or an ``nn.Sequential``, so it
may be divided, and lists within lists too. A module with code of its own is kept whole, unless it
contains such a list, and is too large to spread blocks evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from torchgpipe._torch.dynamo import is_compiled

__all__: list[str] = []


class Wholes(NamedTuple):
    """A way to divide a model into blocks.

    Args:
        model: the model.
        names: names of classes whose modules are kept whole.
    """

    model: nn.Module
    names: Collection[str]

    @classmethod
    def of(cls, model: nn.Module, no_split: Collection[str] | None = None) -> Wholes:
        """Divide a model as its user says, or else as the model says."""
        own = getattr(model, "_no_split_modules", None) if no_split is None else no_split
        return cls(model, own or ())

    def blocks(self) -> dict[str, nn.Module]:
        """The blocks of the model by name."""
        return self._once(self._below("", self.model)) or {"": self.model}

    def coarsest(self) -> dict[str, nn.Module]:
        """The direct submodules of the model that have weights, as blocks."""
        return self._once(x for x in self.model.named_children() if _has_weights(x[1]))

    def finer(
        self, blocks: Mapping[str, nn.Module], costs: Mapping[str, float], count: int
    ) -> dict[str, nn.Module] | None:
        """Divide blocks that are too large to be spread evenly; None if there are none.

        Args:
            blocks: the blocks by name.
            costs: what each costs.
            count: the number of devices.
        """
        share = sum(costs.values()) / count
        found: list[tuple[str, nn.Module]] = []
        for name, block in blocks.items():
            parts = [(name, block)]
            # To divide a list costs nothing, and allows more cuts.
            if costs.get(name, 0.0) > (share / 2 if is_list(block) else share):
                parts = self._parts(name, block)
            found += parts
        divided = self._once(found)
        return divided if [*divided] != [*blocks] else None

    def _parts(self, name: str, block: nn.Module) -> list[tuple[str, nn.Module]]:
        """The parts of a block, or the block if it cannot be divided."""
        divisible = name and not self._is_whole(block) and (is_list(block) or _has_list(block))
        found = [*self._below(name, block)] if divisible else []
        return found if sum(map(_has_weights, dict(found).values())) > 1 else [(name, block)]

    def _below(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        within = is_list(module)
        for child, inner in module._modules.items():
            if inner is None:
                continue
            path = f"{name}.{child}" if name else child
            if not _has_weights(inner):
                # An activation between two layers goes with them.
                if within and not is_list(inner):
                    yield path, inner
            elif self._is_divided(inner, within):
                yield from self._below(path, inner)
            else:
                yield path, inner

    def _is_divided(self, module: nn.Module, within: bool) -> bool:
        """Whether a module is divided from the beginning, whatever it costs.

        Args:
            module: the module.
            within: whether it is an entry of a list.
        """
        if not is_called(module):
            return True
        if self._is_whole(module):
            return False
        inner = [x for x in module.modules() if x is not module]
        if any(type(x).__name__ in self.names for x in inner):
            return True
        own = is_list(module) or any(isinstance(x, nn.ModuleList) and len(x) > 1 for x in inner)
        return own and not within

    def _once(self, found: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
        """Modules by name, without shared ones that have no weights."""
        several = with_several_names(self.model)
        return {
            name: module for name, module in found if _has_weights(module) or module not in several
        }

    def _is_whole(self, module: nn.Module) -> bool:
        return type(module).__name__ in self.names or is_compiled(module)


def is_called(module: nn.Module) -> bool:
    """Whether a module is called itself, as no ``nn.ModuleList`` is."""
    # What torch.compile() returns has the attribute, and its class has none.
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def is_list(module: nn.Module) -> bool:
    """Whether a module has no code of its own between its entries."""
    if "forward" in module.__dict__ or is_compiled(module):
        return False
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def with_several_names(model: nn.Module) -> set[nn.Module]:
    """The modules that have several names in a model.

    One of them without weights, as an activation that all layers share, belongs to no device: it
    computes where its inputs are.
    """
    counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return {module for module, count in counts.items() if count > 1}


def _has_list(module: nn.Module) -> bool:
    own = any(True for _ in module.parameters(recurse=False))
    return not own and any(
        is_list(x) and sum(map(_has_weights, x.children())) > 1 for x in module.modules()
    )


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
