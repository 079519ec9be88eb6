"""Code between mapped modules, and the numbers that it draws, on virtual accelerators."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.helpers import MODES, assert_no_races
from tests.virtual.stages import ONE_MODE, limit
from tests.virtual.test_mapped import SEEDS, Chain, mapped
from tests.virtual.test_mapped_values import Model, Shift, wrapped
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe

# Some weights are used on the streams of several visits.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


class Noisy(Model):
    """Code in front of the first module, and after it, draws numbers."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        noise = torch.rand(2, device=x.device)
        y = self.b(self.a(x + noise.sum()))
        other = torch.rand(2, device=x.device)
        self.drawn += [noise.tolist(), other.tolist()]
        return self.d(y)


@pytest.mark.parametrize("reverse", [False, True])
def test_numbers_of_code_are_never_the_same(devices, reverse):
    model = Noisy()
    names = dict(zip("abcd", devices))
    if reverse:
        names = dict(reversed(names.items()))
    pipe = MappedGPipe(model, names, chunks=3)
    for _ in range(2):
        pipe(torch.rand(6, 6, device=devices[0])).sum().backward()
    assert len({tuple(x) for x in model.drawn}) == 12


class Twice(Model):
    """One tensor comes to a device twice, and is changed in place there."""

    def forward(self, x):
        y = self.a(x)
        device = self.d[0].weight.device
        one = (y.clone() if y.device == device else y.to(device)).mul_(2)
        return self.d(one + y.to(device))


class Late(Chain):
    """The outputs of all layers are added up on the first device."""

    def forward(self, x):
        total = x
        for layer in self.layers:
            x = layer(x)
            total = total + x.to(total.device)
        return total


class InPlace(Model):
    """Each micro-batch changes its rows of the input."""

    def forward(self, x, ids):
        ids[ids < 0] = 0
        return self.d(self.a(x).to(self.d[0].weight.device) * ids.to(self.d[0].weight.device))


class Ending(Model):
    """Micro-batches end on different devices."""

    def forward(self, x):
        y = self.a(x)
        return self.d(y) if x[0, 0] > 0.5 else self.b(y)


def assert_equal(pipe, plain, *inputs, chunks=4):
    device = next(iter(pipe.device_map.values()))
    for rows in zip(*[x.chunk(chunks) for x in inputs]):
        plain(*[x.clone() for x in rows]).square().sum().backward()
    with observe(jitter=0) as seen:
        pipe(*[x.to(device) for x in inputs]).square().sum().backward()
    assert_no_races(seen)
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(own.grad.cpu(), other.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Twice, InPlace, Ending])
def test_gradients(devices, kind, mode):
    torch.manual_seed(0)
    plain = kind()
    inputs = [torch.rand(8, 6)]
    if kind is InPlace:
        inputs.append(torch.randint(-1, 2, (8, 6)))
    assert_equal(wrapped(copy.deepcopy(plain), devices, mode), plain, *inputs)


@pytest.mark.parametrize("mode", ONE_MODE)
def test_code_that_comes_back_holds_nobody_up(devices, mode):
    pipe = mapped(Late(4), devices[:4], mode, 8)
    x = torch.rand(8, 4, device=devices[0])
    for seed in (None, *SEEDS):
        with observe(jitter=seed) as seen:
            pipe(x).sum().backward()
        assert_no_races(seen)
        assert seen.makespan == limit(mode, 4, 8)


@pytest.mark.parametrize("mode", ONE_MODE)
def test_inputs_on_the_cpu_hold_nobody_up(devices, mode):
    pipe = mapped(Chain(4), devices[:4], mode, 8)
    with observe() as seen:
        pipe(torch.rand(8, 4)).sum().backward()
    assert seen.makespan == limit(mode, 4, 8)


class Checkpointed(nn.Module):
    """A block with dropout, and a checkpoint of PyTorch around it if wanted."""

    def __init__(self, wanted):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5))
        self.wanted = wanted

    def __call__(self, *args):
        if self.wanted:
            return checkpoint(super().__call__, *args, use_reentrant=False)
        return super().__call__(*args)

    def forward(self, x):
        return self.layers((x * 2).sin())


class OwnCheckpoints(Model):
    def __init__(self, wanted, dropout=0.5):
        super().__init__()
        self.a, self.b, self.c, self.d = (Checkpointed(wanted) for _ in range(4))
        for block in (self.a, self.b, self.c, self.d):
            block.layers[2].p = dropout

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("places", "dropout"), [([0, 0, 0, 0], 0.5), ([0, 1, 2, 3], 0.0)])
def test_checkpoints_of_the_model_itself(devices, places, dropout, mode):
    """Such a checkpoint computes its module again, and the cell that the module is does not."""

    def grads(wanted):
        torch.manual_seed(0)
        model = OwnCheckpoints(wanted, dropout)
        pipe = wrapped(model, [devices[k] for k in places], mode if wanted else "never")
        torch.manual_seed(1)
        pipe(torch.ones(8, 6, device=devices[0], requires_grad=True)).sum().backward()
        return [x.grad.cpu() for x in pipe.parameters()]

    for found, expected in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Before PyTorch 2.13, a checkpoint that an error ends takes its hooks away later, in any thread.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object _checkpoint_without")
