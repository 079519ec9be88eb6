"""The loss of a mini-batch, for models of both kinds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.transformers.counting import counts_of, shares_of, told, whole

LABELS = torch.tensor([[7, 1, 2], [7, -100, -100], [-100, 5, 6], [7, -100, 3]])


@pytest.mark.parametrize(
    ("labels", "shifted", "expected"),
    [
        ([LABELS], False, [4.0, 4.0]),
        ([LABELS], True, [2.0, 3.0]),
        ([LABELS[:, 0]], True, [2.0, 1.0]),
        ([LABELS[:, 0], LABELS[:, 2]], False, [3.0, 3.0]),
        ([torch.rand(4, 3)], False, [6.0, 6.0]),
        ([LABELS > 3], False, [2.0, 3.0]),
        ([], False, [2.0, 2.0]),
    ],
)
def test_labels_that_count(labels, shifted, expected):
    assert counts_of(labels, [2, 2], shifted).tolist() == expected


counted = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(counted, st.integers(1, 40), st.booleans(), st.integers(0, 9))
def test_the_loss_is_that_of_the_mini_batch(counts, others, takes_count, seed):
    generator = torch.Generator().manual_seed(seed)
    each = [torch.rand(n, generator=generator, requires_grad=True) for n in counts]
    items = sum(counts) + others
    found = torch.tensor(counts, dtype=torch.float32)
    numbers = told(found, torch.tensor(items))
    # A model divides by what it is told, or takes the mean, which is no number without labels.
    losses = [x.sum() / n if takes_count else x.mean() for x, n in zip(each, numbers)]
    loss = whole(torch.stack(losses), shares_of(found))
    count = items if takes_count else max(1, sum(counts))
    torch.testing.assert_close(loss, torch.cat(each).sum() / count)
    loss.backward()
    for x in each:
        torch.testing.assert_close(x.grad, torch.full_like(x, 1 / count))


def test_what_a_model_adds_becomes_a_mean():
    counts = torch.tensor([3.0, 1.0])
    auxiliary = torch.tensor([2.0, 6.0])
    torch.testing.assert_close(whole(auxiliary, shares_of(counts)), torch.tensor(3.0))
