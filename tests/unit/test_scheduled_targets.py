"""The parts of a scheduled loss: its function, targets, weights of others, and buffers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.helpers import notes_of
from tests.unit.test_scheduled import X, Y, layers, make, same
from torchgpipe import Chunks, GPipe, NoChunk, ScheduledLoss
from torchgpipe.schedule import one_f_one_b


def test_arguments_of_the_loss():
    seen = []

    def loss(output, first, *, second, name):
        seen.append((len(first), second.shape, name))
        return F.mse_loss(output, first)

    training = make(loss, chunks=4)
    training(X, Y, second=NoChunk(torch.rand(9)), name="a").backward()
    assert seen == [(2, (9,), "a"), (2, (9,), "a"), (1, (9,), "a"), (1, (9,), "a")]


def using(outside):
    """A training whose first layer uses a weight of another module."""

    class Uses(nn.Linear):
        def forward(self, x):
            return super().forward(x) * outside

    return make(module=nn.Sequential(Uses(3, 3), nn.Tanh(), nn.Linear(3, 3)))


def test_weight_of_another_module():
    outside = nn.Parameter(torch.rand(3))
    training = using(outside)
    training(X, Y).backward()
    grad, outside.grad = outside.grad, None
    F.mse_loss(training.model.module(X), Y).backward()
    torch.testing.assert_close(grad, outside.grad)


def test_weight_of_another_module_in_cells_that_overlap():
    """Both cells of the first overlap meet it."""
    embedding = nn.Embedding(7, 4)
    module = nn.Sequential(embedding, nn.Linear(4, 4))
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=4)

    def loss(output, target):
        return F.cross_entropy(output @ embedding.weight.t(), target)

    x, y = torch.randint(7, (2, 8))
    ScheduledLoss(model, loss, one_f_one_b(2, 2).pair())(x, y).backward()
    (expected,) = torch.autograd.grad(loss(module(x), y), embedding.weight)
    torch.testing.assert_close(embedding.weight.grad, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_weight_of_another_module_that_some_micro_batches_use(schedule):
    outside = nn.Parameter(torch.rand(3))

    class Sometimes(nn.Linear):
        runs = 0

        def forward(self, x):
            self.runs += 1
            y = super().forward(x)
            return y * outside if self.runs % 3 == 2 else y

    layer = Sometimes(3, 3)
    training = make(schedule=schedule, module=nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3)))
    training(X, Y).backward()
    grad, outside.grad = outside.grad, None
    module = training.model.module
    sum(F.mse_loss(module(x), y) / 3 for x, y in zip(X.chunk(3), Y.chunk(3))).backward()
    torch.testing.assert_close(grad, outside.grad)


def test_hook_of_a_weight_of_another_module():
    outside = nn.Parameter(torch.rand(3))
    calls = []
    outside.register_hook(calls.append)
    using(outside)(X, Y).backward()
    assert len(calls) == 1


def test_head_in_the_loss():
    """A model that is frozen, and a function that uses weights of another module."""
    head = nn.Linear(3, 3)
    training = make(
        lambda output, target: F.mse_loss(head(output), target),
        module=layers().requires_grad_(False),
    )
    training(X, Y).backward()
    grad, head.weight.grad = head.weight.grad, None
    F.mse_loss(head(layers()(X)), Y).backward()
    torch.testing.assert_close(grad, head.weight.grad)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_buffers_of_the_loss(checkpoint):
    """A loss that changes its buffers does so once for each micro-batch, and sees its values."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.ones(()))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, output, target):
            loss = F.mse_loss(self.norm(output).tanh() * self.count, target)
            self.count = self.count + 1
            return loss

    torch.manual_seed(1)
    loss = Counted()
    other = copy.deepcopy(loss)
    training = make(loss, schedule="fill_drain", checkpoint=checkpoint)
    training(X, Y).backward()
    module = layers()
    sum(other(module(x), y) / 3 for x, y in zip(X.chunk(3), Y.chunk(3))).backward()
    assert loss.count == other.count == 4
    assert loss.norm.num_batches_tracked == 3
    same(training, [x.grad for x in module.parameters()])
    torch.testing.assert_close(loss.norm.weight.grad, other.norm.weight.grad)


def test_auxiliary_loss_that_a_layer_keeps():
    """Stages before the layer have run their backward, so its gradient would be lost."""

    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = x.square().mean()
            return super().forward(x)

    training = make(module=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Keeps(3, 3)))
    loss = training(X, Y) + training.model[2].kept
    with pytest.raises(RuntimeError, match="a gradient must come by the loss"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:GPipe leaves devices idle")
def test_one_micro_batch_gets_all_of_its_targets():
    seen = []

    def loss(output, target, whole, table):
        seen.append([len(x) for x in (target, whole, table)])
        return F.mse_loss(output, target)

    make(loss, chunks=1)(X, Y, NoChunk(torch.rand(4)), torch.rand(9, 3))
    assert seen == [[6, 4, 9]]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (list(range(6)), "targets[0]"),
        ({"a": [[1.0]] * 6}, "targets[0]['a']"),
        ((Y, [*"abcdef"]), "targets[0][1]"),
    ],
)
def test_targets_that_are_no_tensors(target, path):
    def loss(output, target):
        return output.mean()

    with pytest.raises(ValueError, match="targets must be tensors") as caught:
        make(loss)(X, target)
    assert f"each row: {path}, rows: 6)" in str(caught.value)
    make(loss)(X, NoChunk(target)).backward()


def test_lists_of_targets_where_the_caller_has_divided_the_input():
    """The first target says how many rows there are, and so which lists have an entry for each."""
    seen = []

    def loss(output, target, boxes):
        seen.append([len(target), [len(x) for x in boxes]])
        return output.mean()

    boxes = [torch.rand(k + 1) for k in range(6)]
    make(loss, schedule="fill_drain")(Chunks(X.split(2)), Y, boxes)
    assert seen == [[2, [1, 2]], [2, [3, 4]], [2, [5, 6]]]


def test_gradient_of_the_target():
    training = make()
    target = Y.clone().requires_grad_()
    with pytest.raises(ValueError, match="targets must not require a gradient"):
        training(X, target)


def test_targets_with_other_rows():
    with pytest.raises(ValueError, match="targets must have as many rows") as error:
        make()(X, Y[:5])
    assert "shape: (5, 3), rows: 6" in str(error.value)


@pytest.mark.parametrize(
    ("targets", "more", "name"),
    [
        ((Y[:-1],), {}, "targets[0]"),
        ((Y, Y[:-1]), {}, "targets[1]"),
        (((Y, {"mask": Y[:-1]}),), {}, "targets[0][1]['mask']"),
        ((), {"target": Y[:-1]}, "target"),
    ],
)
def test_the_argument_with_other_rows_is_named(targets, more, name):
    with pytest.raises(ValueError, match="targets must have as many rows") as caught:
        make()(X, *targets, **more)
    assert f"(argument: {name}, shape" in str(caught.value)


class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x * mask)


def test_arguments_of_the_model_that_went_to_the_loss():
    training = make(module=nn.Sequential(Masked(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    with pytest.raises(TypeError, match="missing 1 required positional") as caught:
        training(X, torch.ones_like(X), Y)
    assert "torchgpipe.arguments(...)" in notes_of(caught.value)[-1]


def test_no_hint_if_there_are_no_targets():
    training = make(module=nn.Sequential(Masked(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    with pytest.raises(TypeError, match="missing 1 required positional") as caught:
        training(X)
    assert "torchgpipe.arguments(...)" not in "".join(notes_of(caught.value))
