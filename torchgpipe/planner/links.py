"""The time of copies between devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch

from torchgpipe.devices.measures import Stopwatch
from torchgpipe.devices.streams import use_device
from torchgpipe.planner.lines import Line, through
from torchgpipe.planner.rounds import undisturbed

__all__ = ["Links", "measured_links"]

#: The time of a copy in milliseconds, by the bytes, for each pair of devices.
Links = dict[tuple[torch.device, torch.device], Line]

#: Bytes that are copied to measure a link, and how often.
SIZES, TIMES = (4 * 2**20, 2**16), 3


def measured_links(devices: Sequence[torch.device]) -> Links:
    """Measure the copies between all pairs of devices."""
    found: Links = {}
    for source, target in permutations(dict.fromkeys(devices), 2):
        points = []
        for size in SIZES:
            x = torch.empty(size, dtype=torch.uint8, device=source)
            times = []
            # The first copy may set the link up.
            for _ in range(1 + TIMES):
                with use_device(source):
                    watch = Stopwatch(source)
                    watch.start()
                    y = x.to(target)
                    times.append(1000 * watch.stop())
                del y
            points.append((size, undisturbed(times[1:])))
        found[source, target] = through(*points)
    return found
