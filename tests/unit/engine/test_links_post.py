"""The post: what a stage sends waits for the stages that receive it."""

import torch
from torch import nn

from torchgpipe.devices.streams import CPU
from torchgpipe.engine.links import Links, Post
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step import Step
from torchgpipe.engine.step_plan import plan
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.values.microbatch import VALUE, Batch, PackedSkip
from torchgpipe.values.structure import flatten


@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("a", x)
        return x


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("a"))


def made(batches):
    """The post of three stages, the key of a skip from the first to the last, and the batches."""
    stages = Stages([nn.Sequential(x) for x in (Stash(), nn.Identity(), Pop())], [CPU] * 3)
    chosen = plan("1f1b", [CPU] * 3, len(batches), ("never",) * 3, [(0, 2)], forward=False)
    step = Step(stages, len(batches), (), joined=False)
    (skip,) = stages.skip_layout.stashed[0]
    links = Links(chosen, stages, ())
    return Post(step, links, batches), skip


def test_values_and_skips():
    inputs = [torch.rand(2), torch.rand(2)]
    batches = [*map(Batch, inputs)]
    post, skip = made(batches)
    # The micro-batches are free when they are computed.
    assert batches == []
    assert [post.receive(0, i)[0] for i in (0, 1)] == inputs
    value, other = torch.rand(2, 2, requires_grad=True).exp()
    post.send(0, 1, Batch(value).with_skips({skip: PackedSkip(*flatten(other))}))
    (found,) = post.receive(1, 1)
    assert torch.equal(found, value)
    assert found.requires_grad
    assert found.is_leaf
    post.send(1, 1, Batch(found + 1))
    last = post.receive(2, 1)
    assert last.parts.keys() == {VALUE, skip}
    assert torch.equal(last.parts[skip][0], other)
    assert last.parts[skip][0].requires_grad
    assert not post.values


def test_gradients_go_where_parts_came_from():
    post, skip = made([Batch(torch.rand(2))])
    one, two, three = torch.rand(3, 2)
    post.send_grads(2, 0, {VALUE: [one], skip: [None]})
    post.send_grads(1, 0, {VALUE: [two]})
    post.send_grads(0, 0, {VALUE: [three]})
    assert post.receive_grads(1, 0) == {VALUE: (one,)}
    assert post.receive_grads(0, 0) == {skip: (None,), VALUE: (two,)}
    assert post.receive_grads(-1, 0) == {VALUE: (three,)}
    assert post.receive_grads(-1, 0) == {}
