"""Train a model under GPipe with Accelerate, beside a plain loop.

Accelerator.prepare() would move a model to one device, but leaves a GPipe where it is, since
hf_device_map says that the layers are on their devices. All else is as with any model: mixed
precision, accumulated gradients, clipping, a schedule, and a state that is saved and loaded.

    pip install accelerate
    python -m examples.with_accelerate
    python -m examples.with_accelerate --precision bf16 --accumulate 4
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from examples.ball import compare, layers, loader, plainly
from examples.options import at_least
from examples.places import places
from torchgpipe import GPipe

PARTITIONS = 4


class Run:
    """A GPipe with its optimizer, data and schedule, all prepared by Accelerate."""

    def __init__(self, module: nn.Sequential, options: argparse.Namespace) -> None:
        self.accelerator = Accelerator(
            mixed_precision=options.precision,
            gradient_accumulation_steps=options.accumulate,
            cpu=not torch.accelerator.is_available(),
        )
        model = GPipe(module, [2] * PARTITIONS, devices=places(PARTITIONS), chunks=options.chunks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = loader()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=24, gamma=0.5)
        self.model, self.optimizer, self.data, self.schedule = self.accelerator.prepare(
            model, optimizer, data, schedule
        )

    def epoch(self) -> list[float]:
        """Train for an epoch; return the loss of each step."""
        losses = []
        for x, y in self.data:
            with self.accelerator.accumulate(self.model):
                # The data is on accelerator.device: the first accelerator, as the first partition.
                output = self.model(x)
                loss = F.cross_entropy(output, y.to(output.device))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.gather_for_metrics(loss.detach()).item())
        return losses


def main(arguments: list[str] | None = None) -> int:
    """Train with Accelerate, and reload halfway; return 0 if losses are as in a plain loop."""
    parser = argparse.ArgumentParser(description="Train a GPipe with Accelerate.")
    parser.add_argument("--epochs", type=at_least(2), default=10)
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--accumulate", type=at_least(1), default=2, help="mini-batches for a step")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = layers()
    fresh, plain = copy.deepcopy(module), copy.deepcopy(module)

    half = options.epochs // 2
    run = Run(module, options)
    found = [loss for _ in range(half) for loss in run.epoch()]
    with tempfile.TemporaryDirectory() as folder:
        run.accelerator.save_state(folder)
        # As in a new process: another model, another optimizer, and the state of the first.
        run = Run(fresh, options)
        run.accelerator.load_state(folder)
    found += [loss for _ in range(options.epochs - half) for loss in run.epoch()]
    model = run.accelerator.unwrap_model(run.model)
    print(f"{type(model).__name__} of {model.balance} on {[*map(str, model.devices)]}")
    bound = 1e-3 if options.precision == "no" else 0.1
    expected = plainly(plain, options.epochs, options.accumulate)
    return compare("Accelerate", found, expected, bound)


if __name__ == "__main__":
    sys.exit(main())
