"""Random numbers: by the seed and the number of micro-batches, and by nothing else."""

import torch
from torch import nn

from tests.contract.comparing import mean_of_squares
from tests.contract.promises import promise
from tests.contract.wrapped import plain_step
from tests.support.helpers import MODES, Apply
from torchgpipe import GPipe

#: Layers that draw, for inputs of shape (rows, 3, 4).
LAYERS = {
    "dropout": lambda: nn.Dropout(0.4),
    "in place": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4, inplace=True)),
    "noise": lambda: Apply(lambda x: x + torch.rand_like(x)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
}


def drawing(name, before=0, after=0):
    """Layers that draw, with others around them, which shift what comes to which device."""
    inner = [nn.Linear(4, 4), LAYERS[name](), nn.Linear(4, 4), LAYERS[name]()]
    return nn.Sequential(
        *[nn.Identity() for _ in range(before)], *inner, *[nn.Identity() for _ in range(after)]
    )


def steps(model, x, seed=1, count=2):
    """All that steps compute, and where they leave the generator."""
    torch.manual_seed(seed)
    found = []
    for _ in range(count):
        model.zero_grad()
        found += [model.step(x), model.output]
        found += [g.clone() for _, g in sorted(model.grads.items()) if g is not None]
    return [*found, torch.get_rng_state(), torch.rand(3)]


def same(found, expected):
    assert len(found) == len(expected)
    return all(map(torch.equal, found, expected))


@promise("Dropout, and whatever draws, is bit for bit the same in all checkpoint modes.")
def modes(make):
    x = torch.randn(5, 3, 4)
    for name in make.some(LAYERS):
        layers = drawing(name)
        one, *others = [
            steps(make(layers, loss=mean_of_squares, chunks=3, mode=mode), x) for mode in MODES
        ]
        assert all(same(found, one) for found in others), name


@promise("A seed gives the same steps again, and another seed other ones.", modes=True)
def seeds(make):
    layers, x = drawing("dropout"), torch.randn(5, 3, 4)
    one, again, other = [
        steps(make(layers, loss=mean_of_squares, chunks=3), x, seed) for seed in (1, 1, 2)
    ]
    assert same(one, again)
    assert not torch.equal(one[1], other[1])


@promise(
    "The first micro-batch draws what the plain model draws, and with one micro-batch all is drawn "
    "as without a wrapper.",
    modes=True,
)
def as_plain(make):
    layers, x = drawing("dropout"), torch.randn(6, 3, 4)
    model = make(layers, loss=mean_of_squares, chunks=1)
    torch.manual_seed(1)
    for _ in range(2):
        state = torch.get_rng_state()
        expected = plain_step(layers, x, loss=mean_of_squares)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        torch.testing.assert_close(model.step(x), expected)
        assert torch.equal(torch.get_rng_state(), after)
    model = make(layers, loss=mean_of_squares, chunks=3)
    torch.manual_seed(1)
    model.step(x)
    torch.manual_seed(1)
    torch.testing.assert_close(model.output[:2], layers(x[:2]).detach())


@promise("Each step goes on with the caller's generator, whose state may be saved and put back.")
def state_of_the_generator(make):
    layers, x = drawing("dropout"), torch.randn(5, 3, 4)
    model = make(layers, loss=mean_of_squares, chunks=3)
    torch.manual_seed(1)
    outputs, states = [], []
    for _ in range(3):
        states.append(torch.get_rng_state())
        model.step(x)
        outputs.append(model.output)
    assert len({bytes(x.numpy()) for x in states}) == 3
    assert not torch.equal(outputs[0], outputs[1])
    torch.set_rng_state(states[1])
    model.step(x)
    assert torch.equal(model.output, outputs[1])


@promise("Results depend neither on the devices of layers, nor on the wrapper.", modes=True)
def balances(make):
    x = torch.randn(5, 3, 4)
    found = []
    for before, after in make.some([(0, 0), (2, 0), (0, 2), (0, 3)]):
        torch.manual_seed(0)
        layers = drawing("dropout", before, after)
        found.append(steps(make(layers, loss=mean_of_squares, chunks=3), x))
    torch.manual_seed(0)
    layers = drawing("dropout")
    one = GPipe(layers, [4], devices=["cpu"], chunks=3, checkpoint="never")
    torch.manual_seed(1)
    expected = [one(x).detach() for _ in range(2)]
    for each in found:
        # Two steps, with a loss, an output and the gradients each.
        assert torch.equal(each[1], expected[0])
        assert torch.equal(each[len(each) // 2], expected[1])
        assert same(each[:-2], found[0][:-2])


@promise("Numbers differ between micro-batches, between layers and between steps.", modes=True)
def other_numbers(make):
    draw = Apply(lambda x: torch.cat([x, torch.rand(len(x), 50).double()], dim=1))
    layers = nn.Sequential(draw, nn.Identity(), draw, nn.Identity())
    model = make(layers, chunks=4, loss=mean_of_squares)
    drawn = []
    for _ in range(3):
        model.step(torch.empty(8, 0).double())
        drawn.append(model.output)
    assert len(torch.cat(drawn).unique()) == 3 * 8 * 100


@promise("Where nothing is drawn, as in eval mode, the generator stays as it is.", modes=True)
def nothing_drawn(make):
    x = torch.randn(5, 3, 4)
    for layers in (drawing("dropout").eval(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        model = make(layers, loss=mean_of_squares, chunks=3)
        before = torch.get_rng_state()
        for _ in range(2):
            model.step(x)
            model.forward(x)
            assert torch.equal(before, torch.get_rng_state())


class Selective(nn.Module):
    """A layer that draws for some rows only."""

    def forward(self, x):
        return x + torch.rand_like(x) if (x > 0).all() else x


@promise("The generator goes on where only a later micro-batch has drawn.", modes=True, eager=True)
def drawn_late(make):
    layers = nn.Sequential(nn.Identity(), Selective(), nn.Identity(), Selective())
    x = torch.ones(4, 1)
    x[0] = -1
    model = make(layers, loss=mean_of_squares, chunks=4)
    states, outputs = [torch.get_rng_state()], []
    for _ in range(3):
        model.step(x)
        states.append(torch.get_rng_state())
        outputs.append(model.output[1:])
    assert len({bytes(state.numpy()) for state in states}) == 4
    assert len(torch.cat(outputs).unique()) == 9


@promise("Dropout layers alone may be in train mode, in a model that does not train.", modes=True)
def monte_carlo_dropout(make):
    layers, x = drawing("dropout").eval(), torch.randn(6, 3, 4)
    model = make(layers, loss=mean_of_squares, chunks=3)
    for layer in model.model.modules():
        layer.train(isinstance(layer, nn.Dropout))
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append([model.forward(x), model.forward(x), torch.get_rng_state()])
    assert same(found[0], found[2])
    assert not torch.equal(*found[0][:2])
    assert not torch.equal(found[0][0], found[1][0])
