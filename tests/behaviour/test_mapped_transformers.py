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


def test_generate(llama):
    model, inputs = llama
    plain = copy.deepcopy(model).eval()
    pipe = wrapped(model).eval()
    prompt = inputs["input_ids"][:, :3]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    found = pipe.module.generate(prompt, **options)
    assert found.tolist() == plain.generate(prompt, **options).tolist()


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


def test_trainer(llama, tmp_path):
    from transformers import Trainer, TrainingArguments

    model, inputs = llama
    plain = copy.deepcopy(model)
    data = [{key: x[k] for key, x in inputs.items()} for k in range(4)] * 2
    trained = []
    for each in (plain, wrapped(model)):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=2,
            learning_rate=0.1,
            optim="sgd",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )

        class Own(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, **more):
                loss = model(**inputs).loss.mean()
                return (loss, None) if return_outputs else loss

            def get_train_dataloader(self):
                return torch.utils.data.DataLoader(data, batch_size=4)

        Own(model=each, args=arguments, train_dataset=data).train()
        trained.append([x.detach().clone() for x in each.parameters()])
    for own, expected in zip(*trained, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)
