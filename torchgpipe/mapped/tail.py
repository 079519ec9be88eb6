"""The tail: the model's own code after its last mapped module, which is computed again with it.

Models of Hugging Face compute their loss there. The tensors that such code saves for backward are
larger than anything else, since each logit is saved several times. Under checkpointing the last
mapped module is recomputed anyway, and the code after it is recomputed from its output::

    first run        module ── f ── g ── loss      what f and g keep is dropped
    recomputation    module ── f ── g              f and g are called again

The code itself cannot run again from the middle. So the functions of PyTorch that it calls are
noted down, as :class:`~torchgpipe.mapped.glue.Glue` sees them, with their arguments, as far as they
depend on what the module has returned. All other arguments are kept.

Nothing is dropped before the micro-batch has come to its end. If the code did something that a
recomputation would not repeat, all that it has kept stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.context import current_hooks
from torchgpipe.ambient.modes import casts_as
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import get_device
from torchgpipe.mapped.containers import replaced, tensors_of
from torchgpipe.mapped.functions import ONCE, STATISTICS, changed_argument
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.recompute.once import lasting
from torchgpipe.recompute.runs import Values
from torchgpipe.recompute.slots import Slot
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []


class Noted(NamedTuple):
    """A call of a function.

    Attributes:
        function: the function.
        arguments: its arguments, with empty tensors in place of those that depend on the module.
        used: for each empty tensor its identity, and the number of the tensor that it stands for.
        kept: the other tensors among the arguments, detached, with their versions.
        needing: the kept tensors that require a gradient.
        made: the numbers of the tensors that it has returned.
        grad: whether autograd recorded it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, Any]
    used: Sequence[tuple[int, int]]
    kept: Sequence[tuple[Tensor, int]]
    needing: Sequence[Tensor]
    made: range
    grad: bool


class TensorState(NamedTuple):
    """The number of a tensor that depends on the module, its version and ``requires_grad``."""

    number: int
    version: int
    needs_grad: bool

    def fits(self, tensor: Tensor) -> bool:
        """Whether nothing but noted calls has changed the tensor."""
        return version_of(tensor) == self.version and tensor.requires_grad == self.needs_grad


