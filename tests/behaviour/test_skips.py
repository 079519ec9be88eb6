"""Skips through the pipeline: the plain module's values and gradients, and how long they live."""

import copy
import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.helpers import CPUS, MODES, nodes, note_of, plain, run_pipeline
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash

KINDS = ["layer", "input", "output", "view", "none", "constant", "unused", "integer", "nested"]
WIDTH = 3


def mix(stashes, pops):
    """A layer that pops some skips, computes, and stashes some; each skip has a kind."""

    @skippable(stash=list(stashes), pop=list(pops))
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, input):
            x = self.linear(input).tanh()
            for name, kind in pops.items():
                y = yield pop(name)
                if kind == "none":
                    assert y is None
                elif kind == "nested":
                    assert (y["n"], y["x"][1], y["x"][2].dtype) == (3, None, torch.bool)
                    x = x * y["x"][0].sigmoid()
                elif kind != "unused":
                    x = x * y.sigmoid()
            for name, kind in stashes.items():
                if kind == "none":
                    yield stash(name, None)
                elif kind == "nested":
                    yield stash(name, {"x": [x.exp(), None, x > 0], "n": 3})
                elif kind == "input":
                    yield stash(name, input)
                elif kind == "output":
                    yield stash(name, x)
                elif kind == "view":
                    yield stash(name, x[:, :1])
                elif kind == "constant":
                    yield stash(name, x.detach().exp())
                elif kind == "integer":
                    yield stash(name, x.detach().argmax(dim=-1, keepdim=True))
                else:
                    yield stash(name, x.exp())
            return x

    return Mix()


@st.composite
def models(draw):
    """Layers with random skips among them, and a random balance."""
    n = draw(st.integers(2, 7))
    ends = st.tuples(st.integers(0, n - 2), st.integers(1, n - 1)).filter(lambda e: e[0] < e[1])
    skips = draw(st.lists(st.tuples(ends, st.sampled_from(KINDS)), max_size=6))
    stashes, pops = [{} for _ in range(n)], [{} for _ in range(n)]
    for k, ((source, target), kind) in enumerate(skips):
        stashes[source][f"skip {k}"] = pops[target][f"skip {k}"] = kind
    torch.manual_seed(draw(st.integers(0, 99)))
    layers = [mix(a, b) for a, b in zip(stashes, pops)]
    cuts = draw(st.sets(st.integers(1, n - 1), max_size=4))
    return layers, [b - a for a, b in pairwise([0, *sorted(cuts), n])]


@settings(max_examples=100)
@given(
    models(),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([[0, 0, 0, 0, 0], [0, 1, 2, 3, 0], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1]]),
)
def test_parity(model, chunks, checkpointed, requires_grad, places):
    layers, balance = model
    taken = iter(layers)
    partitions = [nn.Sequential(*[next(taken) for _ in range(size)]) for size in balance]
    devices = [CPUS[k] for k in places[: len(partitions)]]
    x = torch.rand(5, WIDTH, requires_grad=requires_grad)
    leaves = [p for layer in layers for p in layer.parameters()] + [x] * requires_grad

    expected = plain(nn.Sequential(*layers), x, chunks)
    output = run_pipeline(partitions, devices, x, chunks=chunks, checkpointed=checkpointed)
    assert torch.equal(expected, output)
    for a, b in zip(
        torch.autograd.grad(expected.square().sum(), leaves),
        torch.autograd.grad(output.square().sum(), leaves),
    ):
        assert torch.allclose(a, b, atol=1e-6)


@settings(max_examples=30)
@given(models(), st.integers(1, 4), st.sampled_from(MODES))
def test_parity_of_wrapped_models(model, chunks, mode):
    layers, balance = model
    reference = nn.Sequential(*copy.deepcopy(layers))
    wrapped = GPipe(
        nn.Sequential(*layers),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=mode,
    )
    x = torch.rand(4, WIDTH)
    expected = plain(reference, x, chunks)
    expected.sum().backward()
    for twin in (wrapped, copy.deepcopy(wrapped)):
        output = twin(x)
        assert torch.equal(output, expected)
        output.sum().backward()
        for p, q in zip(reference.parameters(), twin.parameters()):
            assert torch.allclose(p.grad, q.grad, atol=1e-6)
        twin.eval()
        with torch.no_grad():
            assert torch.equal(twin(x), expected)


