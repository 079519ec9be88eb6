"""A training script, run dry without a change: its third optimizer step is the one that counts.

The command is ``python -m torchgpipe.testing.dry_run SCRIPT --devices 8 --device a100-40gb``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torchgpipe import _torch
from torchgpipe.testing.dry_run import (
    COUNTED,
    AtStart,
    Prediction,
    begin_step,
    prediction_of,
    watched,
    weightless,
    without_values,
)
from torchgpipe.testing.hardware import NAMED, Hardware, hardware_of
from torchgpipe.testing.loading import loaded
from torchgpipe.testing.observe import Observation
from torchgpipe.testing.report import Place

__all__: list[str] = []

#: How the names of torchgpipe's Python modules begin, by which a hook tells that an nn.Module is
#: one of torchgpipe's. ``__name__`` would not do: it is ``__main__`` here.
_OURS = "torchgpipe."


class ThirdStep(BaseException):
    """The end of a script whose third step was seen; it is no error that scripts catch."""


class Steps:
    """The steps of a script, each from the end of one optimizer step to that of the next.

    Args:
        hardware: the hardware.
        devices: the devices.
        stack: closes what is under way when the script ends.
        made: closes what is under way until the end of the first step.
    """

    def __init__(
        self, hardware: Hardware, devices: list[torch.device], stack: ExitStack, made: ExitStack
    ) -> None:
        self.hardware = hardware
        self.devices = devices
        self.stack, self.made = stack, made
        self.count = 0
        self.too_large: Place | None = None
        self.state: list[AtStart] = []
        self.observation: Observation = stack.enter_context(watched(hardware))

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End a step, and begin the next one."""
        self.count += 1
        self.too_large = self.too_large or self.observation._places()[0]
        if self.count == COUNTED:
            raise ThirdStep
        self.made.close()
        self.stack.close()
        self.state = begin_step(self.devices)
        self.observation = self.stack.enter_context(watched(self.hardware))


def run_script(
    path: str, arguments: Sequence[str], devices: int, hardware: Hardware, value_read: float | None
) -> Prediction:
    """Run a script with arguments up to its third optimizer step.

    It finds the devices as those of ``torch.accelerator``.

    Raises:
        RuntimeError: it ended before, or cannot be run dry.
    """
    accelerators = loaded(devices)
    before = sys.argv
    sys.argv = [path, *arguments]
    with ExitStack() as hooks, without_values(hardware, value_read):
        hooks.callback(setattr, sys, "argv", before)
        # Until the first layer runs, weights are made and never read, so they need no values.
        made = hooks.enter_context(ExitStack())
        mode = made.enter_context(weightless())

        def begin(module: nn.Module, _: object) -> None:
            mode.is_wanted = False
            # torchgpipe makes no FX graph of a stage while a dispatch mode is active. So ``mode``
            # ends when a module of torchgpipe runs. Where another mode was entered within it, it
            # cannot end yet, and ends with the first step.
            is_ours = type(module).__module__.startswith(_OURS)
            count = _torch.count_dispatch_modes()
            if is_ours and count and _torch.dispatch_mode_at(count - 1) is mode:
                made.close()

        begins = nn.modules.module.register_module_forward_pre_hook(begin)
        made.callback(begins.remove)
        with ExitStack() as stack:
            steps = Steps(hardware, accelerators, stack, made)
            hooks.callback(register_optimizer_step_post_hook(steps.end).remove)
            try:
                runpy.run_path(path, run_name="__main__")
            except ThirdStep:
                stack.close()
                return prediction_of(hardware, steps.observation, steps.state, steps.too_large)
            except ValueError as error:
                if "the costs of a stage" not in str(error) or not mode.is_wanted:
                    raise
                raise RuntimeError(
                    "a dry run keeps the weights of a script from being written until its first "
                    f"layer runs, so no stage becomes a graph before (script: {path}); ask for "
                    "costs() after the first step, or call dry_run with a function that makes the "
                    "step"
                ) from error
    raise RuntimeError(
        f"a dry run sees the third step of an optimizer (steps: {steps.count}, script: {path}); "
        "let the script train for three steps"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script dry and print what is predicted."""
    parser = argparse.ArgumentParser(
        "python -m torchgpipe.testing.dry_run", description="Predict a training script's step."
    )
    parser.add_argument("script", help="a Python file, which is not changed")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.add_argument("--devices", type=int, default=8, help="how many (default: 8)")
    parser.add_argument(
        "--device", default="a100-40gb", choices=sorted(NAMED), help="what (default: a100-40gb)"
    )
    parser.add_argument(
        "--value-read", type=float, help="what each read of a value gives (default: an error)"
    )
    options = parser.parse_args(argv)
    print(
        run_script(
            options.script,
            options.arguments,
            options.devices,
            hardware_of(options.device),
            options.value_read,
        )
    )


if __name__ == "__main__":
    main()
