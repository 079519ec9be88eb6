"""Stages that are graphs take inputs, targets and gradients of any strides."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.support.size import some
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.skip import pop, skippable, stash

#: Tensors with the same values and other strides.
LAYOUTS = {
    "plain": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "padded": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "one row": lambda x: x[:1].expand_as(x),
    "one number": lambda x: x.mean().expand_as(x),
}


class Returned(torch.autograd.Function):
    """Return the gradient with the strides of a layout."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return LAYOUTS[ctx.layout](grad), None


class Layer(nn.Module):
    """Convolve, and do something whose strides matter or whose fake strides are not the real."""

    def __init__(self, kind, layout):
        super().__init__()
        self.kind, self.layout = kind, layout
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = Returned.apply(self.layer(x), self.layout)
        return LAYOUTS[self.layout](KINDS[self.kind](x))


def changed(x):
    y = x.roll(1, 2).contiguous()
    y.view(-1)[3::7].mul_(2)
    return y * 1


#: The strides of ``roll``'s result, and of some gradients, are not those of fake tensors.
KINDS = {
    "view": lambda x: x.contiguous().view(len(x), -1).sin().view(x.shape),
    "roll": lambda x: x.roll(1, 2).contiguous(),
    "rolled view": lambda x: x.roll(1, 2).contiguous().view(len(x), 2, -1).view(x.shape),
    "rolled strides": lambda x: x.roll(1, 3).contiguous().as_strided(x.shape, (64, 16, 4, 1)),
    "changed": changed,
    "reflected": lambda x: F.pad(x, (1, 0, 1, 0), mode="reflect")[..., :-1, :-1].reshape(x.shape),
    "glu": lambda x: F.glu(torch.cat([x.sin(), x], 1), 1).contiguous().view(x.shape),
    "flat": lambda x: F.linear(x.flatten(1), torch.eye(64, dtype=x.dtype)).view(x.shape),
}

LOSSES = {
    "mse": F.mse_loss,
    "smooth": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "rows": lambda x, t: F.mse_loss(x.reshape(len(x), -1), t.reshape(len(t), -1)),
    "none": lambda x, t: F.mse_loss(x, t, reduction="none").mean(),
}


@skippable(stash=["early"])
class Stash(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def forward(self, x):
        yield stash("early", LAYOUTS[self.layout](x * 1))
        return x


@skippable(pop=["early"])
class Pop(nn.Module):
    def forward(self, x):
        early = yield pop("early")
        return x + early.contiguous().view(len(x), -1).cos().view(x.shape)


layouts = st.sampled_from([*LAYOUTS])
layers = st.builds(Layer, st.sampled_from([*KINDS]), layouts)


@settings(max_examples=some(1000, 3), deadline=None)
@given(
    st.tuples(st.builds(Stash, layouts), layers, layers, st.builds(Pop)),
    st.sampled_from([*LOSSES]),
    st.tuples(layouts, layouts),
    st.sampled_from(["1f1b", "zero_bubble_h1"]),
    st.sampled_from(["never", "always"]),
    st.sampled_from(["everything", "min-cut"]),
    st.sampled_from([[2, 2], [4]]),
)
def test_layouts_at_every_border(layers, loss, given, schedule, mode, recompute, balance):
    torch.manual_seed(0)
    plain = nn.Sequential(*layers).double()
    own = copy.deepcopy(plain)
    x, target = (LAYOUTS[layout](torch.randn(6, 4, 4, 4).double()) for layout in given)
    x = x.detach().requires_grad_()
    loss = LOSSES[loss]
    parts = zip(x.chunk(3), target.chunk(3), strict=True)
    wanted = sum(loss(plain(a), b) for a, b in parts) / 3
    wanted.backward()
    expected, x.grad = x.grad, None
    pipe = GPipe(own, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=mode)
    step = ScheduledLoss(pipe, loss, schedule, stages="graph", recompute=recompute)
    step(x, target).backward()
    torch.testing.assert_close(x.grad, expected)
    for a, b in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
