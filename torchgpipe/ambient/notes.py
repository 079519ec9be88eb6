"""Exceptions on their way out: notes on them, in both directions, and blocks that let them pass."""

from __future__ import annotations

import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient import labels
from torchgpipe.ambient.context import registered
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []


# Notes on exceptions, with partition, micro-batch and layer, and the line that a warning names.


class CurrentLayer(threading.local):
    """The layer that a thread runs; after the layer has failed, too.

    It is not registered: an error may leave a block that puts settings back before it leaves the
    one that notes the layer.
    """

    #: The layer's name in the module; None between layers.
    name: str | None = None
    #: The name of the layer's class.
    kind: str | None = None


class AfterLayer(threading.local):
    """Functions that a thread calls when a layer has run."""

    #: Takes the output of the layer.
    visit: Callable[[Any], None] | None = None
    #: Comes after that.
    then: Callable[[], None] | None = None


layer = CurrentLayer()
after_layer = registered(AfterLayer())


class noted:
    """Add a note to what is raised within a ``with`` block, and let it pass.

    If a layer raised it, the note also names the layer.

    Args:
        note: the note, or an object whose ``str()`` is the note, called only when needed.
        label: the label of the work within the block; None without an observation.
    """

    def __init__(self, note: object, label: labels.Label | None = None) -> None:
        self.note, self.label = note, label

    def __str__(self) -> str:
        return str(self.note)

    def __enter__(self) -> None:
        self.outer, layer.name = layer.name, None
        if self.label is not None:
            self.outer_label = labels.put(self.label)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            note_layer(error, self)
        layer.name = self.outer
        if self.label is not None:
            labels.put(self.outer_label)


def note_layer(error: BaseException, note: object) -> None:
    """Add a note to an exception, with the layer that this thread runs, if there is one."""
    name = f", layer {layer.name} ({layer.kind})" if layer.name else ""
    # An exception that takes no notes stays without one.
    with suppress(Exception):
        add_note(error, f"{note}{name}")


#: What PyTorch says where tensors of several devices meet.
_DEVICES = re.compile(
    "same device|expected device|current device|different from other tensors|on one device .found"
)


def is_about_devices(error: BaseException) -> bool:
    """Whether an exception is PyTorch's about tensors of several devices."""
    text = error.args[0] if type(error) is RuntimeError and error.args else None
    return isinstance(text, str) and bool(_DEVICES.search(text))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once; before Python 3.11, as a cause that bears the note.

    PyTorch's errors about devices have no remedy, so the note has one.
    """
    if is_about_devices(error) and not is_noted(error):
        note += (
            "; layers must compute with tensors of their own device: pass a tensor as an argument, "
            "register it as a buffer, which moves with the layer, or bring it by .to(x.device)"
        )
    if sys.version_info >= (3, 11):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif getattr(error.__cause__, "args", None) != (note,):
        cause = RuntimeError(note)
        # So the traceback still shows the exception's own cause.
        cause.__cause__ = error.__cause__
        cause.__context__ = error.__context__
        cause.__suppress_context__ = error.__suppress_context__
        error.__cause__ = cause


def is_noted(error: BaseException) -> bool:
    """Whether an exception bears a note of ours already."""
    notes = [*entries(error, "__notes__"), *entries(error.__cause__, "args")]
    return any(isinstance(x, str) and x.startswith("raised in ") for x in notes)


def entries(error: BaseException | None, name: str) -> list[Any]:
    """The entries of an attribute of an exception, none where it is missing or cannot be read."""
    try:
        return [*getattr(error, name)]
    except Exception:
        return []


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of the caller that is neither PyTorch's nor ours."""
    level, frame = 1, sys._getframe()
    ours = ("torch", "torchgpipe")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


# Notes on exceptions that a layer's ``torch.autograd.Function`` raises in backward.
#
# The node of such a function is a Python object, and autograd looks its ``apply`` up by name. So
# an attribute of that name can wrap the backward, and add a note to its exceptions. Nodes of C++
# look nothing up, and their exceptions get no note.
#
# To visit all nodes of all cells would take much host time. So the graph of a partition, or of a
# module of a device map, is visited in its first step, and in later steps only if such a node was
# found then.


#: Whether the graph of each partition has Python nodes, in training and in evaluation.
learned: weakref.WeakKeyDictionary[nn.Module, dict[bool, bool]] = weakref.WeakKeyDictionary()


