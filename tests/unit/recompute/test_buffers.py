"""The knowledge about buffers that lasts from step to step, and the copies of each first run."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.recompute import buffers
from torchgpipe.recompute.buffers import Buffers
from torchgpipe.recompute.layer_state import LayersState


class Holder(nn.Module):
    def __init__(self, *tensors):
        super().__init__()
        for k, tensor in enumerate(tensors):
            self.register_buffer(f"b{k}", tensor)


def own(copies):
    """The copies that a cell has for itself, by name."""
    return {name: tensor for (_, name), tensor in copies.changing}


def common(copies):
    """The copies that a cell shares with others, by name."""
    pairs = zip(copies.common.keys, copies.common.copies)
    return {name: tensor for (_, name), tensor in pairs if tensor is not None}


def begin(holder, learned):
    return Buffers([(holder, name) for name in holder._buffers], learned)


def step(holder, learned, *changes):
    """Run a step of a cell for each change, and return the copies that each cell has made."""
    found, made = begin(holder, learned), []
    for change in changes:
        with found.first_run(made):
            change(holder)
    found.end_forward()
    return made


def nothing(_):
    pass


def grow(holder):
    holder.b0 += 1


def test_first_step_copies_all_once_and_later_ones_what_changes(monkeypatch):
    monkeypatch.setattr(buffers, "SMALL", 0)
    holder, learned = Holder(torch.zeros(2), torch.ones(2)), {}
    first = step(holder, learned, grow, grow, grow)
    assert common(first[0])["b0"].tolist() == [0, 0]
    assert [own(copies)["b0"].tolist() for copies in first[1:]] == [[1, 1], [2, 2]]
    assert len({id(common(copies)["b1"]) for copies in first}) == 1
    second = step(holder, learned, grow, grow)
    assert [[*own(copies)] for copies in second] == [["b0"], ["b0"]]
    assert own(second[1])["b0"].tolist() == [4, 4]
    assert common(second[0]) == {}


@pytest.mark.parametrize(
    "change", [grow, lambda x: setattr(x, "b0", x.b0 + 1), lambda x: x.b0.data.add_(1)]
)
def test_cells_find_the_value_that_each_first_run_has_found(change):
    holder = Holder(torch.zeros(2))
    original = holder.b0
    copies = step(holder, {}, nothing, change, nothing, change)
    for k, value in enumerate([0, 0, 1, 1]):
        holder.b0 = original
        copies[k].put()
        assert holder.b0.tolist() == [value, value]


@pytest.mark.parametrize("change", [grow, lambda x: setattr(x.b0, "data", x.b0 + 1)])
def test_change_of_a_small_one_that_begins_later(change):
    holder, learned = Holder(torch.zeros(2)), {}
    step(holder, learned, nothing)
    copies = step(holder, learned, nothing, change, change)
    assert learned[holder] == {("b0", True): True}
    for k, value in enumerate([0, 0, 1]):
        copies[k].put()
        assert holder.b0.tolist() == [value, value]


@pytest.mark.parametrize("by", ["layer", "others"])
def test_change_of_a_large_one_that_begins_later(by, monkeypatch):
    monkeypatch.setattr(buffers, "SMALL", 4)
    holder, learned = Holder(torch.zeros(2)), {}
    step(holder, learned, nothing)
    (copies,) = step(holder, learned, grow if by == "layer" else nothing)
    if by == "others":
        grow(holder)
    with pytest.raises(RuntimeError, match="Holder, buffer: b0, bytes: 8, large: more than 4"):
        copies.put()
    assert learned[holder] == {("b0", True): by == "layer"}


def test_nothing_is_put_where_nothing_changes():
    holder, learned = Holder(torch.zeros(2)), {}
    before = holder.b0
    for copies in (*step(holder, learned, nothing), *step(holder, learned, nothing, nothing)):
        copies.put()
        assert holder.b0 is before


def test_training_flag_is_learned_apart(monkeypatch):
    monkeypatch.setattr(buffers, "SMALL", 0)
    holder, learned = Holder(torch.zeros(2)), {}
    step(holder, learned, nothing)
    holder.eval()
    assert "b0" in common(step(holder, learned, nothing)[0])
    assert not common(step(holder.train(), learned, nothing)[0])


def test_failed_run_teaches_nothing():
    holder, learned = Holder(torch.zeros(2)), {}

    def fail(_):
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        step(holder, learned, fail)
    assert not learned


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), torch.full((2,), torch.nan)],
    ids=["meta", "sparse", "NaN"],
)
def test_tensors_that_cannot_be_compared(tensor):
    """PyTorch counts their changes. NaN seems to change always, which costs copies only."""
    holder, learned = Holder(tensor), {}
    step(holder, learned, nothing, lambda holder: holder.b0.mul_(2))
    assert "b0" in own(step(holder, learned, nothing)[0])


def test_layers_get_copies_of_copies():
    holder = Holder(torch.zeros(2))
    (copies,) = step(holder, {holder: {("b0", True): True}}, nothing)
    copies.put()
    holder.b0 += 1
    copies.put()
    assert holder.b0.tolist() == [0, 0]


def test_buffer_in_two_places_stays_one():
    shared = torch.zeros(2)
    holder = Holder(shared, shared)
    for copies in step(holder, {}, grow, grow):
        holder.b0 = holder.b1 = shared
        copies.put()
        assert holder.b0 is holder.b1 is not shared


def test_change_between_two_cells_is_seen_by_the_second():
    """A layer of another partition may share the buffer."""
    found = begin(holder := Holder(torch.zeros(2)), {})
    copies = []
    with found.first_run(copies):
        pass
    holder.b0 += 1
    with found.first_run(copies):
        pass
    assert own(copies[1])["b0"].tolist() == [1, 1]


def test_change_after_the_last_checkpointed_cell_is_learned():
    found = begin(holder := Holder(torch.zeros(2)), learned := {})
    with found.first_run([]):
        pass
    holder.b0 += 1
    found.end_forward()
    assert learned[holder] == {("b0", True): True}


def test_lazy_buffers_count_as_changing():
    """Nobody knows what they hold before the layer that makes them has run."""
    holder, learned = Holder(UninitializedBuffer()), {}
    lazy = holder.b0

    def make(holder):
        holder.b0.materialize((2,))
        holder.b0.zero_()

    (copies,) = step(holder, learned, make)
    copies.put()
    assert holder.b0 is not lazy
    assert holder.b0.tolist() == [0, 0]
    assert "b0" in own(step(holder, learned, nothing)[0])


def test_copies_with_a_gradient_may_be_changed_in_place():
    holder = Holder(torch.zeros(2, requires_grad=True).clone())
    with torch.no_grad():
        (copies,) = step(holder, {holder: {("b0", True): True}}, nothing)
        copies.put()
    holder.b0 += 1
    assert holder.b0.requires_grad


def test_knowledge_keeps_no_layer_alive():
    learned = weakref.WeakKeyDictionary()
    holder = Holder(torch.zeros(2))
    step(holder, learned, nothing)
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    assert alive() is None
    assert not learned


class Counting(TorchDispatchMode):
    """Counter of the operators that move memory."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.cat):
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


# Only beside the CPU a copy takes a launch.
@pytest.mark.parametrize(("device", "calls"), [("meta", {"cat": 3}), ("cpu", {"clone": 40})])
def test_small_buffers_are_copied_together(device, calls):
    norms = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(8)]).to(device)
    state = LayersState(norms, {})
    with Counting() as counting:
        copies = [state.buffers.copied()]
        with state.restored(copies):
            norms(torch.rand(4, 3, device=device))
    # The statistics and the counts, and the statistics again for the recomputation.
    assert counting.calls == calls
    first, second = (own(copies[0])[name] for name in ("running_mean", "running_var"))
    # To change one does not make another one look changed.
    version = second._version
    first.add_(1)
    assert second._version == version
    assert first.is_contiguous()
    assert first.shape == (3,)
    if device == "cpu":
        assert all(torch.equal(norm.running_mean, torch.zeros(3)) for norm in norms)
