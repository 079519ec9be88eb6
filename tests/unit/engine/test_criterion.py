"""A loss function may return a mean, or a sum and its weight."""

from fractions import Fraction

import pytest
import torch

from torchgpipe.engine.criterion import Criterion
from torchgpipe.values.division import Division
from torchgpipe.values.microbatch import Batch


def run(loss, count=2, rows=(3, 1), **options):
    division = Division([*rows[:count]])
    scale, outputs = options.get("scale"), options.get("outputs", False)
    criterion = Criterion(loss, [((), {})] * count, division, scale, outputs)
    for i in range(count):
        x = torch.full((2,), float(i + 1), requires_grad=True)
        criterion.after(i)(Batch(x))
    return criterion


@pytest.mark.parametrize("number", [int, Fraction, torch.tensor])
def test_sum_and_weight(number):
    criterion = run(lambda x: (x.sum(), number(len(x))))
    # Known before the first backward, the weight divides the gradients of the losses.
    assert [criterion.grad(i).item() for i in range(2)] == [0.25, 0.25]
    assert criterion.total() == (1.5, None)


def test_a_weight_that_is_known_too_late():
    criterion = run(lambda x: (x.sum(), len(x)))
    late, criterion.losses[1] = criterion.losses[1], None
    assert criterion.grad(0) == 1
    criterion.losses[1] = late
    assert criterion.grad(1) == 1
    assert criterion.total() == (1.5, 4)


def test_one_element_with_dimensions():
    criterion = run(lambda x: x.mean().reshape(1, 1))
    assert criterion.total()[0].shape == ()
    assert criterion.grad(0).shape == (1, 1)


@pytest.mark.parametrize(
    "loss", [lambda x: x, lambda x: 3.0, lambda x: None, lambda x: x.mean().long()]
)
def test_no_loss(loss):
    with pytest.raises(TypeError, match="a loss function must return the mean") as error:
        run(loss)
    assert "(returned: " in str(error.value)


def test_some_means_and_some_sums():
    def loss(x):
        return x.mean() if x[0] == 1 else (x.sum(), 2)

    with pytest.raises(TypeError, match="a mean for all micro-batches"):
        run(loss).total()


@pytest.mark.parametrize("second", [{}, "text", torch.rand(2), [1, 2]])
def test_what_is_no_weight(second):
    with pytest.raises(TypeError, match="is the weight of the sum"):
        run(lambda x: (x.sum(), second))


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_what_cannot_be_a_weight(weight):
    with pytest.raises(ValueError, match=rf"finite and not negative \(weight: {weight}\); return"):
        run(lambda x: (x.sum(), weight))


def test_sums_that_are_too_large_for_their_dtype():
    criterion = run(lambda x: (x.half().sum() * 0 + 60000, 60000))
    assert criterion.total()[0] == 1


def test_losses_keep_no_more_than_a_number():
    """Kernels such as mse_loss return a number in the memory of all the numbers they added."""

    def spacious(x):
        return torch.as_strided(x * 1, (), (), 1)

    criterion = run(spacious)
    for loss, _ in criterion.losses:
        assert loss.untyped_storage().nbytes() == loss.nbytes
    assert criterion.total()[0] == 1.25


def test_micro_batches_of_the_caller_count_the_same():
    criterion = Criterion(torch.mean, [((), {})] * 4, Division([0] * 4, True), None, False)
    assert criterion.shares == [0.25] * 4
