"""Tracing: the forward of a stage, and its backward by autograd, become a joint graph.

The layers run once with fake tensors, which have shapes and no data, while
:func:`~torch.fx.experimental.proxy_tensor.make_fx` notes each operator that PyTorch comes to.
Autograd's own formulas are noted with them, and so is the backward of custom functions. Parameters
and buffers become arguments. What the layers do in Python, and to other objects than tensors, is
not noted, so a stage that does such things is not made a graph.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from torchgpipe._torch.dynamo import keep_guard
from torchgpipe.ambient.modes import own_casts, without_autocast
from torchgpipe.graphs.joint import Effects, Joint, fakes_of, is_random
from torchgpipe.graphs.places import REASON, Places, ReadingNothing, UntraceableError, verify_plain
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import Structure

__all__: list[str] = []


@dataclass
class OutputForm:
    """The output of a stage without its tensors.

    Args:
        parts: for each part, the places of its tensors among the outputs.
        structures: for each part, its structure.
        shared: the parts with a tensor that shares memory with another one.
        needs_grad: for each output, whether a gradient of it is wanted.
        rest: the indices and the structure of the further outputs: the output of the layers before
            the loss, and the weight of the loss.
    """

    parts: dict[Any, tuple[int, ...]]
    structures: dict[Any, Structure]
    shared: frozenset[Any]
    needs_grad: list[bool]
    rest: tuple[tuple[int, ...], Structure]

    def __post_init__(self) -> None:
        places, structure = self.rest
        #: The further outputs (see ``rest``) if no tensor is among them, so that they are the same
        #: in each step; otherwise None.
        self.fixed = None if places else structure.unflatten(())

    def output(self, tensors: Sequence[Tensor], shared: frozenset[Any]) -> Batch:
        """The output with these tensors, of which parts share memory."""
        parts = {key: tuple([tensors[k] for k in places]) for key, places in self.parts.items()}
        return Batch.of(parts, self.structures, shared)


class Marks:
    """The values that layers keep for a recomputation, while they are traced."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def put(self, leaf: Any) -> Any:
        """Take note of a leaf of a value, and return it."""
        if isinstance(leaf, Tensor):
            self.tensors.append(leaf)
        return leaf


#: A function that runs the layers, on a micro-batch and the tensors among the further arguments of
#: the loss. It returns the output, and the further outputs as tensors and their structure.
StageRun = Callable[[Batch, Sequence[Tensor]], tuple[Batch, tuple[Sequence[Tensor], Structure]]]


def trace(
    places: Places,
    tensors: Sequence[Tensor],
    run: StageRun,
    batch: Batch,
    more: Sequence[Tensor],
    weights: Sequence[Tensor],
    marks: Marks,
) -> tuple[Joint, OutputForm]:
    """Trace a stage, with its backward if grad mode is on.

    Args:
        places: where the layers have their tensors.
        tensors: the tensors that the stage computes with in these places.
        run: runs the layers.
        batch: a micro-batch.
        more: the tensors among the further arguments of the loss.
        weights: the tensors whose gradients are wanted.
        marks: takes what the layers keep for a recomputation.

    Raises:
        UntraceableError: the stage cannot be a graph.
    """
    verify_plain([*tensors, *batch, *more])
    recorded, index_of = torch.is_grad_enabled(), {id(x): k for k, x in enumerate(tensors)}
    if not all(id(x) in index_of for x in weights):
        raise UntraceableError("it uses a weight of elsewhere")
    chosen = [index_of[id(x)] for x in weights]
    if recorded and {k for k, x in enumerate(tensors) if x.requires_grad} - {*chosen}:
        raise UntraceableError("it has a tensor that requires a gradient, and is no parameter")
    forms: list[OutputForm] = []
    counts: list[int] = []

    def joint(state: list[Tensor], inputs: list[Tensor], more: list[Tensor]) -> list[Tensor | None]:
        # Layers may check isinstance(x, nn.Parameter), so the fake weights are parameters, too.
        state = [
            nn.Parameter(x, x.requires_grad) if isinstance(original, nn.Parameter) else x
            for x, original in zip(state, places.read())
        ]
        with places.put(state), ReadingNothing(state):
            output, (rest, structure) = run(batch.replace(_entered(inputs)), more)
            form, values = _formed(output, rest, structure)
            forms.append(form)
            results = [x.detach() for x in values]
            kept = [x.detach() for x in marks.tensors]
            ends = [x for x, needed in zip(values, form.needs_grad) if needed and recorded]
            # Stand-ins for the gradients of outputs, which ``_with_roles`` turns into placeholders.
            tangents = [torch.empty_like(x) for x in ends]
            wanted = [x for x in [*inputs, *[state[k] for k in chosen]] if x.requires_grad]
            grad_of: dict[int, Tensor | None] = {}
            if ends and wanted:
                # Backward runs within places.put(), since PyTorch's checkpoints run layers again in
                # it, which then need fake tensors. It runs in this thread, the only one that the
                # tracer records.
                with torch.autograd.set_multithreading_enabled(False), without_autocast():
                    grads = torch.autograd.grad(ends, wanted, tangents, allow_unused=True)
                grad_of = dict(zip(map(id, wanted), grads))
        of_inputs = [grad_of.get(id(x)) for x in inputs]
        of_weights = [grad_of.get(id(state[k])) for k in chosen]
        groups = results, tangents, of_inputs, of_weights, kept
        counts.extend([len(x) for x in groups])
        return [*chain(*groups)]

    arguments = [
        [x.detach().requires_grad_(x.requires_grad) for x in some]
        for some in (tensors, batch, more)
    ]
    keep_guard()
    with (
        # Casts of fake weights must not stay in autocast's cache, which outlives the trace.
        own_casts(),
        # PyTorch's checkpoints write into FX's global metadata, which is restored after the trace.
        # guard: notes of checkpoints in a trace
        preserve_node_meta(),
        places.restored(),
        drawing_nothing(),
    ):
        try:
            module = make_fx(joint, tracing_mode="fake")(*arguments)
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(_reason(error)) from error
    result = _with_roles(module, [len(x) for x in arguments], counts, forms[0])
    _verify(result)
    return result, forms[0]