@pytest.mark.parametrize("checkpoint", MODES)
def test_tuples_beside_skips(device, checkpoint):
    @skippable(stash=["a", "b"])
    class Split(nn.Module):
        def forward(self, value):
            x, y = value
            yield stash("a", x * 2)
            yield stash("b", y)
            return y, x

    @skippable(pop=["a", "b"])
    class Merge(nn.Module):
        def forward(self, value):
            y, x = value
            a = yield pop("a")
            b = yield pop("b")
            return x * a + b, y

    class Pass(nn.Module):
        def forward(self, value):
            return value

    model = GPipe(
        nn.Sequential(Split(), Pass(), Merge()),
        [1, 1, 1],
        devices=[device] * 3,
        chunks=2,
        checkpoint=checkpoint,
    )
    x = torch.rand(4, 2, device=device, requires_grad=True)
    y = torch.arange(4, device=device)[:, None]
    first, second = model((x, y))
    assert torch.equal(first, x * x * 2 + y)
    assert torch.equal(second, y)
    first.sum().backward()
    assert torch.equal(x.grad, 4 * x)


@skippable(stash=["x"])
class Own(nn.Module):
    """Stashes what it gives, or a view of that."""

    def __init__(self, view):
        super().__init__()
        self.linear, self.view = nn.Linear(WIDTH, WIDTH), view

    def forward(self, input):
        y = self.linear(input)
        yield stash("x", y[:, :2] if self.view else y)
        return y


@skippable(pop=["x"])
class Sum(nn.Module):
    def forward(self, input):
        x = yield pop("x")
        return input.square() + x.sin().sum(1, keepdim=True)


class InPlace(nn.Module):
    """Does not say so."""

    def forward(self, x):
        return x.relu_()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), InPlace()], ids=["told", "found out"])
@pytest.mark.parametrize("between", [[], [nn.Identity()]], ids=["next", "later"])
@pytest.mark.parametrize("places", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 0]])
@pytest.mark.parametrize("checkpointed", [0, 1, 2])
def test_output_that_is_stashed_and_changed_in_place_later(
    view, layer, between, places, checkpointed
):
    """The skip would have to change, too, wherever it is by then; so it is an error."""
    layers = [Own(view), *between, layer, nn.Tanh(), Sum()]
    partitions = [nn.Sequential(part) for part in layers]
    devices = [CPUS[k] for k in [*places, 0][: len(partitions)]]
    with pytest.raises(
        RuntimeError, match="must not be views of one tensor|must not change its input"
    ):
        run_pipeline(partitions, devices, torch.rand(4, WIDTH), chunks=2, checkpointed=checkpointed)
    # Where all is in one partition, it is changed as in the plain module.
    x = torch.rand(4, WIDTH)
    module = nn.Sequential(*layers)
    output = run_pipeline([module], CPUS[:1], x, chunks=2, checkpointed=checkpointed)
    expected = plain(module, x, 2)
    assert torch.equal(output, expected)
    parameters = list(module.parameters())
    for a, b in zip(
        torch.autograd.grad(output.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
    ):
        assert torch.allclose(a, b)


@skippable(stash=["x", "y"])
class Both(nn.Module):
    """One tensor under two names."""

    def forward(self, input):
        x = input.sin()
        yield stash("x", x)
        yield stash("y", x)
        return x.tanh() * 1


def in_place(name):
    @skippable(pop=[name])
    class Pop(nn.Module):
        def forward(self, input):
            tensor = yield pop(name)
            return input + tensor.mul_(2)

    return Pop()


@pytest.mark.parametrize("places", [[0, 0, 0], [0, 1, 2], [0, 1, 0]])
@pytest.mark.parametrize("checkpointed", [0, 2])
def test_popped_tensor_that_is_changed_in_place(places, checkpointed):
    for layers in (
        [Own(view=False), nn.Identity(), in_place("x")],
        [Both(), in_place("x"), in_place("y")],
    ):
        partitions = [nn.Sequential(layer) for layer in layers]
        devices = [CPUS[k] for k in places]
        with pytest.raises(RuntimeError, match="must not be views|must not change its input"):
            run_pipeline(
                partitions, devices, torch.rand(4, WIDTH), chunks=2, checkpointed=checkpointed
            )


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_changed_in_place_without_grad(mode):
    partitions = [nn.Sequential(x) for x in (Own(view=False), nn.ReLU(inplace=True), Sum())]
    with pytest.raises(RuntimeError, match="must not be views"), getattr(torch, mode)():
        run_pipeline(partitions, CPUS[:3], torch.rand(4, WIDTH), chunks=2)


@pytest.mark.parametrize("checkpointed", [0, 2])
@pytest.mark.parametrize("devices", [CPUS[:1] * 4, CPUS], ids=["one device", "four devices"])
def test_what_shares_memory_with_nothing_any_more(devices, checkpointed):
    """The skips share theirs with one another; or the other half of a tensor was dropped."""

    class Halves(nn.Module):
        def forward(self, x):
            return x[:, :2], x[:, 2:]

    class First(nn.Module):
        def forward(self, value):
            return value[0]

    @skippable(pop=["x", "y"])
    class Pops(nn.Module):
        def forward(self, input):
            x = yield pop("x")
            y = yield pop("y")
            return input + x + y

    for layers in (
        [Both(), nn.ReLU(inplace=True), nn.Identity(), Pops()],
        [nn.Linear(WIDTH, WIDTH), Halves(), First(), nn.ReLU(inplace=True)],
    ):
        partitions = [nn.Sequential(layer) for layer in layers]
        x = torch.randn(4, WIDTH)
        output = run_pipeline(partitions, devices, x, chunks=2, checkpointed=checkpointed)
        assert torch.equal(output, plain(nn.Sequential(*layers), x, 2))


@pytest.mark.parametrize("checkpoint", MODES)
def test_output_that_is_stashed_and_left_alone(checkpoint):
    module = nn.Sequential(Own(view=True), nn.Tanh(), nn.ReLU(inplace=True), Sum())
    model = GPipe(module, [1, 1, 1, 1], devices=["cpu"] * 4, chunks=2, checkpoint=checkpoint)
    x = torch.rand(4, WIDTH)
    assert torch.equal(model(x), plain(model.module, x, 2))


def test_skip_that_was_not_stashed(device):
    """The layer that should have is not run."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mix({"x": "layer"}, {})

        def forward(self, x):
            return x

    layers = nn.Sequential(Block(), mix({}, {"x": "layer"})).to(device)
    model = GPipe(layers, [1, 1], devices=[device] * 2)
    with pytest.raises(RuntimeError, match="must be stashed by an earlier layer.*'x'") as caught:
        model(torch.rand(2, WIDTH, device=device))
    assert note_of(caught.value) == "raised in partition 1, micro-batch 0"


class Block(nn.Module):
    """Stashes and pops within itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Own(view=False), nn.Tanh(), Sum())

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("balance", [[4], [1, 1, 1, 1], [1, 2, 1]])
@pytest.mark.parametrize("checkpoint", MODES)
def test_blocks_that_stash_and_pop_within_themselves(balance, checkpoint):
    """Repeated, copied and shared, without namespaces."""
    block = Block()
    module = nn.Sequential(block, Block(), nn.Sequential(Block(), Block()), copy.deepcopy(block))
    reference = copy.deepcopy(module)
    model = GPipe(module, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=checkpoint)
    x = torch.rand(6, WIDTH)
    output = model(x)
    assert torch.equal(output, plain(reference, x, 3))
    output.sum().backward()
    plain(reference, x, 3).sum().backward()
    for p, q in zip(reference.parameters(), model.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)


