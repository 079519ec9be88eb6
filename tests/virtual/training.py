"""Trainings of a wrapper, and of its layers without it, that must give the same.

All models are in double precision, so that rounding does not look like an error.
"""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.support.helpers import assert_no_races
from tests.virtual.models import WIDTH, First, first, tensors
from tests.virtual.stages import own_streams
from torchgpipe.ambient.random_numbers import StepNumbers
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.devices.streams import accelerators
from torchgpipe.engine.pipeline import clock_cycles
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.testing import observe
from torchgpipe.values.microbatch import gather, scatter

# PyTorch warns of weights with gradients from elsewhere, which some of the trainings have.
if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)


class Tracker(SkipTracker):
    """A tracker that moves popped values to the device of the layer."""

    device = None

    def load(self, skip):
        return tree_map_only(torch.Tensor, lambda x: x.to(self.device), super().load(skip))


def own(batch):
    """The micro-batch in memory of its own."""
    return batch.replace([x.clone() for x in batch])


class Reference(nn.Module):
    """The layers of a wrapper without it: micro-batch by micro-batch, in the same order."""

    def __init__(self, model):
        super().__init__()
        self.partitions = copy.deepcopy(model.partitions)
        self.devices, self.chunks = model.devices, model.chunks
        self.deferred = model.deferred_batch_norm
        self.training = model.training

    def forward(self, value):
        batches = [own(batch) for batch in scatter(value, self.chunks)]
        trackers = [Tracker() for _ in batches]
        draws = StepNumbers(self.devices, len(batches))
        with draws, self.norms_of_the_whole() if self.deferred and self.training else nullcontext():
            for cycle in clock_cycles(len(batches), len(self.partitions)):
                for i, j in cycle:
                    trackers[i].device = self.devices[j]
                    moved = batches[i].replace([x.to(self.devices[j]) for x in batches[i]])
                    with use_skip_tracker(trackers[i]), draws.of(i, self.devices[j]):
                        batches[i] = own(moved.call(self.partitions[j]))
        return gather(batches)

    @contextmanager
    def norms_of_the_whole(self):
        """Make norms update their statistics once, from all rows of the mini-batch."""
        norms = [x for x in self.modules() if isinstance(x, DeferredBatchNorm)]
        before = [dict(norm._buffers) for norm in norms]
        given = [[] for _ in norms]
        hooks = []
        for norm, seen in zip(norms, given):
            norm._buffers.update({name: buffer.clone() for name, buffer in norm._buffers.items()})
            note = partial(lambda seen, _, args: seen.append(args[0].detach()), seen)
            hooks.append(norm.register_forward_pre_hook(note))
        yield
        for norm, buffers, seen, hook in zip(norms, before, given, hooks):
            hook.remove()
            norm._buffers.update(buffers)
            with torch.no_grad():
                norm(torch.cat(seen))


def loss_of(output):
    """A loss of all tensors with a gradient, each with another weight."""
    wanted = [x for x in tensors(output) if x.requires_grad]
    return sum(x.square().mean() * (k + 1) for k, x in enumerate(wanted))


def backward(output, **options):
    if any(x.requires_grad for x in tensors(output)):
        loss_of(output).backward(**options)


def two_graphs(model, value, between=lambda gradient: gradient):
    a, b = model(value), model(value)
    backward(b)
    for leaf in [*tensors(value), *model.parameters()]:
        if leaf.grad is not None:
            leaf.grad = between(leaf.grad)
    backward(a)
    return a


def gradients_scaled(model, value):
    return two_graphs(model, value, lambda gradient: gradient.mul_(0.5))


def gradients_dropped(model, value):
    """Use gradients once more, and drop them, between a forward and its backward."""
    used = []
    two_graphs(model, value, lambda gradient: used.append(gradient.sum()))
    return tuple(used)


def partially(model, value):
    """Use a loss of few rows, and of the first tensor alone."""
    output = model(value)
    backward(first(output)[1:2])
    return output


