"""Promises in two processes, each of which has one stage."""

import torch
import torch.distributed as dist
from torch.func import functional_call

from tests.contract.promises import PROMISES, keeps
from tests.contract.wrapped import Maker, Raised, Wrapped, grads_of


class PipeMaker(Maker):
    """Wrap layers across the processes of a group.

    Args:
        group: the group.
        fails: whether a step fails, which closes the connections: then the wrapper has a group of
            its own, so that the processes live on.
        *args: the arguments of :class:`~tests.contract.wrapped.Maker`.
    """

    def __init__(self, group, fails, *args):
        super().__init__(*args)
        self.group = group
        self.own = dist.new_group(dist.get_process_group_ranks(group)) if fails else group

    def wrap(self, layers, loss, options):
        from torchgpipe.distributed import Pipe

        half = len(layers) // 2
        balance = [half, len(layers) - half]
        model = Pipe(
            *(layers, balance),
            **options,
            loss=loss,
            schedule=self.kind[0],
            group=self.own,
            outputs=True,
            weight_of=self.weight_of,
        )
        return Across(self, layers, model, loss)


class Across(Wrapped):
    """Layers of which this process has some. What is asked for comes from all processes."""

    cell, lasts, encloses = "raised in {j}[FRBIW]{i} on", False, True

    def twin(self, duplicate):
        copy = duplicate(self.model)
        return type(self)(self.maker, copy, copy, self.criterion)

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
        """The loss, which has no graph, since the step has computed its backward."""
        return self.step(input, *targets)

    def called_with(self, given, input, *targets):
        outputs = self._everywhere(functional_call(self.model, given, (input,)))
        return self.criterion(next(x for x in outputs if x is not None), *targets)

    def clip_grad_norm(self, norm):
        return self.model.clip_grad_norm_(norm)

    def step(self, input, *targets):
        loss, self.output = self.model.step(input, *targets)
        return loss

    @property
    def output(self):
        return self._everywhere(self._output)[-1]

    @output.setter
    def output(self, output):
        self._output = output

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
    def state(self):
        return self.all(self.model.state_dict())

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
    keeps(name, PipeMaker(group, PROMISES[name].fails_under(mode), run, mode))