class Tail:
    """The code after a mapped module, for one micro-batch."""

    def __init__(self, checkpoint: Checkpoint, output: Batch, omits: bool = False) -> None:
        self._checkpoint = checkpoint
        #: Whether outputs of this code may be left out until the caller reads them.
        self.omits = omits
        self._numbers = FirstNumbers(get_device(checkpoint.stream))
        #: The ``TensorState`` of each tensor in the module's output, or computed from one of these.
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._count = 0
        self._calls: list[Noted] = []
        #: Slots of tensors that the code saves: ``end()`` empties them, recomputation fills them.
        self._slots: list[Slot] = []
        #: The number of noted calls that backward repeats: up to the last that saves a tensor.
        self._needed = 0
        #: Whether a recomputation of noted calls repeats all that this code has done so far.
        self._repeats = True
        self._note(output.parts[VALUE])

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor that a recomputation computes again; None for all others."""
        state: TensorState | None = self._known.get(tensor)
        return state.number if state and state.fits(tensor) and self._repeats else None

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a function, and note the call down if it depends on the module."""
        tensors = tensors_of((args, kwargs))
        states: dict[int, TensorState] = {
            id(x): self._known[x] for x in tensors if x in self._known
        }
        if not states or not self._repeats:
            return function(*args, **kwargs)
        if changes_others(function, args, kwargs, states) or not self._can_repeat(tensors, states):
            self._repeats = False
            return function(*args, **kwargs)
        others = {
            # guard: state of the mini-batch in the tail
            id(x): torch.empty(0, device="cpu") if id(x) in states else lasting(x)
            for x in tensors
        }
        independent = [others[id(x)] for x in tensors if id(x) not in states]
        kept = [(x, version_of(x)) for x in independent]
        arguments = replaced((args, dict(kwargs)), others)
        before, grad = len(self._slots), torch.is_grad_enabled()
        try:
            # The graph holds the unpack hook until backward, so it must not refer to the tail.
            with saved_tensors_hooks(self._keep, self._checkpoint.unpack):
                result = function(*args, **kwargs)
        except BaseException:
            # The model may catch this error and go on, and a recomputation would not repeat that.
            self._repeats = False
            raise
        made = tensors_of(result)
        used = [(id(others[key]), state.number) for key, state in states.items()]
        needing = [others[id(x)] for x in tensors if id(x) not in states and x.requires_grad]
        self._calls.append(Noted(function, arguments, used, kept, needing, self._note(made), grad))
        if len(self._slots) > before:
            self._needed = len(self._calls)
        if any(not state.fits(x) for x, state in self._known.items()):
            # The call has changed a tensor in place: note the new versions of it and its views.
            for x, state in [*self._known.items()]:
                self._known[x] = TensorState(state.number, version_of(x), x.requires_grad)
        return result

    def _note(self, tensors: Sequence[Tensor]) -> range:
        numbers = range(self._count, self._count + len(tensors))
        self._count += len(tensors)
        for number, x in zip(numbers, tensors):
            self._known[x] = TensorState(number, version_of(x), x.requires_grad)
        return numbers

    def _can_repeat(self, tensors: Sequence[Tensor], states: Mapping[int, TensorState]) -> bool:
        return (
            # guard: what was changed past the tail
            all(states[id(x)].fits(x) for x in tensors if id(x) in states)
            # guard: casts of the tail
            and casts_as(self._checkpoint.context.modes)
            # guard: hooks within the tail
            and current_hooks() is None
            and not torch.is_inference_mode_enabled()
        )

    @uncompiled
    def _keep(self, tensor: Tensor) -> Slot:
        slot = Slot(tensor, self._checkpoint.shapes)
        slot.fill(tensor)
        self._slots.append(slot)
        return slot

    def keep(self) -> None:
        """Keep all saved tensors, since this was not the tail, or cannot be recomputed."""
        self._let_go()
        self._checkpoint.end_forward()

    def _let_go(self) -> None:
        self._repeats = False
        self._known.clear()
        self._calls, self._slots = [], []

    def end(self, wanted: Sequence[int]) -> Checkpoint | None:
        """Drop the tensors that the code has saved, at the end of the micro-batch.

        Args:
            wanted: the numbers of the tensors to return in :meth:`Checkpoint.compute`.

        Returns:
            A checkpoint that computes these; None if the tail keeps all.
        """
        self._numbers.end_first_run()
        if not (self._repeats and self._is_unchanged()):
            self.keep()
            return None
        checkpoint, function = self._checkpoint, self._checkpoint.function
        calls = self._calls if wanted else self._calls[: self._needed]
        maker = None
        if wanted:
            maker = copy.copy(checkpoint)
            # Backward uses up ``places`` and ``values`` of ``checkpoint``: the copy gets its own.
            maker.places, maker.values = [], Values(checkpoint.values)
            maker.function = partial(_repeated, function, calls, wanted)
        if self._slots:
            checkpoint.places += self._slots
            checkpoint.function = partial(_repeated, function, calls, ())
            for slot in self._slots:
                # guard: dropping what the tail has kept
                slot.empty()
        self._let_go()
        checkpoint.end_forward()
        return maker

    def _is_unchanged(self) -> bool:
        return (
            # Random numbers of code that is not noted are not drawn again: later ones would differ.
            # guard: numbers of the tail
            not self._numbers.drawn
            # guard: changes within the tail
            and all(version_of(x) == version for call in self._calls for x, version in call.kept)
        )


def changes_others(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recomputed: Container[int],
) -> bool:
    """Whether a function changes a tensor in place that recomputation does not make anew."""
    name = getattr(function, "__name__", "")
    if name in STATISTICS or name in ONCE:
        return True
    return any(id(x) not in recomputed for x in tensors_of(changed_argument(name, args, kwargs)))


def _repeated(
    function: Callable[[Batch], Batch], calls: Sequence[Noted], wanted: Sequence[int], batch: Batch
) -> Batch:
    """Run a module and the calls after it in recomputation.

    Raises:
        RuntimeError: an argument of the calls was changed in place since.
    """
    tensors = dict(enumerate(function(batch).parts[VALUE]))
    last = {number: k for k, call in enumerate(calls) for _, number in call.used}
    for k, (call, arguments, used, kept, needing, made, grad) in enumerate(calls):
        # guard: what the tail was given
        if any(version_of(x) != version for x, version in kept):
            raise RuntimeError(
                "under checkpointing, what the code after the last mapped module was given must "
                "not be changed in place before backward, which computes that code again (shapes: "
                f"{[tuple(x.shape) for x, _ in kept]}); change a clone of it, or change it after "
                "backward"
            )
        others = {key: tensors[number] for key, number in used}
        others |= {id(x): x.detach().requires_grad_() for x in needing}
        args, kwargs = replaced(arguments, others)
        with torch.set_grad_enabled(grad):
            tensors |= zip(made, tensors_of(call(*args, **kwargs)))
        del args, kwargs, others
        for _, number in used:
            if last[number] == k and number not in wanted:
                tensors.pop(number, None)
    return Batch(tuple([tensors[number].detach() for number in wanted]))