def changed_by_caller(model, value):
    # The output may be the input.
    copies = tuple(x.clone() for x in tensors(value))
    output = model(copies if isinstance(value, tuple) else copies[0])
    for x in tensors(output)[:1]:
        x.mul_(2)
    backward(output)
    return output


def plainly(model, value):
    output = model(value)
    backward(output)
    return output


def regularised(model, value):
    """Add a loss of the weights themselves."""
    output = model(value)
    weights = [p for p in model.parameters() if p.requires_grad]
    decay = sum(p.square().sum().to(first(output).device) for p in weights)
    backward((*tensors(output), *([decay] if weights else [])))
    return output


def without(mode):
    def way(model, value):
        with mode():
            return model(value)

    return way


def evaluated(model, value):
    model.eval()
    output = plainly(model, value)
    model.train()
    return output


#: Ways to take a step with a model.
WAYS = {
    "backward": plainly,
    "two graphs": two_graphs,
    "gradients scaled between": gradients_scaled,
    "gradients dropped between": gradients_dropped,
    "a partial loss": partially,
    "weight decay": regularised,
    "output changed": changed_by_caller,
    "eval": evaluated,
    "no_grad": without(torch.no_grad),
    "inference_mode": without(torch.inference_mode),
}


def train(model, value, way="backward", steps=2):
    """Take some steps of training, and return their results in order.

    Args:
        model: the wrapper, or a reference.
        value: its input.
        way: a function that takes a step, one of WAYS or like them.
        steps: how many.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters or [torch.zeros(())], lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        output = WAYS.get(way, way)(model, value)
        found += [(f"output of step {step}", x.detach().clone()) for x in tensors(output)]
        del output
        leaves = [("input", x) for x in tensors(value)] + list(model.named_parameters())
        found += [
            (f"{name}.grad of step {step}", None if x.grad is None else x.grad.clone())
            for name, x in leaves
        ]
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        with torch.no_grad():
            # Whatever it is: the caller may.
            for x in [*tensors(value), *model.parameters(), *model.buffers()]:
                x.mul_(2).div_(2) if x.is_floating_point() else x.add_(1)
    found += [(name, x.detach().clone()) for name, x in model.named_parameters()]
    found += [(name, x.clone()) for name, x in model.named_buffers()]
    return found


def differences(found, expected):
    """Describe the differences between two results, by name."""
    assert [name for name, _ in found] == [name for name, _ in expected]
    return [name for (name, a), (_, b) in zip(found, expected) if not same(a, b)]


def same(a, b):
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-8, atol=1e-10)


def leaves_of(value, device, requires_grad):
    made = [x.clone().to(device).requires_grad_(requires_grad) for x in tensors(value)]
    return tuple(made) if isinstance(value, tuple) else made[0]


class Around(nn.Module):
    """A model with other layers before a wrapper, and after it."""

    def __init__(self, wrapped):
        super().__init__()
        torch.manual_seed(0)
        self.before = First(nn.Linear(WIDTH, WIDTH)).double().to(wrapped.devices[0])
        self.wrapped = wrapped
        self.after = First(nn.Linear(WIDTH, WIDTH)).double().to(wrapped.devices[-1])

    def forward(self, value):
        return self.after(self.wrapped(self.before(value)))


def verify(
    model,
    value,
    *,
    seed=0,
    streams=False,
    requires_grad=False,
    way="backward",
    steps=2,
    around=False,
    **observed,
):
    """Check that a wrapper computes what its layers compute without it, without a race."""
    device, reference = model.devices[0], Reference(model)
    if around:
        model, reference = Around(model), Around(reference)
    torch.manual_seed(seed)
    given = leaves_of(value, device, requires_grad)
    expected = train(reference, given, way, steps)
    torch.manual_seed(seed)
    with own_streams(accelerators(), streams):
        given = leaves_of(value, device, requires_grad)
        with observe(jitter=seed, **observed) as seen:
            found = train(model, given, way, steps)
            del given
    assert_no_races(seen)
    wrong = differences(found, expected)
    assert not wrong, f"differs: {wrong}"
