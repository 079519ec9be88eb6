"""Virtual accelerators: test a pipeline for races, and see its timeline, without a GPU.

::

    from torchgpipe.testing import load, observe

    devices = load(4)
    model = GPipe(layers, [1, 1, 1, 1], devices=devices, chunks=8)
    with observe(jitter=0) as seen:
        model(input.to(devices[0])).sum().backward()
    assert not seen.races

The CPU computes all values, at once and in the order in which the host issues the operators;
streams and events are bookkeeping. So a missing wait shows as a race, and never as a wrong number.
"""

from torchgpipe.show.span import Span, Stream
from torchgpipe.testing.busy import Busy
from torchgpipe.testing.dry_run import Prediction, dry_run
from torchgpipe.testing.hardware import Hardware
from torchgpipe.testing.loading import UnavailableError, load
from torchgpipe.testing.observe import Observation, observe
from torchgpipe.testing.report import Access, Part, Place, Race, Transfers, Wait

__all__ = [
    "load",
    "observe",
    "dry_run",
    "Busy",
    "UnavailableError",
    "Observation",
    "Race",
    "Access",
    "Span",
    "Wait",
    "Stream",
    "Transfers",
    "Hardware",
    "Prediction",
    "Part",
    "Place",
]