def test_layers_of_one_class():
    """As in a U-Net: the last one stashed is the first one popped."""
    spaces = [Namespace() for _ in range(3)]

    @skippable(stash=["x"])
    class Down(nn.Module):
        def forward(self, input):
            yield stash("x", input)
            return input * 2

    @skippable(pop=["x"])
    class Up(nn.Module):
        def forward(self, input):
            return input + (yield pop("x"))

    layers = [Down().isolate(ns) for ns in spaces] + [Up().isolate(ns) for ns in reversed(spaces)]
    x = torch.rand(4, 1)
    model = GPipe(nn.Sequential(*layers), [1] * 6, devices=["cpu"] * 6, chunks=2)
    assert torch.allclose(model(x), 15 * x)


@pytest.mark.parametrize("checkpointed", [0, 3])
def test_devices_between_see_nothing(checkpointed):
    """One copy there, straight from where it was stashed, and one back; none on the way."""
    partitions = [
        nn.Sequential(mix({"x": "layer"}, {})),
        nn.Sequential(nn.Tanh()),
        nn.Sequential(nn.Tanh()),
        nn.Sequential(mix({}, {"x": "layer"})),
    ]
    x = torch.rand(3, WIDTH, requires_grad=True)
    output = run_pipeline(partitions, CPUS, x, chunks=3, checkpointed=checkpointed)
    copies = [node for node in nodes(output) if node.name() == "CopyBackward"]
    # Three boundaries that the value crosses, and the skip.
    assert len(copies) == 3 * 4


