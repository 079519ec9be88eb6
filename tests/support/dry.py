"""A step with values and without: the same figures are to come of both."""

import torch

from torchgpipe.testing import dry_run, observe
from torchgpipe.testing.dry_run import begin_step
from torchgpipe.testing.hardware import NAMED

HARDWARE = NAMED["a100-40gb"]


def real(make, devices):
    """Bytes allocated and reserved, and seconds, of the third step, with values."""
    ops = torch.ops.virtual_accelerator
    ops.set_capacity(HARDWARE.memory)
    try:
        with observe(costs=HARDWARE):
            step = make(devices)
        for _ in range(3):
            begin_step(devices)
            with observe(costs=HARDWARE) as seen:
                step()
        accelerator = torch.accelerator
        allocated = tuple([accelerator.max_memory_allocated(x) for x in devices])
        reserved = tuple([accelerator.max_memory_reserved(x) for x in devices])
        return allocated, reserved, seen.makespan / 1e3
    finally:
        ops.set_capacity(0)


def dry(make, devices, value_read=None):
    """The same of a dry run."""
    found = dry_run(make, len(devices), HARDWARE, value_read=value_read)
    return found.allocated, found.reserved, found.time
