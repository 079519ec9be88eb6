"""A wrapped model of Transformers does what its users do with the model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.architectures import build, spread
from torchgpipe import MappedGPipe

CPU = torch.device("cpu")


@pytest.fixture
def llama():
    return build("llama")


def wrapped(model, **options):
    return MappedGPipe(model, spread(model, [CPU] * 2), **{"chunks": 2, **options})


def assert_equal_gradients(model, other):
    for own, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def test_labels_that_are_ignored_count_the_same_in_all_micro_batches(llama):
    model, inputs = llama
    plain = copy.deepcopy(model)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][:2, 2:] = -100
    loss = plain(**inputs).loss
    loss.backward()
    count = (inputs["labels"][:, 1:] != -100).sum()
    out = wrapped(model)(**inputs, num_items_in_batch=count)
    torch.testing.assert_close(out.loss.sum(), loss)
    out.loss.sum().backward()
    assert_equal_gradients(model, plain)


def test_all_hidden_states(llama):
    model, inputs = llama
    plain = copy.deepcopy(model)
    for mode in ("never", "always"):
        pipe = wrapped(copy.deepcopy(model), checkpoint=mode)
        out = pipe(**inputs, output_hidden_states=True)
        expected = plain(**inputs, output_hidden_states=True)
        assert len(out.hidden_states) == len(expected.hidden_states) == 4
        for found, wanted in zip(out.hidden_states, expected.hidden_states):
            torch.testing.assert_close(found, wanted)
        out.hidden_states[1].sum().backward()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_distributed_data_parallel(llama, mode, tmp_path):
    model, inputs = llama
    plain = copy.deepcopy(model)
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        replica = DistributedDataParallel(wrapped(model, checkpoint=mode))
        replica(**inputs).loss.mean().backward()
    finally:
        dist.destroy_process_group()
    torch.stack(
        [plain(**{key: x[k : k + 2] for key, x in inputs.items()}).loss for k in (0, 2)]
    ).mean().backward()
    assert_equal_gradients(model, plain)
