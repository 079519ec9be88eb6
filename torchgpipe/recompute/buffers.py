"""The tensors that layers change in their forward: a recomputation finds what the first run found.

Spectral normalisation improves its vectors in each forward, a codebook moves, an average goes on.
So a recomputation must see the values of before the first run of its cell, and leave alone what
other cells have made of them since. Each first run copies the buffers that change, and the
recomputation works on a copy of this copy, which takes the buffer's place in the layer for that
time.

Copying all buffers would cost a model with large masks or tables their memory once per micro-batch.
So the first step copies each buffer once, and learns from it which buffers the layers change.
Comparing values finds changes that PyTorch does not count, such as those through ``.data``. Nor
does PyTorch count what norms change in training, so each first run copies their statistics,
whatever was learned: a step on zeros leaves a mean of zero as it is.

Some layers have parameters instead of buffers for that, as the spectral normalisation that many
GANs come with, which assigns ``parameter.data`` anew. The first step copies those that are small.
Of large ones it keeps the memory, which serves as long as a layer assigns other memory. Whether
parameters have changed without being counted, their values tell, and of large ones sums of their
bits. On an accelerator the host would have to wait for that, and no longer be ahead in the first
step. So there the parameters of a layer are compared if its code names ``.data``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.ambient.notes import warn
from torchgpipe.autograd.versions import address_of, version_of
from torchgpipe.devices.streams import has_streams
from torchgpipe.recompute.read_only import UNCOUNTED, Place, ReadOnly

__all__: list[str] = []

#: Up to how many bytes parameters are copied. Of larger ones the memory is kept.
SMALL = 1 << 20

#: A buffer and its copy; None for a buffer without a tensor.
Copy: TypeAlias = tuple[Place, Tensor | None]

#: For each layer whether it changes its buffers, by their names and the layer's training flag.
Learned: TypeAlias = WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]]


class Seen(NamedTuple):
    """A buffer as it was at one time."""

    place: Place
    tensor: Tensor | None
    version: int
    #: A copy, for a buffer of which nothing is known yet.
    copy: Tensor | None = None

    @property
    def is_changed(self) -> bool:
        """Whether somebody has replaced the buffer, or changed it in place, since then."""
        now = _buffer(self.place)
        if now is not self.tensor or (now is not None and version_of(now) != self.version):
            return True
        if now is not None and now is self.copy:
            # Its lazy layer has made it meanwhile.
            return True
        return self.copy is not None and now is not None and not _equal(self.copy, now)


class SeenParameter(NamedTuple):
    """A parameter as it was before a first run."""

    place: Place
    tensor: nn.Parameter
    version: int
    address: int
    copy: nn.Parameter
    #: Whether its values are compared.
    compares: bool
    #: Of a large one, which nobody copies, what :func:`_sums` has returned.
    sums: Tensor | None

    @property
    def is_changed(self) -> bool:
        """Whether somebody has replaced the parameter or its memory, or changed it in place."""
        now = self.tensor
        if _buffer(self.place) is not now or version_of(now) != self.version:
            return True
        return address_of(now) != self.address

    def differing(self) -> Tensor | None:
        """Tell where it has other values than before, on its device; None if nobody knows."""
        with suppress(RuntimeError, NotImplementedError):
            if self.sums is not None:
                now = _sums(self.tensor)
                return None if now is None else now != self.sums
            if self.compares and not self.is_alone:
                return _bits(_numbers(self.tensor)) != _bits(_numbers(self.copy))
        return None

    @property
    def is_alone(self) -> bool:
        """Whether nobody has a copy of what it was, or other memory."""
        return self.address == address_of(self.tensor) == address_of(self.copy) > 0


class Lost(NamedTuple):
    """A parameter that its layers change, and whose value before the change nobody has.

    Args:
        place: where it is.
        late: whether its layer had not changed it before; otherwise it is too large to be copied.
    """

    place: Place
    late: bool


class Buffers:
    """The buffers of a partition that its layers change, or may change, in one step.

    Args:
        places: the buffers that a layer may change, and the parameters that it does change.
        learned: what earlier steps have learned about them; this step adds to it.
        parameters: parameters of which nothing is known.
        key: where it is learned whether any of them changes.
        suspects: the layers whose parameters are compared, even if the host has to wait.
    """

    def __init__(
        self,
        places: Iterable[Place],
        learned: Learned,
        parameters: Sequence[Place] = (),
        key: Place | None = None,
        suspects: Container[nn.Module] = (),
    ) -> None:
        self._learned = learned
        self._key, self._suspects = key, suspects
        #: Parameters of which nothing is known, and what the first of these cells found there.
        self._parameters = parameters
        self._watched_parameters: list[SeenParameter] = []
        #: The copies of all cells, while there are such parameters.
        self._lists: list[list[Copy]] = []
        #: Whether this step learns of parameters.
        self.watches = False
        #: The parameter that makes recomputations impossible, if there is one.
        self.lost: Lost | None = None
        self._changing: list[Place] = []
        #: Buffers of which nothing is known, and what the first of these cells found there.
        self._unknown: list[Place] = []
        self._watched: list[Seen] | None = None
        quiet: list[Place] = []
        for place in places:
            module, name = place
            changes = learned.get(module, {}).get((name, module.training))
            # guard: statistics of norms
            if name in UNCOUNTED and module.training and module._buffers.get(name) is not None:
                self._changing.append(place)
            elif changes is None:
                self._unknown.append(place)
            elif changes:
                self._changing.append(place)
            else:
                quiet.append(place)
        self.read_only = ReadOnly(quiet)
        #: The buffers of which nothing is known, as the step finds them.
        self._begun = [_seen(place) for place in self._unknown]
        #: Whether first runs have anything to copy, or to learn.
        self.any = bool(self._changing or self._unknown or parameters)
        self._large = [
            _seen(place)
            for place in self._changing
            if isinstance(x := _buffer(place), nn.Parameter) and x.nbytes > SMALL
        ]

    @property
    def changing(self) -> set[int]:
        """The identities of what the layers are known to change."""
        return {id(_buffer(place)) for place in self._changing}

    def not_lasting(self) -> set[int]:
        """The identities of buffers that are not the same tensors in a recomputation.

        Autograd saves a parameter itself, and not what it holds, so parameters last.
        """
        # Unknown statistics are those of norms in eval mode, which only read them.
        places = self._changing + [place for place in self._unknown if place[1] not in UNCOUNTED]
        return {
            id(x)
            for x in map(_buffer, places)
            if x is not None and not is_lazy(x) and not isinstance(x, nn.Parameter)
        }

    def copied(self) -> list[Copy]:
        """Copy the buffers that change, before a first run."""
        once: dict[int, Tensor] = {}
        if self._watched is None:
            # Not when the step began: this stream will free the copies.
            self._watched = [_seen(place, once) for place in self._unknown]
            self._watched_parameters = [
                _seen_parameter(x, once, x[0] in self._suspects) for x in self._parameters
            ]
            self.watches = bool(self._parameters)
        else:
            # A layer of another partition may share a buffer, and have changed it since.
            self.learn()
        copies = [(place, _copy(_buffer(place), once)) for place in self._changing]
        return copies + [(seen.place, seen.copy) for seen in self._watched]

    def learn(self) -> None:
        """Find out, after a first run, which buffers it has changed."""
        watched, self._watched = self._watched or [], []
        for seen in watched:
            if seen.is_changed:
                self._changing.append(seen.place)
                self._note(seen.place, True)
            else:
                self._watched.append(seen)
        if self.watches:
            self.learn_parameters(values=True)
        for seen in self._large:
            if seen.tensor is not None and version_of(seen.tensor) != seen.version:
                self.lost = Lost(seen.place, late=False)

    def learn_parameters(self, *, values: bool = False) -> None:
        """Find out which parameters the layers have changed.

        Args:
            values: whether to compare values, on the stream of the partition.
        """
        parameters, self._watched_parameters = self._watched_parameters, []
        others = _with_other_values(parameters) if values else set()
        for seen in parameters:
            if not seen.is_changed and seen.place not in others:
                if values and (seen.tensor.requires_grad or seen.sums is not None):
                    # A model has many of these, and one that changes does so in the first run.
                    seen = seen._replace(copy=_alias(seen.tensor), sums=None)
                self._watched_parameters.append(seen)
                continue
            self._changing.append(seen.place)
            if seen.is_alone and (seen.place in others or version_of(seen.tensor) != seen.version):
                # Nothing is learned, so that the next step finds it, too.
                self.lost = Lost(seen.place, late=seen.tensor.nbytes <= SMALL)
                continue
            self._note(seen.place, True)
            # Earlier cells have found it as it was in the beginning, too.
            for copies in self._lists:
                copies.append((seen.place, seen.copy))

    def first_run(self, copies: list[Copy]) -> FirstRun:
        """Copy buffers before a first run, and learn from it, in a ``with`` block around it.

        Args:
            copies: where to put them, for the recomputation.
        """
        return FirstRun(self, copies)

    def settle(self) -> None:
        """Take note, after a forward, of the buffers that checkpointed cells have not changed."""
        for seen in self._watched or ():
            # Without the values, which belong to the stream of the partition.
            self._note(seen.place, seen._replace(copy=None).is_changed)
        for seen in self._begun if self._watched is not None else ():
            # A layer of an earlier partition may share the buffer, and have changed it.
            if seen.is_changed:
                self._note(seen.place, True)
        self._watched = []
        if self.watches:
            self.learn_parameters()
            if self._key is not None and self.lost is None:
                self._note(self._key, any(x in self._changing for x in self._parameters))
        self.watches, self._watched_parameters, self._lists = False, [], []
        for place, _ in self.read_only.changed():
            self._note(place, True)
            _warn(place)
        self.read_only.settle()

    def _note(self, place: Place, changes: bool) -> None:
        module, name = place
        self._learned.setdefault(module, {})[name, module.training] = changes


class FirstRun:
    """A first run, within a ``with`` block."""

    def __init__(self, buffers: Buffers, copies: list[Copy]) -> None:
        self.buffers, self.copies = buffers, copies

    def __enter__(self) -> None:
        self.copies += self.buffers.copied()
        if self.buffers.watches:
            self.buffers._lists.append(self.copies)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.buffers.learn()


def put(copies: Iterable[Copy]) -> None:
    """Give layers the copies, which have been made before a first run, for a recomputation."""
    once: dict[int, Tensor] = {}
    for (module, name), tensor in copies:
        table: dict[str, Any] = module._buffers
        if isinstance(tensor, nn.Parameter):
            table = module._parameters
        # A copy once more, since other cells may share this one.
        table[name] = _copy(tensor, once)


def lost(found: Lost) -> RuntimeError:
    """The error for a parameter of which no recomputation finds what it was."""
    (module, name), late = found
    where = f"layer: {type(module).__name__}, parameter: {name}"
    if late:
        return RuntimeError(
            "under checkpointing, a layer that changes a parameter in its forward must do so from "
            "the first micro-batch of its first step on, which shows what has to be copied for the "
            f"recomputation ({where}); have the layer change it in each forward, if only by "
            "`parameter.mul_(1)`, or use checkpoint='never'"
        )
    return RuntimeError(
        "under checkpointing, a layer must not change a large parameter in place in its forward, "
        "since nobody copies what it was for the recomputation "
        f"({where}, bytes: {getattr(_buffer(found.place), 'nbytes', 0)}, large: more than {SMALL})"
        "; have the layer give it other memory, as by `parameter.data = parameter.data * 0.9`, or "
        "use checkpoint='never'"
    )


def _buffer(place: Place) -> Tensor | None:
    module, name = place
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def _seen_parameter(place: Place, once: dict[int, Tensor], suspect: bool) -> SeenParameter:
    tensor = _buffer(place)
    assert isinstance(tensor, nn.Parameter)
    copy = _copy(tensor, once)
    assert isinstance(copy, nn.Parameter)
    free = suspect or not has_streams(tensor.device)
    sums = _sums(tensor) if free and tensor.nbytes > SMALL else None
    compares = free or not tensor.requires_grad
    return SeenParameter(
        place, tensor, version_of(tensor), address_of(tensor), copy, compares, sums
    )


def _seen(place: Place, once: dict[int, Tensor] | None = None) -> Seen:
    tensor = _buffer(place)
    version = -1 if tensor is None else version_of(tensor)
    return Seen(place, tensor, version, None if once is None else _copy(tensor, once))


def _copy(tensor: Tensor | None, once: dict[int, Tensor]) -> Tensor | None:
    """Copy a buffer, once for all places where it is."""
    if tensor is None or is_lazy(tensor):
        # Its layer makes it in the first run. Recomputations get copies of what it holds by then.
        return tensor
    if id(tensor) not in once and isinstance(tensor, nn.Parameter):
        once[id(tensor)] = _alias(tensor, copies=tensor.nbytes <= SMALL)
    if id(tensor) not in once:
        copy = tensor.detach().clone()
        if tensor.requires_grad:
            with torch.enable_grad():
                # No leaf, since layers may change it in place.
                copy = copy.requires_grad_().clone()
        once[id(tensor)] = copy
    return once[id(tensor)]


def _alias(parameter: nn.Parameter, *, copies: bool = False) -> nn.Parameter:
    """Another parameter with the same memory, or with a copy of it."""
    data = parameter.detach().clone() if copies else parameter.data
    found = nn.Parameter(data, parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    # Meta tensors have no values, and there are layouts that cannot be compared: versions must do.
    with suppress(RuntimeError, NotImplementedError):
        return torch.equal(a, b)
    return True


def _with_other_values(parameters: Sequence[SeenParameter]) -> set[Place]:
    """The places of parameters whose values are not those of before.

    The host waits for each device once.
    """
    asked: dict[torch.device, list[tuple[Place, Tensor]]] = {}
    for seen in parameters:
        differing = None if seen.is_changed else seen.differing()
        if differing is not None:
            asked.setdefault(differing.device, []).append((seen.place, differing.any()))
    found = set()
    for pairs in asked.values():
        # Meta tensors have no values. In a dry run a read of values may give any number, and the
        # number of them that are not zero raises.
        with suppress(RuntimeError, NotImplementedError):
            answers = torch.stack([answer for _, answer in pairs]).nonzero()
            found |= {pairs[k][0] for k in answers.flatten().tolist()}
    return found


def _bits(tensor: Tensor) -> Tensor:
    """The bits of numbers as integers, which are equal for a NaN, too."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def _numbers(tensor: Tensor) -> Tensor:
    """The numbers that a tensor consists of."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _sums(tensor: Tensor) -> Tensor | None:
    """Sums of about 64 parts of a tensor, or more: of bits, and of numbers; None if it has none.

    The sums of bits change with any one number. If all signs change, they may not, since they are
    in the type of their numbers: in a longer one they would take twenty times as long on the CPU.
    """
    with suppress(RuntimeError, NotImplementedError):
        numbers = _numbers(tensor)
        return torch.stack([_by_parts(_bits(numbers)), _bits(_by_parts(numbers))])
    return None


def _by_parts(x: Tensor) -> Tensor:
    for k in range(1, x.dim()):
        if prod(x.shape[:k]) >= 64:
            return x.sum([*range(k, x.dim())], dtype=x.dtype)
    return torch.stack([part.sum(dtype=x.dtype) for part in x.reshape(-1).chunk(64)])


def _warn(place: Place) -> None:
    module, name = place
    warn(
        "under checkpointing, a layer that changes a buffer in its forward must do so from its "
        f"first step on (layer: {type(module).__name__}, buffer: {name}); do without the gradients "
        "of this step, which come from other values of the buffer than its outputs, or use "
        "checkpoint='never'. Later steps are right",
        RuntimeWarning,
    )
