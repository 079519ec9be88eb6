"""A cache that carries keys and values from slice to slice of a sequence, in forward and backward.

A causal model computes a slice of a sequence from that slice, and from the keys and values that
earlier slices have left in a cache. Transformers' own cache joins all keys and values anew for each
slice, and attention keeps each of these copies for backward. Here each layer has one buffer of the
length of the sequence. A slice writes its own part, and attention sees the buffer as far as that::

    buffer    0 0 0 1 1 1 . . .     slice 1 has written; attention sees the first six
    backward  its gradient is that of slice 1's own part, and of what slice 0 saw

What a slice has seen is never written to again, so it may be saved for backward. Each slice has a
cache object of its own, since a recomputation must find the past of its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.mapped.slice_attention import SliceStart, takes_slice_masks
from torchgpipe.recompute.runs import is_recomputing

__all__: list[str] = []


class Extend(torch.autograd.Function):
    """Add a slice to what the slice before has seen: ``before, added → the end of both``."""

    @staticmethod
    def forward(ctx: Any, before: Tensor | None, added: Tensor, seen: Tensor) -> Tensor:
        """Return ``seen``, memory of shape ``(..., positions, features)`` that has both."""
        ctx.set_materialize_grads(False)
        ctx.length = seen.shape[-2] - added.shape[-2]
        ctx.lost = 0 if before is None else before.shape[-2] - ctx.length
        return seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        before = added = None
        if grad is not None and ctx.needs_input_grad[0]:
            before = grad[..., : ctx.length, :]
            if ctx.lost:
                before = nn.functional.pad(before, (0, 0, ctx.lost, 0))
        if grad is not None and ctx.needs_input_grad[1]:
            added = grad[..., ctx.length :, :]
        return before, added, None


class Past:
    """The keys, or the values, of one layer: those of all slices, in one buffer.

    Args:
        starts: the position at which each slice begins, and the end of the sequence.
        window: how many positions before its own attention sees; None for all.
    """

    def __init__(self, starts: Sequence[int], window: int | None) -> None:
        self._starts, self.window = starts, window
        self._buffer: Tensor | None = None
        #: The output of the latest call of ``seen()``, whose graph the next call continues; None
        #: before the first call. The graph leads to a checkpoint, and back to this cache: only
        #: ``let_go()`` breaks this cycle through C++.
        self._latest: Tensor | None = None

    def first(self, k: int) -> int:
        """The first position that slice ``k`` sees."""
        return 0 if self.window is None else max(0, self._starts[k] - self.window)

    def seen(self, k: int, added: Tensor) -> Tensor:
        """Positions that slice ``k`` sees, its own included: ``(..., positions, features)``."""
        start, end = self._starts[k : k + 2]
        if self._buffer is None:
            self._buffer = added.new_empty(*added.shape[:-2], self._starts[-1], added.shape[-1])
        # A ``.data`` has a version of its own: later slices' writes do not make backward fail.
        memory = self._buffer.data
        seen = memory[..., self.first(k) : end, :]
        output: Tensor
        if is_recomputing():
            # Forward has written this part already, and backward goes through forward's graph.
            output = Extend.apply(None, added, seen)
        else:
            memory[..., start:end, :] = added.detach()
            output = self._latest = Extend.apply(self._latest, added, seen)
        return output

    def let_go(self) -> None:
        """Release the graph of the latest slice."""
        self._latest = None


class KeptLayers:
    """The keys and values of all layers of a model, for one sequence or several of a length.

    Args:
        model: a model of Transformers.
        lengths: the lengths of the slices.

    Raises:
        ValueError: a layer of the model keeps something else than keys and values.
    """

    def __init__(self, model: nn.Module, lengths: Sequence[int]) -> None:
        kind = SliceStart if takes_slice_masks(model) else int
        self.starts = [kind(sum(lengths[:k])) for k in range(len(lengths) + 1)]
        caches = import_module("transformers.cache_utils")
        config: Any = model.config
        layers = caches.DynamicCache(config=config).layers
        others = [x for x in layers if type(x) not in known(caches)]
        if others:
            raise ValueError(
                "slices of a sequence need a model whose layers keep keys and values, and nothing "
                f"else (model: {type(model).__name__}, a layer keeps: {type(others[0]).__name__}); "
                "use slices=1"
            )
        windows = [
            x.sliding_window - 1 if getattr(x, "is_sliding", False) else None for x in layers
        ]
        self._pasts = [(Past(self.starts, x), Past(self.starts, x)) for x in windows]

    @property
    def has_windows(self) -> bool:
        """Whether a layer keeps a sliding window alone."""
        return any(keys.window is not None for keys, _ in self._pasts)

    def of_slice(self, k: int) -> Any:
        """The cache that slice ``k`` is computed with."""
        return cache_class()(self, k)

    def past(self, layer: int) -> tuple[Past, Past]:
        """The keys and the values of a layer; models without a list of layers add theirs."""
        while len(self._pasts) <= layer:
            self._pasts.append((Past(self.starts, None), Past(self.starts, None)))
        return self._pasts[layer]

    def __len__(self) -> int:
        return len(self._pasts)

    def let_go(self) -> None:
        """Release the graph, when all slices are computed."""
        for past in chain.from_iterable(self._pasts):
            # guard: the graph of the latest slice
            past.let_go()


def known(caches: Any) -> tuple[type, ...]:
    """The classes of layers of Transformers' caches that keep nothing but keys and values."""
    # A DummyLayer keeps nothing: its layer of the model uses the keys of an earlier layer.
    names = "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"
    return tuple(getattr(caches, name) for name in names if hasattr(caches, name))


@cache
def cache_class() -> Any:
    """The class of the caches, derived from Transformers' own, which models ask for."""
    caches: Any = import_module("transformers.cache_utils")  # Any: mypy does not know its classes.

    class SliceLayer(caches.DynamicLayer):  # type: ignore[misc]
        """The keys and values of one layer, as one slice finds them."""

        def __init__(self, layers: KeptLayers, k: int, number: int) -> None:
            super().__init__()
            self.is_initialized = True
            self._layers, self._k, self._number = layers, k, number
            self.is_sliding = layers.past(number)[0].window is not None
            self.length = layers.starts[k]

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            past_keys, past_values = self._layers.past(self._number)
            if not is_recomputing():
                self.length = self._layers.starts[self._k + 1]
            return past_keys.seen(self._k, keys), past_values.seen(self._k, values)

        def get_seq_length(self) -> int:
            return self._layers.starts[self._k] if is_recomputing() else self.length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            first = self._layers.past(self._number)[0].first(self._k)
            return self._layers.starts[self._k] + query_length - first, first

    class SliceCache(caches.Cache):  # type: ignore[misc]
        """A cache that one slice of a sequence is computed with."""

        def __init__(self, layers: KeptLayers, k: int) -> None:
            super().__init__(layers=[SliceLayer(layers, k, x) for x in range(max(1, len(layers)))])
            self._slice = layers, k

        def update(
            self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            while len(self.layers) <= layer_idx:
                self.layers.append(SliceLayer(*self._slice, len(self.layers)))
            return super().update(keys, values, layer_idx, *args, **kwargs)

    return SliceCache
