"""Sources: generators of cells, and the default one while it is watched."""

import pytest
import torch

from torchgpipe.ambient.generators import Elsewhere, Own, Watched


@pytest.fixture(autouse=True)
def default():
    """Put the default generator back."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def state_of(seed):
    return torch.Generator().manual_seed(seed).get_state()


def draw(source):
    found = torch.rand(3, generator=source.begin() or torch.default_generator)
    source.end()
    return found


def test_a_generator_of_its_own():
    own = Own(state_of(3))
    # Nothing is copied until something is drawn.
    assert own.get_state() is own.get_state()
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        assert torch.equal(draw(own), torch.rand(3, generator=generator))
    assert torch.equal(own.get_state(), generator.get_state())
    own.set_state(state_of(3))
    assert torch.equal(draw(own), torch.rand(3, generator=generator.manual_seed(3)))


@pytest.mark.parametrize(
    ("use", "touched"),
    [
        (lambda: None, False),
        (torch.get_rng_state, False),
        (lambda: torch.manual_seed(3), True),
        (lambda: torch.set_rng_state(state_of(3)), True),
        # It is no draw of the source's.
        (lambda: torch.rand(3), True),
    ],
)
def test_the_default_generator_is_watched(use, touched):
    watched = Watched()
    watched.start()
    draw(watched)
    use()
    draw(watched)
    assert watched.touched == touched
    watched = Watched()
    watched.start()
    watched.set_state(state_of(4))
    assert torch.equal(watched.get_state(), state_of(4))
    draw(watched)
    use()
    watched.look()
    assert watched.touched == touched


def test_threads_of_autograd_draw_from_the_default_generator():
    assert Elsewhere().begin() is None