class Visit:
    """Visit the nodes that layers add to the graph, within a ``with`` block.

    Args:
        layers: the partition, or a module of a device map.
        inputs: the tensors that it gets, skips included.
        stashed: a function that returns what layers have stashed so far.
        note: a text that names the cell.
    """

    def __init__(
        self,
        layers: nn.Module,
        inputs: Iterable[Tensor],
        stashed: Callable[[], Iterable[Any]],
        note: str,
    ) -> None:
        self.layers, self.stashed, self.note = layers, stashed, note
        #: The nodes where the graph of the next layer begins. No others are held, since a node
        #: holds its saved tensors, even if later layers have detached its output.
        self.known: set[Node] = {x.grad_fn for x in inputs if x.grad_fn is not None}
        #: Nodes that made the parameters and buffers.
        self.outside: set[Node] = set()
        self.recorded = self.found = False

    def __enter__(self) -> None:
        self.outer, after_layer.visit = after_layer.visit, self.visit

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        after_layer.visit = self.outer
        # A traceback may hold this object, which must not hold the graph then.
        self.known, self.outside = set(), set()
        if kind is None and self.recorded:
            known = learned.setdefault(self.layers, {})
            training = self.layers.training
            known[training] = known.get(training, False) or self.found

    @uncompiled
    def visit(self, *outputs: Any) -> None:
        """Visit the nodes of the layer that has just run, or of layers compiled as one."""
        tensors = [x for value in (*outputs, *self.stashed()) for x in _tensors(value)]
        ends = {x.grad_fn for x in tensors if x.grad_fn is not None}
        if ends and not self.recorded:
            self.recorded = True
            # Under torch.func.functional_call, parameters may be results of the caller's functions.
            for x in (*self.layers.parameters(), *self.layers.buffers()):
                if x.grad_fn is not None:
                    self.outside.add(x.grad_fn)
        name = f", layer {layer.name} ({layer.kind})" if layer.name else ""
        text = f"{self.note}{name}, in its backward"
        self.found |= note_functions(tensors, self.known | self.outside, text)
        if tensors:
            self.known = ends


def note_functions(
    outputs: Iterable[Tensor], seen: set[Node], text: str, through: bool = False
) -> bool:
    """Add a note to what Python functions in a graph may raise in backward.

    Args:
        outputs: the tensors that the graph has made.
        seen: the nodes where it begins, to which its own are added.
        text: the note.
        through: whether to go on behind functions that have a note already.

    Returns:
        Whether a function has got the note.
    """
    found = False
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            # guard: the note of the first cell
            if "apply" in vars(node):
                if not through:
                    continue
            elif type(node)._forward_cls.__module__.split(".")[0] != "torchgpipe":
                found = True
                node.apply = _noting(weakref.ref(node), text)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for x in leaves_of(value) if isinstance(x, Tensor)]


def is_worth_a_visit(layers: nn.Module) -> bool:
    """Whether the graph of a partition had Python nodes, or was not visited so far."""
    return learned.get(layers, {}).get(layers.training, True)


def _noting(node: Callable[[], Any], text: str) -> Callable[..., Any]:
    """Wrap the ``apply`` of a node, to add a note to its exceptions.

    The wrapper must not refer to the node, since the node refers to the wrapper.
    """

    def apply(*grads: Any) -> Any:
        this = node()
        try:
            found = type(this).apply(this, *grads)
            _verify_devices(this, found)
            return found
        except BaseException as error:
            # Some exceptions take no note, and one of a recomputation has its note already.
            with suppress(Exception):
                if not is_noted(error):
                    add_note(error, text)
            raise

    return apply


def _verify_devices(node: Any, found: Any) -> None:
    """Check that a function has returned gradients on the devices of their tensors.

    PyTorch checks it, too, but no note gets to its error.

    Raises:
        RuntimeError: it has not.
    """
    grads = found if isinstance(found, tuple) else (found,)
    wanted = [x for x, needed in zip(grads, node.needs_input_grad) if needed]
    edges = [(x, k) for x, k in node.next_functions if x is not None]
    for x, (following, k) in zip(wanted, edges):
        device = following._input_metadata[k].device
        # PyTorch itself copies 0-dimensional tensors.
        if isinstance(x, Tensor) and x.dim() and x.device != device:
            raise RuntimeError(
                "a gradient must be on the device of its tensor (function: "
                f"{type(node)._forward_cls.__name__}, gradient: {x.device}, tensor: {device}); "
                "return it by .to(device), or bring tensors together in front of the function"
            )


# Context managers made from generators, which let any exception pass unchanged.


Given = ParamSpec("Given")
Value = TypeVar("Value", covariant=True)


class Block(AbstractContextManager[Value, None], Generic[Value]):
    """A context manager around a generator with one ``yield``.

    An exception of the block is not thrown into the generator. The generator is closed instead: its
    ``finally`` clauses run, but not the code after its ``yield``. To throw it would set the
    exception's traceback, which fails for an exception without settable attributes, and hides it.
    """

    def __init__(self, generator: Iterator[Value]) -> None:
        self._generator = generator

    def __enter__(self) -> Value:
        return next(self._generator)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            next(self._generator, None)
        else:
            self._generator.close()  # type: ignore[attr-defined]


def contextmanager(
    function: Callable[Given, Iterator[Value]],
) -> Callable[Given, Block[Value]]:
    """Make context managers of a generator, as :func:`contextlib.contextmanager` does."""

    @wraps(function)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Block[Value]:
        return Block(function(*args, **kwargs))

    return made
