"""Views, and layers that change tensors in place, where partitions start and end.

The model computes what the plain one does, or raises what that raises. A layer with
``inplace=True`` where a partition starts is given a copy if the partition is the first, or might be
computed again. Others are an error there under checkpointing.
"""

import copy

import pytest
import torch
from torch import nn

from tests.support.helpers import Apply, plain, wrap
from tests.support.in_place import (
    CASES,
    CHANGED_INPUT,
    ENDS,
    FLAGGED,
    SILENT,
    Double,
    is_checkpointed,
    leaf,
    out_of_place,
    outcomes,
    verify,
    verify_unless_checkpointed,
)
from torchgpipe import NoChunk

# Where a partition starts.


@CASES
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("start", FLAGGED)
def test_layer_that_tells(start, end, chunks, mode):
    module = nn.Sequential(nn.Linear(3, 3), Apply(ENDS[end]), FLAGGED[start](), nn.Linear(3, 3))
    x = leaf(requires_grad=True)
    copied = is_checkpointed(mode, chunks)
    reference = out_of_place(module) if copied else module
    found, expected, *_ = outcomes(module, [2, 2], chunks, mode, x, reference)
    verify(found, expected)
    assert isinstance(found, str) == (not copied and end in ("saved", "in place"))


@CASES
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("start", SILENT)
def test_layer_that_does_not_tell(start, end, chunks, mode):
    module = nn.Sequential(nn.Linear(3, 3), Apply(ENDS[end]), Apply(SILENT[start]), nn.Linear(3, 3))
    found, expected, *_ = outcomes(module, [2, 2], chunks, mode, leaf(requires_grad=True))
    verify_unless_checkpointed(found, expected, chunks, mode)


@pytest.mark.parametrize("chunks", [1, 2])
def test_without_grad_nothing_is_in_the_way(chunks):
    starts = [*[make() for make in FLAGGED.values()], *map(Apply, SILENT.values())]
    for start in starts:
        module = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), start, nn.Linear(3, 3))
        x = leaf(requires_grad=False)
        for no_grad in (torch.no_grad, torch.inference_mode):
            with no_grad():
                expected = plain(module, x, chunks)
                assert torch.equal(wrap(module, chunks=chunks, balance=[2, 2])(x), expected)


# The first layer of all.


@CASES
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("start", SILENT)
def test_first_layer_that_does_not_tell(start, requires_grad, chunks, mode):
    module = nn.Sequential(Apply(SILENT[start]), nn.Linear(3, 3), nn.Tanh())
    found, expected, given, other = outcomes(module, [2, 1], chunks, mode, leaf(requires_grad))
    if requires_grad and start != "detached":
        assert found == expected
        assert "a leaf Variable that requires grad is being used in an in-place" in found
    elif is_checkpointed(mode, chunks):
        assert found.startswith(CHANGED_INPUT)
    else:
        # Also behind autograd's back, if it is detached.
        verify(found, expected)
        assert torch.equal(given, other)


# Where a partition ends.


#: A tensor, a view of it, and whether one of them is a view that torch keeps from being changed.
SHARED = {
    "the same part": lambda x: (x, x[:]),
    "parts": lambda x: (x[:, :2], x[:, 1:]),
    "other parts": lambda x: (x[:1], x[1:]),
    "split": lambda x: x.split(2, 1),
    "detached": lambda x: (x, x.detach()),
}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_views_of_one_tensor_of_which_a_later_partition_changes_one(name, told, mode):
    change = Double(0) if told else Apply(lambda value: (value[0].mul_(2), value[1]))
    last = Apply(lambda value: value[0].sum(1) + value[1].sum())
    module = nn.Sequential(nn.Linear(3, 3), Apply(SHARED[name]), change, last)
    for balance in ([2, 2], [2, 1, 1]):
        found, *_ = outcomes(module, balance, 2, mode, leaf(requires_grad=True))
        assert found.startswith(
            (
                "what passes between partitions",
                CHANGED_INPUT,
                "Output 0 of Split",
            )
        )


