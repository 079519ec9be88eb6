"""Train a model under GPipe with Lightning's Trainer, beside a plain loop.

Lightning moves a module to one device. It moves the optimizer's state there when it loads that, and
everything to the CPU at the end. The strategy below leaves a GPipe and the state of its optimizer
where they are. The Trainer knows of one device, the first one, and the GPipe uses any number.

    pip install lightning
    python -m examples.with_lightning
    python -m examples.with_lightning --precision bf16-mixed --accumulate 4
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F

from examples.ball import compare, layers, loader, plainly
from examples.options import at_least
from examples.places import places
from torchgpipe import GPipe

PARTITIONS = 4


class PipelineStrategy(SingleDeviceStrategy):
    """Leave each GPipe, and the state of its optimizer, on the devices of its partitions."""

    def model_to_device(self) -> None:
        assert self.model is not None
        pipes = [x for x in self.model.modules() if isinstance(x, GPipe)]
        inside = {x for pipe in pipes for x in pipe.modules()}
        for module in self.model.modules():
            if inside.isdisjoint(module.modules()):
                module.to(self.root_device)
            elif module not in inside:  # It holds a GPipe, and may have its own tensors.
                module._apply(lambda tensor: tensor.to(self.root_device), recurse=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)  # To the devices of the parameters.

    def teardown(self) -> None:
        assert self.accelerator is not None
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()  # Lightning would move the model to the CPU.


class Classifier(LightningModule):
    """The module that Lightning trains; its model is a GPipe."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch  # On the Trainer's device, where the first partition is.
        output = self.model(x)
        loss = F.cross_entropy(output, y.to(output.device))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=24, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    module: nn.Sequential, options: argparse.Namespace, epochs: int, folder: Path, path: Path | None
) -> Classifier:
    """Train under GPipe up to some epoch, from a checkpoint on if there is one."""
    devices = places(PARTITIONS)
    model = GPipe(module, [2] * PARTITIONS, devices=devices, chunks=options.chunks)
    classifier = Classifier(model)
    trainer = Trainer(
        strategy=PipelineStrategy(device=devices[0]),
        accelerator="cpu" if devices[0].type == "cpu" else "gpu",
        devices=1,
        max_epochs=epochs,
        precision=options.precision,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=0.1,
        callbacks=[ModelCheckpoint(folder, filename="last")],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, loader(), ckpt_path=path)
    return classifier


def main(arguments: list[str] | None = None) -> int:
    """Train with Lightning, and reload halfway; return 0 if losses are as in a plain loop."""
    parser = argparse.ArgumentParser(description="Train a GPipe with Lightning.")
    parser.add_argument("--epochs", type=at_least(2), default=10)
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--accumulate", type=at_least(1), default=2, help="mini-batches for a step")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(0)
    module = layers()
    fresh, plain = copy.deepcopy(module), copy.deepcopy(module)

    half, epochs = options.epochs // 2, options.epochs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = fit(module, options, half, folder, None)
        # As in a new process: another model, and the checkpoint of the first.
        second = fit(fresh, options, epochs, folder, folder / "last.ckpt")

    print(f"partitions on {[*map(str, places(PARTITIONS))]}")
    bound = 1e-3 if options.precision == "32-true" else 0.1
    expected = plainly(plain, epochs, options.accumulate)
    return compare("Lightning", first.losses + second.losses, expected, bound)


if __name__ == "__main__":
    sys.exit(main())
