"""The state of layers: a recomputation finds what the first run found, and leaves no trace.

Between a forward and its backward a user can switch a layer to eval mode, remove its hooks, and
freeze its parameters or replace them (``torch.func.functional_call`` puts the old ones back as soon
as the forward is over). And a recomputation must not update buffers again, of which
:mod:`torchgpipe.recompute.buffers` has copies. Of parameters there are no copies: nobody changes
them before backward, neither in place nor by other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.autograd.versions import Identities, identities
from torchgpipe.partition.placement import exchanged, is_shard
from torchgpipe.recompute.buffers import BufferKey, Buffers, Copied, Learned
from torchgpipe.values.structure import MISSING

__all__: list[str] = []


_training = attrgetter("training")
_needs_grad = attrgetter("requires_grad")


class Snapshot(NamedTuple):
    """The flags, hooks and tensors of layers at one time."""

    training: list[bool]
    hooks: list[dict[int, Any]]
    needs_grad: list[bool]
    tensors: list[Tensor | None]


class LayersState:
    """The training flags, forward hooks, parameters and buffers that layers have now.

    All of this is read twice for each recomputation, and most often nothing has changed. So loops
    in C do the reading where they can, and reading returns the same object if nothing has changed.

    Raises:
        TypeError: a layer is scripted.
    """

    def __init__(self, layers: nn.Module, learned: Learned) -> None:
        self._modules = list(layers.modules())
        self._parameters: list[Tensor] = []
        #: For each parameter and buffer: the dict of its module that holds it, and its name there.
        self._entries: list[tuple[dict[str, Any], str]] = []
        #: The dicts that hold parameters or buffers, `_parameters` and `_buffers` of each module.
        self._tables: list[dict[str, Any]] = []
        #: Each module's dicts of forward pre-hooks and of forward hooks. As long as all are empty,
        #: _read() does not look at `_hook_tables`.
        self._main_hook_tables: list[dict[int, Any]] = []
        #: For all modules, the dicts that _forward_hooks() lists: restore() restores their content.
        self._hook_tables: list[dict[int, Any]] = []
        self._hooks: list[dict[int, Any]] = []
        self._has_hooks = False
        #: Whether a hook has ``always_call=True``, so that recomputations must not end early.
        self.always_calls = False
        #: For each shape of a dropped tensor, the one object that all slots of that shape share.
        self.shapes: dict[torch.Size, torch.Size] = {}
        #: What checkpoints keep instead of recomputing it, by id: each parameter, and under the id
        #: of each buffer that is known not to change, a detached alias. After ``buffer.data = ...``
        #: the alias has the old values, and it never has a graph that would hold it.
        self.lasting: dict[int, Tensor] = {}
        others = exchanged(self._modules)
        keys: list[BufferKey] = []
        for module in self._modules:
            if not isinstance(module._parameters, dict):
                raise TypeError(
                    "under checkpointing, a layer must not be scripted, since it saves other "
                    "tensors from its third run on, when TorchScript has optimised it "
                    f"(layer: {type(module).__name__}); use checkpoint='never', or torch.compile"
                )
            parameters = [x for x in module._parameters.values() if x is not None]
            if module in others:
                # FSDP2 frees whole parameters, and gathers them anew. So only shards are compared.
                self._parameters += filter(is_shard, parameters)
                tables = [module._buffers]
            else:
                self._parameters += parameters
                # mypy wants dicts of one type, and not one of parameters and one of tensors.
                tables = [module._parameters, module._buffers]  # type: ignore[list-item]
            for table in tables:
                if table:
                    self._tables.append(table)
                    self._entries += [(table, name) for name in table]
            self.always_calls |= bool(module._forward_hooks_always_called)
            keys += [(module, name) for name in module._buffers]
        self.buffers = Buffers(keys, learned)
        changing = self.buffers.not_lasting()
        for x in chain.from_iterable(map(dict.values, self._tables)):
            if x is not None and id(x) not in changing:
                is_parameter = isinstance(x, nn.Parameter) or is_lazy(x)
                # guard: buffers as they were
                self.lasting[id(x)] = x if is_parameter else x.detach()
        #: The names of all parameters and buffers, to notice any that is added or removed.
        self._names = [*chain.from_iterable(self._tables)]
        self._first = Snapshot(
            [*map(_training, self._modules)],
            self._hooks,
            [*map(_needs_grad, self._parameters)],
            [*chain.from_iterable(map(dict.values, self._tables))],
        )
        self._before = identities(self._parameters)
        #: The versions and addresses of `_parameters` at the end of the forward, or of the last
        #: recomputation. restore() must find the same. None until the forward ends.
        self._after: Identities | None = None
        #: A parameter that layers changed in their forward, an error; None if they changed none.
        self._changed_parameter: BufferKey | None = None

    def end_forward(self) -> None:
        """Take note of the parameters: from now on only recomputations change them in place."""
        if self._after is None:
            # Hooks are read after the first run, in which lazy modules remove hooks of their own.
            for module in self._modules:
                self._main_hook_tables += [module._forward_pre_hooks, module._forward_hooks]
                self._hook_tables += _forward_hooks(module)
            self._has_hooks = any(self._main_hook_tables)
            # In place, since self._first refers to this list.
            self._hooks[:] = map(dict, self._hook_tables)
            self._changed_parameter = self._changed_by_layers(self._read())
        if self._after is not self._before:
            now = identities(self._parameters)
            # Most layers change no parameter. Then later calls of this method compare nothing.
            self._after = self._before if now == self._before else now

    def restored(self, copies: Sequence[Copied] = ()) -> RestoredLayers:
        """Restore the state within a ``with`` block, and after it what there was before the block.

        Within the block layers change copies of their buffers.
        """
        return RestoredLayers(self, copies)

    def restore(self, copies: Sequence[Copied] = ()) -> Snapshot:
        """Restore the state, and what was in buffers; return what there is now.

        Raises:
            RuntimeError: parameters have changed, or a large buffer.
        """
        now = self._read()
        changed = self._changed_parameter if self._after else self._changed_by_layers(now)
        if changed is not None:
            raise _changed_in_forward(*changed)
        if self._after is not None and self._after != identities(self._parameters):
            raise self._changed(self._after)
        try:
            self._write(self._first, now)
            for copied in copies:
                # guard: buffers of before the first run
                copied.put()
        except BaseException:
            self._write(now, self._read())
            raise
        return now

    def _changed_by_layers(self, now: Snapshot) -> BufferKey | None:
        """A parameter that the layers have changed or replaced, by its module and name.

        Nobody else can have changed it as long as cells run.
        """
        if now.tensors is self._first.tensors and identities(self._parameters) == self._before:
            return None
        both = zip(zip(*self._before), zip(*identities(self._parameters)))
        # A lazy parameter has the address -1 until the first run gives it memory, which is allowed.
        changed = {
            id(x) for x, (then, now) in zip(self._parameters, both) if then != now and then[1] != -1
        }
        owners = {id(module._parameters): module for module in self._modules}
        for (table, name), then, x in zip(self._entries, self._first.tensors, now.tensors):
            module = owners.get(id(table))
            if module is None or type(then) is not nn.Parameter:
                continue
            # Layers that compute the same again may change parameters: an embedding with max_norm
            # scales rows before it reads them, and an RNN moves its weights into one tensor.
            limited = getattr(module, "max_norm", None) is not None
            is_other = then is not x or id(then) in changed
            if is_other and not limited and not isinstance(module, nn.RNNBase):
                return module, name
        return None

    def put_back(self, snapshot: Snapshot) -> None:
        """Take note of the parameters, and restore what :meth:`restore` returned."""
        try:
            self.end_forward()
        finally:
            self._write(snapshot, self._read())

    def _read(self) -> Snapshot:
        first = self._first
        training = [*map(_training, self._modules)]
        needs_grad = [*map(_needs_grad, self._parameters)]
        hooks = self._hooks
        has_hooks = self._has_hooks or any(self._main_hook_tables)
        if has_hooks and self._hook_tables != hooks:
            hooks = [*map(dict, self._hook_tables)]
        tensors = first.tensors
        if [*chain.from_iterable(self._tables)] != self._names or not all(
            map(is_, chain.from_iterable(map(dict.values, self._tables)), tensors)
        ):
            tensors = [table.get(name, MISSING) for table, name in self._entries]
        if (
            tensors is first.tensors
            and hooks is first.hooks
            and training == first.training
            and needs_grad == first.needs_grad
        ):
            return first
        return Snapshot(training, hooks, needs_grad, tensors)

    def _write(self, wanted: Snapshot, now: Snapshot) -> None:
        if now is wanted:
            return
        # Flags, hooks and tensors are set only if they differ: to compare them is faster.
        if now.training != wanted.training:
            for module, training in zip(self._modules, wanted.training):
                module.training = training
        # guard: hooks of the forward
        if now.hooks != wanted.hooks:
            for hooks, table in zip(wanted.hooks, self._hook_tables):
                table.clear()
                table.update(hooks)
        if now.needs_grad != wanted.needs_grad:
            for parameter, needs_grad in zip(self._parameters, wanted.needs_grad):
                parameter.requires_grad_(needs_grad)
        if not all(map(is_, now.tensors, wanted.tensors)):
            for (tensors, name), tensor in zip(self._entries, wanted.tensors):
                if tensor is not MISSING:
                    tensors[name] = tensor
                else:
                    tensors.pop(name, None)

    def _changed(self, expected: Identities) -> RuntimeError:
        pairs = zip(self._parameters, zip(*expected), zip(*identities(self._parameters)))
        x, then, now = next(pair for pair in pairs if pair[1] != pair[2])
        owners = [(y, name) for y in self._modules for name, z in y._parameters.items() if z is x]
        layer, name = next(((type(y).__name__, name) for y, name in owners), ("", ""))
        rule = (
            "under checkpointing, parameters must not be changed in place between a forward and "
            "its backward, which computes the forward again "
            f"(layer: {layer}, parameter: {name}, shape: {tuple(x.shape)}, "
        )
        if then[0] == now[0]:
            return RuntimeError(
                f"{rule}now in other memory); replace no parameter's data before backward, and "
                "leave fully_shard's reshard_after_forward as it is by default"
            )
        return RuntimeError(
            f"{rule}version: {now[0]}, expected version: {then[0]}); run backward before "
            "optimizer.step(), and before the next forward of an nn.Embedding with max_norm"
        )


class RestoredLayers:
    """The state of layers as it was, within a ``with`` block.

    A class, as all context managers that are entered for each cell: @contextmanager takes longer.
    """

    def __init__(self, state: LayersState, copies: Sequence[Copied]) -> None:
        self.state, self.copies = state, copies

    def __enter__(self) -> None:
        self.before = self.state.restore(self.copies)

    def __exit__(self, *_: object) -> None:
        self.state.put_back(self.before)


def _changed_in_forward(module: nn.Module, name: str) -> RuntimeError:
    return RuntimeError(
        "under checkpointing, a layer must not change a parameter in its forward, which is "
        f"computed again (layer: {type(module).__name__}, parameter: {name}); make the parameter "
        "a buffer, change it in before_mini_batch() of a torchgpipe.OncePerMiniBatch, or use "
        "checkpoint='never'"
    )


def _forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]