def test_part_of_a_split(mode):
    """PyTorch forbids to change a part of a split, but checkpointing makes a copy."""
    module = nn.Sequential(
        nn.Linear(3, 6), Apply(lambda x: x.split(3, 1)[0]), nn.ReLU(inplace=True), nn.Linear(3, 3)
    )
    found, expected, *_ = outcomes(
        module, [2, 2], 2, mode, leaf(requires_grad=True), out_of_place(module)
    )
    if mode != "never":
        verify(found, expected)
    else:
        assert found.startswith("Output 0 of Split")


# Structures.


@CASES
@pytest.mark.parametrize("key", [0, "x"])
def test_part_of_a_structure(key, chunks, mode):
    """Layers with and without the flag change one item in place."""

    def made(x):
        parts = [x.sin(), x.cos(), (x > 0).long()]
        return parts if key == 0 else dict(zip("xyz", parts))

    def merged(value):
        a, b, c = value.values() if isinstance(value, dict) else value
        return a * b + c

    def change(value):
        value[key].mul_(2)
        return value

    module = nn.Sequential(nn.Linear(3, 3), Apply(made), Double(key), Apply(merged))
    x = leaf(requires_grad=True)
    for reference in (module, out_of_place(module)):
        found, expected, *_ = outcomes(module, [2, 2], chunks, mode, x, reference)
        verify(found, expected)
        assert not isinstance(found, str)

    module[2] = Apply(change)
    found, expected, *_ = outcomes(module, [2, 2], chunks, mode, x)
    if is_checkpointed(mode, chunks):
        assert found.startswith(CHANGED_INPUT)
    else:
        verify(found, expected)
        assert not isinstance(found, str)


@CASES
def test_integers_that_are_changed(chunks, mode):
    """A mask is an example: layers change it on the way, and autograd saves nothing of it."""
    made = Apply(lambda x: {"x": x.sin(), "mask": (x > 0).long()})
    change = Apply(lambda value: {"x": value["x"], "mask": value["mask"].bitwise_xor_(1)})
    module = nn.Sequential(
        nn.Linear(3, 3), made, change, Apply(lambda value: value["x"] * value["mask"])
    )
    found, expected, *_ = outcomes(module, [2, 2], chunks, mode, leaf(requires_grad=True))
    verify_unless_checkpointed(found, expected, chunks, mode)


@CASES
def test_one_tensor_in_two_places_of_a_structure(chunks, mode):
    """Both places change, since they hold one tensor."""
    module = nn.Sequential(
        nn.Linear(3, 3),
        Apply(lambda x: {"a": x, "b": [x]}),
        Apply(lambda value: (value["a"].mul_(2), value["b"][0])),
        Apply(lambda value: value[0] * value[1].sin()),
    )
    found, expected, *_ = outcomes(module, [2, 1, 1], chunks, mode, leaf(requires_grad=True))
    if is_checkpointed(mode, chunks):
        assert found.startswith(CHANGED_INPUT)
    else:
        verify(found, expected)
        assert not isinstance(found, str)


@pytest.mark.parametrize("j", [0, 1])
def test_what_every_micro_batch_gets_is_not_to_be_changed(j, mode):
    change = Apply(lambda value: (value[0] + value[1].mul_(2), value[1]))
    layers = [nn.Identity(), Apply(lambda value: value[0] + value[1])]
    layers.insert(j, change)
    wrapped = wrap(nn.Sequential(*layers), mode=mode, chunks=2, balance=[1, 1, 1])
    rule = "what every micro-batch gets whole" if mode == "never" else CHANGED_INPUT
    with pytest.raises(RuntimeError, match=rule):
        wrapped((leaf(requires_grad=True), NoChunk(leaf(False, rows=1))))


def test_output_that_the_caller_changes(mode):
    for end in (torch.sin, lambda x: x[:, 2:], torch.relu_):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Apply(end))
        wrapped = wrap(copy.deepcopy(module), mode=mode, chunks=2, balance=[1, 2])
        x = leaf(requires_grad=True)
        gradients = []
        for output, weight in (
            (plain(module, x, 2), module[0].weight),
            (wrapped(x), wrapped[0].weight),
        ):
            output.mul_(2)
            gradients.append(torch.autograd.grad(output.sum(), [x, weight]))
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b)
