"""Accelerate's loop trains a wrapped model as a plain loop does, and leaves it on its devices."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.examples import MISSING
from torchgpipe import MappedGPipe

CPU = torch.device("cpu")
ROWS, CHUNKS = 8, 2
TOKENS = torch.randint(16, (2 * ROWS, 5), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """An embedding, blocks, and a head that is tied to the embedding."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        logits = self.head(x)
        labels = tokens.to(logits.device)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def wrapped(devices, seed=0):
    names = {f"blocks.{k}": device for k, device in enumerate(devices)}
    names = {"embed": devices[0], **names, "head": devices[0]}
    return MappedGPipe(Model(seed), names, chunks=CHUNKS)


def test_the_map_of_accelerate_takes_a_mode_for_each_entry(accelerate):
    names = {"embed": "cpu", "blocks": "cpu", "head": "cpu"}
    model = accelerate.dispatch_model(Model(), names, main_device="cpu", force_hooks=True)
    pipe = MappedGPipe(model, chunks=CHUNKS, checkpoint=["never", "always", "offload"])
    assert pipe.checkpoint == ["never", "always", "offload"]
    pipe(TOKENS)["loss"].mean().backward()
    with pytest.raises(ValueError, match=r"one for each .*partitions: 3"):
        MappedGPipe(Model(), names, checkpoint=["never", "always"])


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.fixture
def accelerate():
    found = pytest.importorskip("accelerate", exc_type=MISSING)
    # The first Accelerator of a process sets the precision.
    found.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield found
    found.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepared(accelerate, pipe, **options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    loader = torch.utils.data.DataLoader(TOKENS, batch_size=ROWS)
    places = [x.device for x in pipe.parameters()]
    found, optimizer, loader = accelerator.prepare(pipe, optimizer_of(pipe), loader)
    assert found is pipe
    assert [x.device for x in pipe.parameters()] == places
    assert accelerator.unwrap_model(pipe) is pipe
    return accelerator, optimizer, loader


def epoch(pipe, accelerator, optimizer, loader):
    """Train for an epoch; the losses and the norms of the gradients."""
    found = []
    for tokens in loader:
        with accelerator.accumulate(pipe):
            loss = pipe(tokens)["loss"].mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(pipe.parameters(), 0.1)
                found.append((loss.item(), norm.item()))
            optimizer.step()
            optimizer.zero_grad()
    return found


def plainly(epochs, accumulate=1, cast=False):
    """The same in a plain loop, without Accelerate."""
    model = Model()
    optimizer, found = optimizer_of(model), []
    for _ in range(epochs):
        for k, tokens in enumerate(TOKENS.split(ROWS)):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                losses = [model(rows)["loss"] for rows in tokens.chunk(CHUNKS)]
            loss = torch.stack(losses).mean()
            (loss / accumulate).backward()
            if (k + 1) % accumulate == 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                found.append((loss.item(), norm.item()))
                optimizer.step()
                optimizer.zero_grad()
    return found, model.state_dict()


def same(found, pipe, expected):
    numbers, state = expected
    torch.testing.assert_close(torch.tensor(found), torch.tensor(numbers))
    assert pipe.state_dict().keys() == state.keys()
    for name, x in pipe.state_dict().items():
        torch.testing.assert_close(x.cpu(), state[name])


def train(accelerate, devices, accumulate=1, precision="no"):
    pipe = wrapped(devices)
    options = {"gradient_accumulation_steps": accumulate, "mixed_precision": precision}
    run = prepared(accelerate, pipe, **options)
    found = epoch(pipe, *run) + epoch(pipe, *run)
    same(found, pipe, plainly(2, accumulate, precision == "bf16"))


def resume(accelerate, devices, folder):
    """Train for an epoch, save all, and have another process train for the next one."""
    pipe = wrapped(devices)
    accelerator, *run = prepared(accelerate, pipe)
    found = epoch(pipe, accelerator, *run)
    accelerator.save_state(folder)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    again = wrapped(devices, seed=1)
    assert not torch.equal(again.embed.weight, pipe.embed.weight)
    accelerator, *run = prepared(accelerate, again)
    accelerator.load_state(folder)
    assert again.head.weight is again.embed.weight
    found += epoch(again, accelerator, *run)
    same(found, again, plainly(2))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_training(accelerate, options):
    train(accelerate, [CPU] * 3, **options)


def test_state(accelerate, tmp_path):
    resume(accelerate, [CPU] * 3, tmp_path)


def test_a_model_that_is_saved_is_the_model_alone(accelerate, tmp_path):
    pipe = wrapped([CPU] * 3)
    accelerator, *_ = prepared(accelerate, pipe)
    accelerator.save_model(pipe, tmp_path)
    model = Model(seed=1)
    accelerate.load_checkpoint_in_model(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), pipe.state_dict())
    assert accelerator.get_state_dict(pipe).keys() == model.state_dict().keys()
