"""Memory of a loss in the code of a model: the logits of one micro-batch, and not of all."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from tests.support.helpers import assert_no_races
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe

WORDS, CHUNKS, ROWS = 2000, 8, 2


class Model(nn.Module):
    """A causal model whose logits take more memory than all else."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        logits = self.head(self.body(self.embed(ids)).tanh())
        found = logits.float()[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(found, ids[:, 1:].to(found.device).flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def peak(device, step):
    """The most memory of a device in a step, in micro-batches of logits."""
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    kept = step()
    found = torch.accelerator.max_memory_allocated(device) - before
    del kept
    return found / (ROWS * 16 * WORDS * 4)


def step_of(pipe, ids, steps=1):
    def step():
        for _ in range(steps):
            pipe.zero_grad()
            # Held until backward is over, as most callers do.
            out = pipe(ids)
            out.loss.mean().backward()
        return out

    return step


def test_the_most_memory(devices):
    model = Model()
    ids = torch.randint(WORDS, (CHUNKS * ROWS, 16))
    plain, rows = copy.deepcopy(model).to(devices[0]), ids.to(devices[0]).chunk(CHUNKS)

    def accumulate():
        for x in rows:
            (plain(x).loss / CHUNKS).backward()

    expected = peak(devices[0], accumulate)
    found = {}
    for mode in ("never", "except_last", "always"):
        pipe = MappedGPipe(
            copy.deepcopy(model),
            {"": devices[0], "head": devices[1]},
            chunks=CHUNKS,
            checkpoint=mode,
        )
        # The first step, which knows nothing of the model, and a later one.
        found[mode] = [peak(devices[1], step_of(pipe, ids)) for _ in range(2)]
    assert max(found["always"]) < 1.2 * expected
    # Nobody looks at the logits, so they are not joined, which would double them.
    assert max(found["except_last"]) < 1.1 * CHUNKS + expected
    assert 2 * CHUNKS < min(found["never"]) <= max(found["never"]) < 2.5 * CHUNKS


# Embedding and head are one weight, used on the streams of two visits.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_caller_who_looks(devices):
    """The head computes once more, and nobody else's memory is used."""
    ids = torch.randint(WORDS, (CHUNKS * ROWS, 16))
    results = []
    for mode, output in (("never", None), ("always", None), ("always", 0), ("always", "cpu")):
        torch.manual_seed(0)
        place = devices[output] if isinstance(output, int) else output
        pipe = MappedGPipe(
            Model(tied=True),
            {"": devices[0], "body": devices[1], "head": devices[0]},
            chunks=CHUNKS,
            checkpoint=mode,
            output_device=place,
        )
        with observe(jitter=3) as seen:
            for _ in range(2):
                pipe.zero_grad()
                out = pipe(ids)
                (out.loss.mean() + out.logits[::2].square().mean()).backward()
        assert_no_races(seen)
        assert out.logits.device == torch.device(place or devices[0])
        results.append([out.logits.cpu(), *(x.grad.cpu() for x in pipe.parameters())])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


def test_a_loss_on_a_stream_of_the_callers_own(devices):
    ids = torch.randint(WORDS, (CHUNKS * ROWS, 16))
    pipe = MappedGPipe(
        Model(), {"": devices[0], "head": devices[1]}, chunks=CHUNKS, checkpoint="always"
    )
    with observe(jitter=5) as seen:
        out = pipe(ids)
        stream = torch.Stream(devices[1])
        stream.wait_stream(torch.accelerator.current_stream(devices[1]))
        with stream:
            score = out.logits.argmax(-1).sum()
        torch.accelerator.current_stream(devices[1]).wait_stream(stream)
        (out.loss.mean() + score * 0).backward()
    assert_no_races(seen)


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_nothing_is_left(devices, mode, head):
    """Nothing refers to itself, so memory is free at once, where the model came back, too."""
    ids = torch.randint(WORDS, (CHUNKS * ROWS, 16))
    pipe = MappedGPipe(
        Model(),
        {"": devices[0], "body": devices[1], "head": devices[head]},
        chunks=CHUNKS,
        checkpoint=mode,
    )
    step_of(pipe, ids)()
    pipe.zero_grad()
    gc.collect()
    gc.disable()
    try:
        before = [*map(torch.accelerator.memory_allocated, devices)]
        for looks in (False, True):
            out = pipe(ids)
            if looks:
                assert out.logits.numel()
            del out
            assert [*map(torch.accelerator.memory_allocated, devices)] == before
    finally:
        gc.enable()
