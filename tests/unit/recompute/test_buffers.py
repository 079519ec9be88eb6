"""The knowledge about buffers that lasts from step to step, and the copies of each first run."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer

from torchgpipe.recompute.buffers import Buffers, put


class Holder(nn.Module):
    def __init__(self, *tensors):
        super().__init__()
        for k, tensor in enumerate(tensors):
            self.register_buffer(f"b{k}", tensor)


def step(holder, learned, *changes):
    """Run a step of a cell for each change, and return the copies that each cell has made."""
    buffers = Buffers([(holder, name) for name in holder._buffers], learned)
    made = []
    for change in changes:
        made.append([])
        if buffers.any:
            with buffers.first_run(made[-1]):
                change(holder)
        else:
            change(holder)
    buffers.settle()
    return [{name: tensor for (_, name), tensor in copies} for copies in made]


def nothing(_):
    pass


def test_first_step_copies_all_once_and_later_ones_what_changes():
    holder, learned = Holder(torch.zeros(2), torch.ones(2)), {}

    def grow(holder):
        holder.b0 += 1

    first = step(holder, learned, grow, grow, grow)
    assert [copies["b0"].tolist() for copies in first] == [[0, 0], [1, 1], [2, 2]]
    assert len({id(copies["b1"]) for copies in first}) == 1
    second = step(holder, learned, grow, grow)
    assert [[*copies] for copies in second] == [["b0"], ["b0"]]
    assert second[1]["b0"].tolist() == [4, 4]


def test_nothing_is_copied_where_nothing_changes():
    holder, learned = Holder(torch.zeros(2)), {}
    step(holder, learned, nothing)
    assert step(holder, learned, nothing, nothing) == [{}, {}]


def test_training_flag_is_learned_apart():
    holder, learned = Holder(torch.zeros(2)), {}
    step(holder, learned, nothing)
    holder.eval()
    assert "b0" in step(holder, learned, nothing)[0]
    assert step(holder.train(), learned, nothing) == [{}]


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
    assert "b0" in step(holder, learned, nothing)[0]


def test_layers_get_copies_of_copies():
    holder = Holder(torch.zeros(2))
    copies = []
    with Buffers([(holder, "b0")], {}).first_run(copies):
        pass
    put(copies)
    holder.b0 += 1
    put(copies)
    assert holder.b0.tolist() == [0, 0]


def test_buffer_in_two_places_stays_one():
    shared = torch.zeros(2)
    holder = Holder(shared, shared)
    copies = []
    with Buffers([(holder, "b0"), (holder, "b1")], {}).first_run(copies):
        pass
    put(copies)
    assert holder.b0 is holder.b1 is not shared


def test_change_between_two_cells_is_seen_by_the_second():
    """A layer of another partition may share the buffer."""
    buffers = Buffers([(holder := Holder(torch.zeros(2)), "b0")], {})
    with buffers.first_run([]):
        pass
    holder.b0 += 1
    copies = []
    with buffers.first_run(copies):
        pass
    assert [tensor.tolist() for _, tensor in copies] == [[1, 1]]


def test_change_after_the_last_checkpointed_cell_is_learned():
    learned, holder = {}, Holder(torch.zeros(2))
    buffers = Buffers([(holder, "b0")], learned)
    with buffers.first_run([]):
        pass
    holder.b0 += 1
    buffers.settle()
    assert learned[holder] == {("b0", True): True}


def test_lazy_buffers_count_as_changing():
    """Nobody knows what they hold before the layer that makes them has run."""
    holder, learned = Holder(UninitializedBuffer()), {}

    def make(holder):
        holder.b0.materialize((2,))
        holder.b0.zero_()

    (copies,) = step(holder, learned, make)
    assert copies["b0"] is holder.b0
    put([((holder, "b0"), copies["b0"])])
    assert holder.b0 is not copies["b0"]
    assert "b0" in step(holder, learned, nothing)[0]


def test_copies_with_a_gradient_may_be_changed_in_place():
    holder = Holder(torch.zeros(2, requires_grad=True).clone())
    copies = []
    with torch.no_grad(), Buffers([(holder, "b0")], {}).first_run(copies):
        put(copies)
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