@pytest.mark.parametrize("mode", MODES)
def test_error_in_a_generator_names_the_cell(mode):
    @skippable(stash=["x"])
    class Fail(nn.Module):
        def forward(self, input):
            yield stash("x", input)
            raise KeyError("why")

    layers = nn.Sequential(nn.Linear(1, 1), Fail(), mix({}, {"x": "unused"}))
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint=mode)
    with pytest.raises(KeyError, match="why") as caught:
        model(torch.rand(2, 1))
    assert note_of(caught.value) == "raised in partition 1, micro-batch 0, layer 1 (Fail)"


class Watch:
    """The storages of what is stashed, and how many are alive whenever a layer looks."""

    def __init__(self):
        self.refs, self.peak = [], 0

    def alive(self):
        return len({ref.cdata for ref in self.refs if not ref.expired()})

    def layers(self):
        watch = self

        @skippable(stash=["x"])
        class Put(nn.Module):
            def forward(self, input):
                tensor = input * 3
                watch.refs.append(StorageWeakRef(tensor.untyped_storage()))
                yield stash("x", tensor)
                del tensor
                watch.peak = max(watch.peak, watch.alive())
                return input * 2

        @skippable(pop=["x"])
        class Get(nn.Module):
            def forward(self, input):
                x = yield pop("x")
                # Another one, if it came from another device.
                watch.refs.append(StorageWeakRef(x.untyped_storage()))
                # A checkpointed cell that saves nothing would not be computed again.
                return input * torch.ones(1) + x

        return Put(), Get()


@pytest.mark.parametrize("distance", [0, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("mode", ["no grad", *MODES])
def test_how_many_are_alive(mode, chunks, distance):
    """At most one for each micro-batch between the partition that stashes and the one that pops.

    With m micro-batches and d partitions from the one to the other, micro-batch i is stashed in
    clock cycle i and popped in clock cycle i + d, after micro-batch i + d was stashed: these are
    min(m, d + 1), and it is one where both are in one partition. Nobody saves a skip that is only
    added. A checkpointed cell keeps what it pops until it has been computed again: all m, if it
    comes from another partition.
    """
    watch = Watch()
    put, get = watch.layers()
    layers = [put, *[nn.Identity() for _ in range(4)]]
    layers.insert(distance or 1, get)
    balance = [1] * 6 if distance else [2, 1, 1, 1, 1]
    model = GPipe(
        nn.Sequential(*layers),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint="never" if mode == "no grad" else mode,
    )
    x = torch.ones(8, 1, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with torch.set_grad_enabled(mode != "no grad"):
                output = model(x)
            checkpointed = {"always": chunks, "except_last": chunks - 1}.get(mode, 0)
            assert watch.alive() == (checkpointed if distance else 0)
            # Those that a later cell keeps, and those on their way.
            assert watch.peak <= max(min(chunks, distance + 1), checkpointed + 1 if distance else 0)
            if mode in ("no grad", "never"):
                assert watch.peak == min(chunks, distance + 1)
            if mode != "no grad":
                output.sum().backward()
            assert watch.alive() == 0
    finally:
        gc.enable()
    if mode != "no grad":
        assert torch.equal(x.grad, torch.full_like(x, 10.0))


@pytest.mark.parametrize("devices", [CPUS[:1] * 2, CPUS[:2]], ids=["one device", "two devices"])
@pytest.mark.parametrize("balance", [[5], [1, 4], [3, 2]])
@pytest.mark.parametrize("grad", [False, True])
def test_alive_until_its_last_use(devices, balance, grad):
    """Not until the partition is done."""
    watch = Watch()
    put, get = watch.layers()
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(watch.alive())
            return x + 1

    layers = iter([put, Look(), get, Look(), nn.Identity()])
    partitions = [nn.Sequential(*[next(layers) for _ in range(size)]) for size in balance]
    gc.disable()
    try:
        with torch.set_grad_enabled(grad):
            run_pipeline(partitions, devices[: len(balance)], torch.ones(1, 1, requires_grad=True))
    finally:
        gc.enable()
    # What has been copied is alive there only.
    assert seen == [0 if balance[0] == 1 and devices[0] != devices[1] else 1, 0]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_alive_after_a_failure(mode):
    watch = Watch()
    put, get = watch.layers()

    class Fail(nn.Module):
        def forward(self, x):
            if x.max() > 2:
                raise KeyError
            return x

    model = GPipe(
        nn.Sequential(put, Fail(), get), [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=mode
    )
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError):
            model(torch.arange(4.0)[:, None].requires_grad_())
        assert len(watch.refs) > 2
        assert watch.alive() == 0
    finally:
        gc.enable()
