"""Random models whose layers take time, for plans."""

import copy
import gc
import random

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import GPipe, ScheduledLoss, trace
from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.testing import observe
from torchgpipe.testing.busy import busy


class Timed(nn.Module):
    """Layer that takes a time for each row, and a constant one.

    Args:
        layer: the layer that computes.
        per_row: the milliseconds of F, I and W for each row.
        constant: the milliseconds of each besides.
    """

    def __init__(self, layer, per_row, constant=0.0):
        super().__init__()
        self.layer = layer
        self.per_row, self.constant = per_row, constant
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input):
        costs = tuple([x * len(input) + self.constant for x in self.per_row])
        return self.layer(busy(input, self.weight, costs, ""))


def random_layers(seed, count, width):
    """Layers of several kinds and costs, from ``width`` features to as many."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = []
    for _ in range(count):
        inner = width * draw.choice([1, 2, 4])
        kinds = [
            lambda: nn.Linear(width, width),
            lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
            lambda n=inner: nn.Sequential(nn.Linear(width, n), nn.ReLU(), nn.Linear(n, width)),
            lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()),
        ]
        per_row = [draw.uniform(0.001, 0.02) for _ in range(3)]
        layers.append(Timed(draw.choice(kinds)(), per_row, draw.choice([0.0, 0.1, 0.5])))
    return nn.Sequential(*layers)


def links(devices, speed=1e6, host=None):
    """Bandwidths of links, in bytes per millisecond, with those to the host if they take time."""
    indices = range(len(devices))
    found = {(a, b): speed for a in indices for b in indices if a != b}
    for a in indices if host else ():
        found[a, "cpu"] = found["cpu", a] = host
    return found


def run(candidate, layers, x, y, devices, bandwidth=None):
    """Train a copy of layers for two steps, as a candidate says, or a call that wraps them.

    Args:
        candidate: wraps the copy.
        layers: the layers.
        x, y: the input, and the target.
        devices: all devices.
        bandwidth: that of links, if not all of them are alike.

    Returns:
        The time of the second step, and the most memory of each device.
    """
    model = candidate(copy.deepcopy(layers))
    inside = isinstance(model, ScheduledLoss)
    gpipe = model.model if inside else model
    own = dict.fromkeys(gpipe.devices, 0)
    for state in (*model.parameters(), *model.buffers()):
        own[state.device] += state.nbytes
    if not inside:
        # A plan without a loss knows nothing of targets.
        y = y.to(gpipe.devices[-1])
    gc.collect()
    before = {d: torch.accelerator.memory_allocated(d) - size for d, size in own.items()}
    x, y = x.to(gpipe.devices[0]), y.to(gpipe.devices[-1])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        with observe(bandwidth=bandwidth or links(devices)), trace(model) as timeline:
            output = None if inside else model(x)
            loss = model(x, y) if output is None else F.mse_loss(output, y)
            loss.backward()
        if step == 0:
            optimizer.step()
        del loss, output
    memory = {d: timeline.memory[str(d)] - before[d] for d in dict.fromkeys(gpipe.devices)}
    return timeline.step().makespan, memory


def by_hand(balance, devices, chunks, checkpoint, schedule):
    """Return a call that wraps layers."""

    def wrap(layers):
        model = GPipe(layers, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
        return model if schedule is None else ScheduledLoss(model, F.mse_loss, schedule)

    return wrap


@skippable(stash=["skip"])
class Down(Timed):
    """Timed layer that stashes its output."""

    def forward(self, input):
        output = super().forward(input)
        yield stash("skip", output)
        return output


@skippable(pop=["skip"])
class Up(Timed):
    """Timed layer that adds what it pops to its input."""

    def forward(self, input):
        skip = yield pop("skip")
        return super().forward(input + skip)


@skippable(stash=["features"])
class Keep(nn.Module):
    """Layer that stashes its input, and passes it on."""

    def forward(self, input):
        yield stash("features", input)
        return input


@skippable(pop=["features"])
class Join(nn.Module):
    """Layer that joins channels that it pops and those of its input."""

    def forward(self, input):
        features = yield pop("features")
        return torch.cat([features, input], 1)


def unet(seed, width):
    """Layers of a small U-Net with rectifiers that compute in place, from 3 channels to 3."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def timed(layer):
        return Timed(layer, [draw.uniform(0.01, 0.1) for _ in range(3)])

    def block(a, b):
        norm = [nn.BatchNorm2d(b)] if draw.random() < 0.5 else []
        return [timed(nn.Conv2d(a, b, 3, padding=1)), *norm, nn.ReLU(inplace=True)]

    depth = draw.choice([1, 2])
    spaces = [Namespace() for _ in range(depth)]
    layers, channels = [], 3
    for k in range(depth):
        layers += [*block(channels, width * 2**k), Keep().isolate(spaces[k]), nn.MaxPool2d(2)]
        channels = width * 2**k
    layers += block(channels, 2 * channels)
    for k in reversed(range(depth)):
        channels = width * 2**k
        layers += [timed(nn.ConvTranspose2d(2 * channels, channels, 2, stride=2))]
        layers += [Join().isolate(spaces[k]), *block(2 * channels, channels)]
    return nn.Sequential(*layers, timed(nn.Conv2d(width, 3, 1)))
