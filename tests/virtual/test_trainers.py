"""Models and trainers of others, where partitions are on devices of their own."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.examples import MISSING
from tests.support.helpers import assert_no_races
from tests.support.size import soak, some
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time
from torchgpipe.testing import observe


@pytest.fixture
def decoder():
    pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=MISSING)
    from examples.language_model import language_model

    return language_model(vocab_size=32, hidden_size=16, intermediate_size=24).double()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoder_with_a_tied_head(decoder, attention, checkpoint, devices):
    from examples.language_model import loss_of, sequential

    decoder.set_attn_implementation(attention)
    plain = copy.deepcopy(decoder)
    layers = sequential(decoder)
    places = [devices[0], devices[1], devices[2], devices[0]]
    model = GPipe(layers, [1, 2, 2, 1], devices=places, chunks=3, checkpoint=checkpoint)
    ids = torch.randint(1, 32, (7, 9))
    mask = (torch.arange(9) < torch.tensor([9, 9, 9, 7, 2, 1, 5])[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    with observe() as seen:
        output = model(ids.to(devices[0]), mask.to(devices[0]))
        assert output.device == devices[0]
        loss_of(output, labels).backward()
    assert_no_races(seen)
    expected = plain(ids, mask).logits
    loss_of(expected, labels).backward()
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(output.cpu(), expected, **close)
    found = {name: p.grad.cpu() for name, p in decoder.named_parameters()}
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(found, wanted, **close)


def stack():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))


def places_of(model):
    return [p.device for p in model.parameters()]


def test_accelerate(devices, tmp_path):
    accelerate = pytest.importorskip("accelerate", exc_type=MISSING)
    accelerator = accelerate.Accelerator(cpu=True)

    def prepared(balance):
        model = GPipe(stack(), balance, devices=devices[: len(balance)], chunks=2)
        before = places_of(model)
        model, optimizer = accelerate.Accelerator(cpu=True).prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.1)
        )
        assert places_of(model) == before
        return model, optimizer

    x, y = torch.randn(6, 8), torch.arange(6) % 2
    plain = stack()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model, optimizer = prepared([2, 1, 1])
    for step in range(4):
        if step == 2:
            accelerator._models, accelerator._optimizers = [model], [optimizer]
            accelerator.save_state(tmp_path)
            model, optimizer = prepared([2, 1, 1])
            accelerator._models, accelerator._optimizers = [model], [optimizer]
            accelerator.load_state(tmp_path)
        output = model(x.to(devices[0]))
        loss = F.cross_entropy(output, y.to(output.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(x), y)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(loss.cpu(), expected)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize(
    "remedy", some(["none", "no end", "no state", "all", "deep"], ["none", "no state", "deep"])
)
def test_lightning(remedy, devices, tmp_path):
    pytest.importorskip("lightning.pytorch", exc_type=MISSING)
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torchmetrics import MeanMetric

    from examples.ball import loader, plainly
    from examples.with_lightning import Classifier, PipelineStrategy

    class Virtual(CPUAccelerator):
        def setup_device(self, device):
            pass

    class Strategy(PipelineStrategy):
        """The example's strategy, with one of its remedies left out."""

        if remedy == "no state":
            load_optimizer_state_dict = SingleDeviceStrategy.load_optimizer_state_dict
        if remedy == "no end":
            teardown = SingleDeviceStrategy.teardown

    strategy = SingleDeviceStrategy if remedy == "none" else Strategy

    def fit(epochs, path=None):
        model = GPipe(stack(), [2, 1, 1], devices=devices[:3], chunks=2)
        before = places_of(model)
        module = Classifier(nn.Sequential(OrderedDict(pipe=model)) if remedy == "deep" else model)
        module.other = nn.Linear(1, 1)
        module.own = nn.Parameter(torch.zeros(1))
        module.register_buffer("count", torch.zeros(1))
        module.metric = MeanMetric()  # Its _apply() takes no recurse.
        trainer = Trainer(
            strategy=strategy(device=devices[0]),
            accelerator=Virtual(),
            devices=1,
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, loader(128), ckpt_path=path)
        assert places_of(model) == before
        others = [module.other.weight, module.own, module.count, module.metric.mean_value]
        assert {module.device, *(x.device for x in others)} == {devices[0]}
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        return module.losses

    if remedy in ("none", "no end"):
        with pytest.raises(TypeError, match="cannot be moved"):
            fit(1)
        return
    losses = fit(1)
    if remedy == "no state":
        with pytest.raises(RuntimeError, match="device"):
            fit(2, tmp_path / "saved.ckpt")
        return
    losses += fit(2, tmp_path / "saved.ckpt")
    assert losses == pytest.approx(plainly(stack(), 2, 2, 128), rel=1e-5)


@soak
def test_transformers(devices, monkeypatch, capsys):
    """The example runs; data and the plain model are on the first device."""
    pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=MISSING)
    accelerate = pytest.importorskip("accelerate", exc_type=MISSING)
    from transformers import TrainingArguments

    from examples import with_transformers

    def balance(*arguments, **options):
        with observe(costs={"mm": 1.0}):
            return balance_by_time(*arguments, **options)

    monkeypatch.setattr("examples.language_model.balance_by_time", balance)
    first = property(lambda arguments: arguments._setup_devices and devices[0])
    monkeypatch.setattr(TrainingArguments, "device", first)
    monkeypatch.setattr(accelerate.Accelerator, "device", devices[0])
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    # Or the plain model's head would not share its weight any more, once it is moved.
    swaps = "torch.nn.modules.module.torch.__future__.get_swap_module_params_on_conversion"
    monkeypatch.setattr(swaps, lambda: True)
    status = with_transformers.main(["--epochs", "2", "--rows", "16"])
    printed = capsys.readouterr().out
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert status == 0, printed
    assert str([str(devices[k]) for k in (0, 2, 5, 0)]) in printed
