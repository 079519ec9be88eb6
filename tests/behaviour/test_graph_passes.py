"""All passes give what the graph gives as it was traced, and what the layers give."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx import Interpreter

from tests.support.graphs import traced
from tests.support.size import some
from tests.support.writes import Writes
from torchgpipe.graphs.cell import _as_traced, _of_its_own
from torchgpipe.graphs.parts import Parts
from torchgpipe.graphs.places import UntraceableError
from torchgpipe.graphs.slices import CHOICES


def copies(tensors):
    return [x.detach().clone() for x in tensors]


def equal(found, wanted):
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(found, wanted, strict=True)
    )


@settings(max_examples=some(2000, 6), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([*CHOICES]))
def test_programs_with_views_and_changes_in_place(seed, choice):
    torch.manual_seed(seed)
    layers, x = Writes(seed), torch.randn(4, 4, requires_grad=True)
    state = copies([layers.weight, layers.table])
    try:
        raw = traced(layers, x)
    except UntraceableError:
        assume(False)
    assert equal([layers.weight, layers.table], state)
    outputs = layers(x * 1)
    tangents = [torch.randn(4, 4) if y.requires_grad else None for y in outputs]
    ends = [y for y in outputs if y.requires_grad]
    grads = [grad for grad in tangents if grad is not None]
    grads = torch.autograd.grad(ends, [x, layers.weight], grads, allow_unused=True)
    outputs, table = copies(outputs), layers.table.clone()

    # The graph as it was traced.
    joint = raw.joint
    own = copies(state)
    given = [_as_traced(a, b) for a, b in zip(tangents, joint.tangents) if a is not None]
    whole = Interpreter(joint.module)
    with torch.no_grad():
        results = whole.run(*own, x.clone(), *given, enable_io_processing=False)
    found = dict(zip(joint.results, results, strict=True))
    assert equal([found[y] for y in joint.outputs], outputs)
    assert equal([found.get(y) for y in (*joint.input_grads, *joint.weight_grads)], grads)
    assert torch.equal(own[1], table)

    parts = Parts(traced(layers, x).joint, recompute=CHOICES[choice])
    passes(parts, copies(state), x.detach(), tangents, outputs, grads, table)


def passes(parts, state, x, tangents, outputs, grads, table):
    def call(part, **given):
        own = copies(state)
        with torch.no_grad():
            found = part.function(_of_its_own(parts, part, part.arguments({**given, "state": own})))
        if part not in (parts.again, parts.backward, parts.input, parts.weight):
            assert torch.equal(own[1], table)
            assert equal(found[: len(outputs)], outputs)
        return found

    first = {"input": [x], "more": []}
    saved = call(parts.forward, **first)[len(outputs) :]
    kept = call(parts.first, **first)[len(outputs) :]
    assert equal(call(parts.again, kept=kept, **first), saved)
    laid_out = [*map(_as_traced, tangents, parts.joint.tangents)]
    given = {"saved": saved, "tangent": laid_out}
    assert equal(call(parts.backward, **given), grads)
    found = call(parts.input, **given)
    live = found[1:]
    assert equal([*found[:1], *call(parts.weight, live=live, **given)], grads)
