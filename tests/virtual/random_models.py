"""Random pipelines: any layers in any order, with skips, on any devices."""

import random
from dataclasses import dataclass, field

import torch

from tests.support.helpers import MODES, wrap
from tests.virtual.models import LAYERS, POP, ROWS, STASH, WIDTH, skip_layer
from tests.virtual.training import WAYS
from torchgpipe.skip.tracker import skips


@dataclass
class Pipeline:
    """A random pipeline, and the way to run it."""

    seed: int
    layers: list[list[str]] = field(init=False)

    def __post_init__(self):
        rng = self.rng = random.Random(self.seed)
        n = rng.randint(1, 5)
        self.layers = [self._layers() for _ in range(n)]
        self.skips = self._skips(n) if rng.random() < 0.5 else {}
        self.devices = self._devices(n)
        self.chunks = rng.choice([1, 2, 3, 3, 4, 5, 5, 20])
        self.mode = rng.choice(MODES)
        self.pair = rng.random() < 0.2
        self.deferred = rng.random() < 0.3
        self.options = {
            "way": rng.choice(["backward"] * 5 + sorted(WAYS)),
            "around": rng.random() < 0.25,
            "streams": rng.random() < 0.5,
            "requires_grad": rng.random() < 0.5,
            "bandwidth": {(0, 1): 10.0, (1, 0): 20.0} if rng.random() < 0.3 else {},
            "costs": {"tanh": 1.0, "addmm": 0.5} if rng.random() < 0.3 else {},
        }
        self.copies = rng.choice([2, 3, 16, 16])
        self.reused = rng.random() < 0.25

    def _layers(self):
        names = self.rng.choices(sorted(LAYERS), k=self.rng.randint(1, 3))
        # A change in place after another layer is often an error, so few models have one.
        return [
            "relu" if name == "in place" and k and self.rng.random() < 0.7 else name
            for k, name in enumerate(names)
        ]

    def _skips(self, n):
        """Draw stashes and pops of each layer of skips, by partition and side."""
        rng = self.rng
        places = [(j, side) for j in range(n) for side in (0, 1)]
        skips = {place: ({}, {}) for place in places}
        kind = rng.choice(["any", "any", "long", "adjacent", "nested"])
        for k in range(rng.choice([1, 1, 2, 3, 5])):
            if kind == "long":
                ends = (0, rng.randint(0, 1)), (n - 1, 1)
            elif kind == "adjacent":
                j = rng.randrange(max(1, n - 1))
                ends = (j, 0), (min(j + 1, n - 1), 1)
            elif kind == "nested" and k < n - 1 - k:
                ends = (k, 0), (n - 1 - k, 1)
            else:
                ends = sorted(rng.sample(places, 2))
            if ends[0] == ends[1]:
                continue
            skips[ends[0]][0][f"skip{k}"] = rng.choice(sorted(STASH))
            skips[ends[1]][1][f"skip{k}"] = rng.choice(sorted(POP))
        return {place: ways for place, ways in skips.items() if any(ways)}

    def _devices(self, n):
        rng = self.rng
        kind = rng.choice(["distinct", "distinct", "few", "few", "one", "with the CPU"])
        if kind == "distinct":
            return rng.sample(range(8), n)
        if kind == "with the CPU":
            return rng.choices([0, 1, 2, "cpu"], k=n)
        return rng.choices(range({"one": 1, "few": rng.choice([2, 3])}[kind]), k=n)

    def model(self, devices):
        torch.manual_seed(self.seed)
        partitions = []
        for j, names in enumerate(self.layers):
            made = [LAYERS[name]().double() for name in names]
            for side in (0, 1):
                if (j, side) in self.skips:
                    made.insert(side * len(made), skip_layer(*self.skips[j, side]))
            partitions.append(made)
        if self.reused:
            self._reuse(partitions)
        places = [d if d == "cpu" else devices[d] for d in self.devices]
        options = {"deferred_batch_norm": self.deferred}
        return wrap(partitions, places, self.mode, self.chunks, **options)

    def _reuse(self, partitions):
        """Put layers of a partition, or their parameters, into another on the same device, too."""
        a, b = sorted(self.rng.choices(range(len(partitions)), k=2))
        layer = self.rng.choice(partitions[a])
        if self.devices[a] != self.devices[b] or any(skips(layer)):
            return
        if self.rng.random() < 0.5:
            partitions[b].append(layer)
            return
        for other in partitions[b]:
            for name, parameter in other.named_parameters():
                for mine in layer.parameters():
                    if mine.shape == parameter.shape:
                        path, _, last = name.rpartition(".")
                        setattr(other.get_submodule(path), last, mine)

    def value(self):
        torch.manual_seed(self.seed)
        made = [torch.randn(ROWS * self.chunks, WIDTH).double() for _ in range(1 + self.pair)]
        return tuple(made) if self.pair else made[0]