def test_numbers_that_a_checkpoint_of_the_model_cannot_repeat(devices):
    pipe = wrapped(OwnCheckpoints(True), devices, "never")
    with pytest.raises(RuntimeError, match="use the checkpoints of MappedGPipe"):
        pipe(torch.ones(8, 6, device=devices[0], requires_grad=True))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_weights_that_autocast_has_cast(devices, mode):
    class Cast(Model):
        def forward(self, x):
            with torch.autocast("virtual", torch.bfloat16):
                for _ in range(2):
                    x = self.b(self.a(x))
            return self.d(x.float())

    pipe = wrapped(Cast(), devices, mode)
    x = torch.rand(8, 6, device=devices[0])
    for seed in (None, *SEEDS):
        with observe(jitter=seed) as seen:
            pipe(x).sum().backward()
        assert_no_races(seen)


def test_a_loop_over_devices_has_some_streams_only(devices):
    class Loop(Model):
        def forward(self, x):
            for _ in range(10):
                x = self.b(self.a(x))
            return x

    pipe = wrapped(Loop(), devices, "never")
    pipe(torch.rand(4, 6, device=devices[0])).sum().backward()
    made = [x for pool in pipe._lasting.pools for streams in pool._made.values() for x in streams]
    assert len(made) < 5 * 2 * 32


class Down(Model):
    """A small U-Net, whose second half comes back over the devices of the first."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(12, 6), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        c = self.c(b)
        y = self.d(c)
        # Code with what the first visit of each device has made: a view of it is changed, too.
        view = c[:, :2]
        y = self.up[2](torch.cat([y.to(c.device), c * 2], 1))
        view.mul_(1.5)
        y = self.up[1](torch.cat([y.to(b.device), b + 1], 1)) * b.sigmoid()
        y = self.up[0](torch.cat([y.to(a.device), a], 1))
        # The gradient of the sum goes to both terms, and others are added to that of the second.
        return (y * y.detach().cos() + a) * (1 + view.sum().to(a.device))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_skips_that_come_back(devices, mode):
    torch.manual_seed(0)
    plain = Down()
    # Neither saves what is changed in place.
    plain.c, plain.d = nn.Linear(6, 6), Shift()
    model = copy.deepcopy(plain)
    names = dict(zip("abcd", devices)) | {f"up.{k}": devices[k] for k in range(3)}
    pipe = MappedGPipe(model, names, chunks=4, checkpoint=mode)
    inputs = torch.rand(8, 6)
    assert_equal(pipe, plain, inputs)
    for seed in (None, *SEEDS):
        with observe(jitter=seed) as seen:
            pipe(inputs.to(devices[0])).square().sum().backward()
        assert_no_races(seen)


@pytest.mark.parametrize("way", ["added", "added in place", "changed", "view", "same device"])
def test_gradients_leave_a_later_visit_as_clones(devices, way):
    """Autograd adds others to them in place, on another stream."""
    places = {}

    class Adding(Model):
        def forward(self, x):
            before = self.a(x)
            alone = before.clone()
            later = self.b(before).to(before.device) * 2
            for name, tensor in (("alone", alone), ("later", later)):
                tensor.register_hook(lambda grad, name=name: places.update({name: grad}))
            if way == "added in place":
                result = later.clone()
                result += alone
                return result
            if way == "changed":
                alone += later
                return alone
            if way == "view":
                return later + alone.view_as(later)
            return later + (alone.to(later.device) if way == "same device" else alone)

    pipe = wrapped(Adding(), devices, "never", chunks=1)
    pipe(torch.rand(2, 6, device=devices[0])).sum().backward()
    assert places["alone"].data_ptr() != places["later"].data_ptr()


#: Functions that change what they are called with.
IN_PLACE = {
    "inplace": lambda y: F.leaky_relu(y, 0.1, inplace=True),
    "position": lambda y: F.leaky_relu(y, 0.1, True),
    "name": lambda y: F.elu(input=y, inplace=True),
    "first argument": lambda y: torch.relu_(input=y),
    "method": lambda y: y.mul_(2),
    "out": lambda y: torch.mul(y, 2, out=y if not torch.is_grad_enabled() else None),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_functions_that_change_an_earlier_tensor(devices, change):
    """Call each once, and return what it has changed."""

    class Changing(Model):
        def forward(self, x):
            before = self.a(x) * 1
            later = self.b(before * 1).to(before.device)
            with torch.set_grad_enabled(self.training):
                result = IN_PLACE[change](before)
            return result + later + before

    torch.manual_seed(0)
    plain = Changing()
    pipe = wrapped(copy.deepcopy(plain), devices, "never", chunks=2)
    x = torch.randn(4, 6)
    assert_equal(pipe, plain, x)
    with observe() as seen:
        out = pipe.eval()(x.to(devices[0]))
    assert_no_races(seen)
    torch.testing.assert_close(out.cpu(), plain.eval()(x))
