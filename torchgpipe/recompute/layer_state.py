"""The state of layers: a recomputation finds what the first run found, and leaves no trace.

Between a forward and its backward a user can switch a layer to eval mode, remove its hooks, and
freeze its parameters, replace them (``torch.func.functional_call`` puts the old ones back as soon
as the forward is over) or change them in place. And a recomputation must not update buffers again,
of which :mod:`torchgpipe.recompute.buffers` has copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import unwrap
from itertools import chain
from operator import attrgetter, is_
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.autograd.versions import Identities, identities
from torchgpipe.partition.placement import exchanged, is_shard
from torchgpipe.recompute.buffers import Buffers, Copy, Learned, Lost, lost, put
from torchgpipe.recompute.read_only import Place
from torchgpipe.values.structure import MISSING

__all__: list[str] = []


_training = attrgetter("training")
_needs_grad = attrgetter("requires_grad")


class Found(NamedTuple):
    """The flags, hooks and tensors of layers at one time."""

    training: list[bool]
    hooks: list[dict[int, Any]]
    needs_grad: list[bool]
    tensors: list[Tensor | None]


class LayersState:
    """The training flags, forward hooks, parameters and buffers that layers have now.

    All of this is read twice for each recomputation, and most often nothing has changed. So loops
    in C do the reading where they can, and reading returns the same object if nothing has changed.

    Args:
        layers: a partition.
        learned: what earlier steps have learned about buffers.

    Raises:
        TypeError: a layer is scripted.
    """

    def __init__(self, layers: nn.Module, learned: Learned) -> None:
        self._modules = list(layers.modules())
        self._parameters: list[Tensor] = []
        #: The tables that hold parameters and buffers, and the names there.
        self._places: list[tuple[dict[str, Any], str]] = []
        self._tables: list[dict[str, Any]] = []
        #: The tables of hooks before and after a forward. PyTorch has further tables with options
        #: of these hooks, which are empty if there is no hook.
        self._main_hook_tables: list[dict[int, Any]] = []
        self._hook_tables: list[dict[int, Any]] = []
        self._hooks: list[dict[int, Any]] = []
        #: Whether there is any hook.
        self._has_hooks = False
        #: Whether there are hooks that have to be called even if the layer fails.
        self.always_calls = False
        #: The shapes of what cells have dropped, each once.
        self.shapes: dict[torch.Size, torch.Size] = {}
        #: All parameters and buffers by their identities, but for buffers that layers may change.
        #: Buffers are detached: ``buffer.data = ...`` leaves such an alias as it is, and a buffer
        #: that gets a graph would be kept alive by it.
        self.lasting: dict[int, Tensor] = {}
        self._exchanged = others = exchanged(self._modules)
        places: list[Place] = []
        # Of all parameters of a partition at once: looking each of them up would take time.
        known = learned.get(layers, {}).get(("", layers.training))
        unknown: list[Place] = []
        for module in self._modules:
            if not isinstance(module._parameters, dict):
                raise TypeError(
                    "under checkpointing, a layer must not be scripted, since it saves other "
                    "tensors from its third run on, when TorchScript has optimised it "
                    f"(layer: {type(module).__name__}); use checkpoint='never', or torch.compile"
                )
            parameters = [x for x in module._parameters.values() if x is not None]
            if module in others:
                # FSDP2 frees and gathers a whole parameter: only its shard counts changes.
                self._parameters += filter(is_shard, parameters)
                tables = [module._buffers]
            else:
                self._parameters += parameters
                # Buffers are tensors or None, as parameters are.
                tables = [module._parameters, module._buffers]  # type: ignore[list-item]
                if known is not False and parameters:
                    own_places = [(module, name) for name in module._parameters]
                    if known is None:
                        unknown += [x for x in own_places if self._may_change(*x)]
                    else:
                        flags = learned.get(module, {})
                        places += [x for x in own_places if flags.get((x[1], module.training))]
            for table in tables:
                if table:
                    self._tables.append(table)
                    self._places += [(table, name) for name in table]
            self.always_calls |= bool(module._forward_hooks_always_called)
            places += [(module, name) for name in module._buffers]
        self.buffers = Buffers(places, learned, unknown, (layers, ""), self._suspects(unknown))
        changing = self.buffers.not_lasting()
        for x in chain.from_iterable(map(dict.values, self._tables)):
            if x is not None and id(x) not in changing:
                is_parameter = isinstance(x, nn.Parameter) or is_lazy(x)
                # guard: buffers as they were
                self.lasting[id(x)] = x if is_parameter else x.detach()
        #: The names in all tables.
        self._names = [*chain.from_iterable(self._tables)]
        self._found = Found(
            [*map(_training, self._modules)],
            self._hooks,
            [*map(_needs_grad, self._parameters)],
            [*chain.from_iterable(map(dict.values, self._tables))],
        )
        self._identities: Identities | None = None
        #: Whether the layers have changed no parameter in place. Then recomputations change none.
        self._steady = False
        #: The parameters that have to be as they were.
        self._fixed = self._parameters
        if known:
            learnt = self.buffers.changing
            self._fixed = [x for x in self._parameters if id(x) not in learnt]
        self._before = identities(self._fixed)

    def settle(self) -> None:
        """Take note of the parameters: from now on only recomputations change them in place."""
        if self._identities is None:
            # Now that the layers have run, lazy modules have removed their hooks.
            for module in self._modules:
                self._main_hook_tables += [module._forward_pre_hooks, module._forward_hooks]
                self._hook_tables += _forward_hooks(module)
            self._has_hooks = any(self._main_hook_tables)
            # In place, since self._found refers to this list.
            self._hooks[:] = map(dict, self._hook_tables)
        if not self._steady:
            if self._identities is None:
                self._look_at_own_changes()
            self._identities = identities(self._fixed)
            self._steady = self._identities == self._before

    def restored(self, copies: Iterable[Copy] = ()) -> RestoredLayers:
        """Restore the state within a ``with`` block, and after it what there was before the block.

        Within the block layers change copies of their buffers.

        Args:
            copies: what :meth:`Buffers.copied` returned before the first run.

        Raises:
            RuntimeError: somebody other than the layers has changed a parameter in place.
        """
        if (self._identities or self._before) != identities(self._fixed):
            self._look_at_own_changes()
            if self._identities is not None and self._identities != identities(self._fixed):
                raise self._changed()
        if self.buffers.lost is not None:
            raise lost(self.buffers.lost)
        return RestoredLayers(self, copies)

    def _look_at_own_changes(self) -> None:
        """Tell parameters that the layers themselves have changed from all others."""
        expected = self._identities or self._before
        if expected == (now := identities(self._fixed)):
            return
        if self.buffers.watches:
            self.buffers.learn_parameters()
            learnt = self.buffers.changing
            kept = [k for k, x in enumerate(self._fixed) if id(x) not in learnt]
            self._fixed, self._before, self._identities, now = (
                [self._fixed[k] for k in kept],
                _chosen(self._before, kept),
                None if self._identities is None else _chosen(self._identities, kept),
                _chosen(now, kept),
            )
        if self._identities is None:
            # The optimizer, or whoever else, cannot have come in between.
            changed = {
                id(x)
                for x, *both in zip(self._fixed, *self._before, *now)
                if both[:2] != both[2:] and both[1] != -1
            }
            for module in self._modules if changed else ():
                for name, x in module._parameters.items():
                    if id(x) in changed and self._may_change(module, name):
                        self.buffers.lost = Lost((module, name), late=True)

    def _suspects(self, unknown: Sequence[Place]) -> set[nn.Module]:
        """Layers that may change parameters through ``.data``, which nobody counts, by their code.

        It may be that of a layer around, or of a hook.
        """
        if not unknown:
            return set()
        known: dict[type, bool] = {}
        found: set[nn.Module] = set()
        for module in self._modules:
            kind = type(module)
            if kind not in known:
                known[kind] = _name_data(_functions_of(kind))
            hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
            if known[kind] or any(_name_data(_functions_of(hook)) for hook in hooks):
                found |= {*module.modules()}
        return found

    def _may_change(self, module: nn.Module, name: str) -> bool:
        """Whether a recomputation finds another value than the first if the layer has a new one."""
        x = module._parameters[name]
        if type(x) is not nn.Parameter or module in self._exchanged:
            return False
        # A norm that is limited already stays as it is, and so do weights that move.
        return getattr(module, "max_norm", None) is None and not isinstance(module, nn.RNNBase)

    def put_back(self, copies: Iterable[Copy] = ()) -> Found:
        """Restore the state, and what was in buffers; return what there is now."""
        now = self._read()
        try:
            self._write(self._found, now)
            # guard: buffers of before the first run
            put(copies)
            for (module, name), buffer in self.buffers.read_only.as_they_were():
                # guard: buffers that layers read
                module._buffers[name] = buffer
        except BaseException:
            self._write(now, self._read())
            raise
        return now

    def leave(self, found: Found) -> None:
        """Settle, and restore what :meth:`put_back` returned."""
        try:
            self.settle()
        finally:
            self._write(found, self._read())

    def _read(self) -> Found:
        found = self._found
        training = [*map(_training, self._modules)]
        needs_grad = [*map(_needs_grad, self._parameters)]
        hooks = self._hooks
        has_hooks = self._has_hooks or any(self._main_hook_tables)
        if has_hooks and self._hook_tables != hooks:
            hooks = [*map(dict, self._hook_tables)]
        tensors = found.tensors
        if [*chain.from_iterable(self._tables)] != self._names or not all(
            map(is_, chain.from_iterable(map(dict.values, self._tables)), tensors)
        ):
            tensors = [table.get(name, MISSING) for table, name in self._places]
        if (
            tensors is found.tensors
            and hooks is found.hooks
            and training == found.training
            and needs_grad == found.needs_grad
        ):
            return found
        return Found(training, hooks, needs_grad, tensors)

    def _write(self, found: Found, now: Found) -> None:
        if now is found:
            return
        # Comparing is faster than setting.
        if now.training != found.training:
            for module, training in zip(self._modules, found.training):
                module.training = training
        # guard: hooks of the forward
        if now.hooks != found.hooks:
            for hooks, table in zip(found.hooks, self._hook_tables):
                table.clear()
                table.update(hooks)
        if now.needs_grad != found.needs_grad:
            for parameter, needs_grad in zip(self._parameters, found.needs_grad):
                parameter.requires_grad_(needs_grad)
        if not all(map(is_, now.tensors, found.tensors)):
            for (place, name), tensor in zip(self._places, found.tensors):
                if tensor is not MISSING:
                    place[name] = tensor
                else:
                    place.pop(name, None)

    def _changed(self) -> RuntimeError:
        assert self._identities is not None
        for parameter, *expected in zip(self._fixed, *self._identities):
            ((version,), (address,)) = identities([parameter])
            if [version, address] != expected:
                break
        rule = (
            "under checkpointing, parameters must not be changed in place between a forward and "
            f"its backward, which computes the forward again (shape: {tuple(parameter.shape)}, "
        )
        if version == expected[0]:
            return RuntimeError(
                f"{rule}now in other memory); replace no parameter's data before backward, and "
                "leave fully_shard's reshard_after_forward as it is by default"
            )
        return RuntimeError(
            f"{rule}version: {version}, expected version: {expected[0]}); run backward before "
            "optimizer.step(), and before the next forward of layers that change their parameters "
            "themselves"
        )


class RestoredLayers:
    """The state of layers as it was, within a ``with`` block.

    A class, as all context managers that are entered for each cell: @contextmanager takes longer.
    """

    def __init__(self, state: LayersState, copies: Iterable[Copy]) -> None:
        self.state, self.copies = state, copies

    def __enter__(self) -> None:
        self.found = self.state.put_back(self.copies)

    def __exit__(self, *_: object) -> None:
        self.state.leave(self.found)


def _functions_of(called: Any) -> list[FunctionType]:
    """The functions of a class but for PyTorch's own; a function; or those of an object's class."""
    if not isinstance(called, type):
        called = getattr(called, "__func__", called)
        if isinstance(called, FunctionType):
            return [called]
        called = type(called)
    owners = [x for x in called.__mro__ if not x.__module__.startswith("torch.")]
    own = [x for owner in owners for x in vars(owner).values()]
    own = [x.__func__ if isinstance(x, staticmethod | classmethod) else x for x in own]
    return [x for x in own if isinstance(x, FunctionType)]


def _name_data(functions: Sequence[FunctionType], helpers: bool = True) -> bool:
    """Whether the code of functions, or of functions that it names, names ``data``."""
    for function in map(unwrap, functions):
        codes = [getattr(function, "__code__", None)]
        while codes:
            code = codes.pop()
            if code is not None:
                named = [function.__globals__.get(name) for name in code.co_names if helpers]
                own = [x for x in named if isinstance(x, FunctionType)]
                if "data" in code.co_names or (own and _name_data(own, helpers=False)):
                    return True
                codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return False


def _chosen(found: Identities, kept: Sequence[int]) -> Identities:
    versions, addresses = found
    return [versions[k] for k in kept], [addresses[k] for k in kept]


def _forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]