class NoLeaves(torch.autograd.Function):
    """Turn leaves into results of a function, which layers may change in place."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # By default autograd would turn None, the gradient of an unused result, into zeros.
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def _entered(inputs: Sequence[Tensor]) -> list[Tensor]:
    needing = [x for x in inputs if x.requires_grad]
    entered = iter(NoLeaves.apply(*needing) if needing and torch.is_grad_enabled() else needing)
    return [next(entered) if x.requires_grad else x for x in inputs]


def _formed(
    output: Batch, rest: Sequence[Tensor], structure: Structure
) -> tuple[OutputForm, list[Tensor]]:
    distinct = {id(x): x for x in [*output, *rest]}
    index = {x: k for k, x in enumerate(distinct)}
    in_output = {id(x) for x in output}
    form = OutputForm(
        {key: tuple([index[id(x)] for x in part]) for key, part in output.parts.items()},
        dict(output.structures),
        output.shared,
        [key in in_output and x.requires_grad for key, x in distinct.items()],
        (tuple([index[id(x)] for x in rest]), structure),
    )
    return form, [*distinct.values()]


def _with_roles(
    module: GraphModule, arguments: Sequence[int], counts: Sequence[int], form: OutputForm
) -> Joint:
    """Assign roles to the nodes, and make the gradients of outputs placeholders."""
    graph = module.graph
    nodes = [*graph.nodes]
    placeholders = iter([x for x in nodes if x.op == "placeholder"])
    state, inputs, more = ([next(placeholders) for _ in range(count)] for count in arguments)
    empties: Any = nodes[-1].args[0]
    empties = empties[counts[0] : counts[0] + counts[1]]
    backward = {*nodes[nodes.index(empties[0]) : -1]} - {*empties} if empties else set[Node]()
    last = [*state, *inputs, *more][-1] if empties else None
    for node in empties:
        with graph.inserting_after(last):
            last = graph.placeholder(f"grad_of_{node.name}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    returned: Any = nodes[-1].args[0]
    results = iter(returned)
    outputs, tangents, of_inputs, of_weights, kept = (
        [next(results) for _ in range(count)] for count in counts
    )
    rest = iter(tangents)
    joint = Joint(
        *(module, state, inputs, more, outputs),
        [next(rest) if tangents and needed else None for needed in form.needs_grad],
        *(of_inputs, of_weights, backward),
        # If layers keep an input or a weight, ``kept`` leaves it out: a cell holds it anyway.
        kept={x for node in kept for x in node.all_input_nodes if x.op == "call_function"},
    )
    nodes[-1].args = (joint.results,)
    return joint


def _verify(joint: Joint) -> None:
    """Check that a graph can be computed in parts, the backward later than the forward.

    Raises:
        UntraceableError: the backward draws random numbers, or takes a value that is changed in
            between, as may what layers keep; or the graph has sparse tensors, or shapes that depend
            on values.
    """
    if any(is_random(x) for x in joint.backward):
        raise UntraceableError("it draws random numbers in its backward")
    values = [x for node in joint.module.graph.nodes for x in fakes_of(node)]
    if any(x.layout != torch.strided for x in values):
        raise UntraceableError("it computes with sparse tensors")
    if not all(type(size) is int for x in values for size in x.shape):
        raise UntraceableError("shapes of its values depend on their contents")
    effects = Effects(joint.module.graph.nodes)
    if any(effects.changes(x) for x in joint.kept):
        raise UntraceableError("it changes in place what it keeps for a recomputation")
    late = joint.backward
    for node, saved in [(x, y) for x in late for y in x.all_input_nodes if y not in late]:
        if effects.written_by(node) & effects.memory[saved]:
            raise UntraceableError("its backward changes what its forward has made")
        for x in effects.memory[saved] & effects.reads(node):
            # A write after ``saved`` was computed is refused. Where ``saved`` is in a buffer's or a
            # parameter's memory, each write is: the next micro-batch's forward writes there, too.
            lasts = any(x in effects.memory[tensor] for tensor in joint.state)
            writers = effects.writers.get(x, ())
            if any(lasts or effects.position[y] > effects.position[saved] for y in writers):
                raise UntraceableError("it changes in place what its backward needs")


def _reason(error: Exception) -> str:
    if type(error).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return "its code depends on the values of tensors"
    if "FakeTensorMode" in str(error):
        return REASON
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Check that a block draws no random numbers that a graph cannot draw.

    A graph draws from PyTorch's own generator. Other threads may draw from it at the same time, so
    only a new seed counts.

    Raises:
        UntraceableError: the block has drawn from the others, or seeded PyTorch's.
    """
    before, state, seed = _drawn(), torch.get_rng_state(), torch.initial_seed()
    yield
    now = torch.get_rng_state()
    # If the block has set the same seed again, the state is now the one right after seeding, and
    # differs from the state before the block.
    again = torch.Generator().manual_seed(seed).get_state()
    seeded = torch.initial_seed() != seed or (torch.equal(now, again) and not now.equal(state))
    if seeded or before != _drawn():
        raise UntraceableError("it draws random numbers of Python or NumPy, or seeds PyTorch's")


def _drawn() -> Any:
    """The states of Python's generator, and of NumPy's if that is imported."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), str(numpy.random.get_state(legacy=False)) if numpy else ""
