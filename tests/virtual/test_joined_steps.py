"""The mini-batches of an optimizer step of a Trainer go through the pipeline as one."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.examples import MISSING
from tests.support.architectures import GROUPED, spread
from tests.support.helpers import assert_no_races
from tests.unit.transformers.test_trainer import made, rows
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe.transformers import pipelined  # noqa: E402


class WithOwnLoss(transformers.Trainer):
    """A loss of its own, whose value is read."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        output = model(**inputs)
        logits = output.logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss = loss / num_items_in_batch
        self.seen = getattr(self, "seen", 0) + loss.item()
        return (loss, output) if return_outputs else loss


class WithState(WithOwnLoss):
    """Code in front of the call that keeps something on the Trainer."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.inputs = inputs
        found = super().compute_loss(model, inputs, *args, **kwargs)
        assert self.inputs is inputs
        return found


def busiest(seen):
    """The time that the busiest device computes."""
    times = {}
    for stream, time in seen.busy.items():
        times[stream.device] = times.get(stream.device, 0) + time
    return max(times.values())


def model_and_places(devices):
    """A decoder with two blocks for each device; the head is on the last one."""
    config = transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 2 * len(devices)})
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return model, {**spread(model, devices), "lm_head": devices[-1], "model.norm": devices[-1]}


@pytest.mark.parametrize(
    ("trainer", "batch", "accumulation", "most"),
    [
        (transformers.Trainer, 8, 1, 1.4),
        (transformers.Trainer, 1, 8, 1.4),
        (transformers.Trainer, 2, 4, 1.4),
        (WithOwnLoss, 1, 8, 1.4),
        (WithState, 1, 8, 2.6),
    ],
)
def test_makespan_and_weights(trainer, batch, accumulation, most, devices, tmp_path):
    model, places = model_and_places(devices[:4])
    plain = copy.deepcopy(model)
    pipe = MappedGPipe(model, places, chunks=8, checkpoint="never")
    options = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1,
        "lr_scheduler_type": "constant",
    }
    steps = []
    # Before the first step otherwise, which is measured here.
    pipe.verify({"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)})
    for kind, one, on_cpu in ((trainer, plain, True), (pipelined(trainer), pipe, False)):
        own = made(kind, one, tmp_path, rows(8), use_cpu=on_cpu, **options)
        with observe(costs={"mm": 1.0, "addmm": 1.0, "bmm": 0.0}) as seen:
            own.train()
        steps.append([(x["loss"], x["grad_norm"]) for x in own.state.log_history if "loss" in x])
    assert_no_races(seen)
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-4, atol=1e-5)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert seen.makespan / busiest(seen) < most


def test_peak_memory_of_kept_inputs(devices, tmp_path):
    """Joined mini-batches take little more, where cells keep their inputs alone."""
    model, places = model_and_places(devices[:2])
    peaks = {}
    for most in (1, None):
        pipe = MappedGPipe(copy.deepcopy(model), places, chunks=8, checkpoint="always")
        own = made(
            pipelined(transformers.Trainer),
            pipe,
            tmp_path,
            rows(8),
            use_cpu=False,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            max_steps=1,
            given={"joined": most},
        )
        torch.accelerator.reset_peak_memory_stats(devices[1])
        own.train()
        peaks[most] = torch.accelerator.max_memory_allocated(devices[1])
        del own, pipe
    assert peaks[None] < 1.2 * peaks[1]
