"""Promises in two processes, each of which has one stage."""

import torch
import torch.distributed as dist

from tests.contract.promises import keeps
from tests.contract.wrapped import Maker, Raised, Wrapped, grads_of


class PipeMaker(Maker):
    """Wrap layers across the processes of a group."""

    def __init__(self, group, *args):
        super().__init__(*args)
        self.group = group

    def wrap(self, layers, loss, options):
        from torchgpipe.distributed import Pipe

        half = len(layers) // 2
        balance = [half, len(layers) - half]
        model = Pipe(
            *(layers, balance),
            **options,
            loss=loss,
            schedule=self.kind[0],
            group=self.group,
            outputs=True,
        )
        return Across(self, layers, model, loss)


class Across(Wrapped):
    """Layers of which this process has some. What is asked for comes from all processes."""

    def _everywhere(self, value):
        found = [None] * dist.get_world_size(self.maker.group)
        dist.all_gather_object(found, value, group=self.maker.group)
        return found

    def all(self, found):
        each = self._everywhere(found)
        if isinstance(found, dict):
            return {key: x for some in each for key, x in some.items()}
        return [x for some in each for x in some]

    def forward(self, *args, **kwargs):
        return self._everywhere(self.model(*args, **kwargs))[-1]

    def loss(self, input, *targets):
        raise NotImplementedError("a step across processes has its backward inside")

    def step(self, input, *targets):
        loss, output = self.model.step(input, *targets)
        self.output = self._everywhere(output)[-1]
        return loss

    def input_grads(self, tensors):
        return self._everywhere(super().input_grads(tensors))[0]

    @property
    def grads(self):
        found = self.all(grads_of(self.model))
        # The loss is a module of the pipeline, too.
        return {name: x for name, x in found.items() if not name.startswith("loss.")}

    @property
    def parameters(self):
        return self.all(dict(self.model.named_parameters()))

    @property
    def buffers(self):
        return self.all(dict(self.model.named_buffers()))

    def raised(self, function, *args):
        """The error of the process that has failed, which the others name."""
        own = super().raised(function, *args)
        try:
            found = self._everywhere(own)
        except RuntimeError:
            # A step that failed has taken the connection, and each process names the error.
            return own
        assert all(found) or not any(found), found
        own = [x for x in found if x and "rank" not in x.text]
        return Raised(*(own or found)[0]) if any(found) else None


def check(group, name, run, mode):
    """Check a promise in this process."""
    torch.manual_seed(0)
    keeps(name, PipeMaker(group, run, mode))
