"""States of random number generators."""

import threading

import pytest
import torch

from torchgpipe.rng import RNGState, _set

CPU = torch.device("cpu")


def draw(device):
    return torch.rand(3), torch.rand(3, device=device)


def test_restored(device):
    state = RNGState(device)
    first = draw(device)
    state.settle()
    draw(device)
    now = RNGState(device)
    after = draw(device)

    _set(now.before)
    with state.restored():
        again = draw(device)
    # As if nothing had been drawn within the block.
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, after, draw(device)))


def test_restored_after_an_exception(device):
    state = RNGState(device)
    draw(device)
    state.settle()
    now = RNGState(device)
    after = draw(device)
    _set(now.before)
    with pytest.raises(KeyError), state.restored():
        draw(device)
        raise KeyError
    assert all(map(torch.equal, after, draw(device)))


def test_generator_that_is_not_drawn_from_is_left_alone():
    state = RNGState(CPU)
    state.settle()
    assert state.before == {}
    with state.restored():
        inside = torch.rand(3)
    assert not torch.equal(inside, torch.rand(3))


def test_other_numbers_are_an_error():
    state = RNGState(CPU)
    torch.rand(3)
    state.settle()
    message = r"same random numbers.*generator: cpu\)"
    with pytest.raises(RuntimeError, match=message), state.restored():
        torch.rand(4)


def test_numbers_of_another_thread_are_none():
    """They were drawn during the computation, which drew none itself."""
    state = RNGState(CPU)
    thread = threading.Thread(target=torch.rand, args=(3,))
    thread.start()
    thread.join()
    state.settle()
    with state.restored():
        pass


def test_within_itself():
    outer = RNGState(CPU)
    torch.rand(1)
    inner = RNGState(CPU)
    first = torch.rand(3)
    inner.settle()
    outer.settle()
    with outer.restored():
        torch.rand(1)
        with inner.restored():
            assert torch.equal(first, torch.rand(3))
        torch.rand(3)


def test_one_thread_at_a_time_turns_the_cpu_generator_back():
    states, draws = [], {}
    for k in range(4):
        states.append(RNGState(CPU))
        draws[k] = [torch.rand(50)]
        states[k].settle()
    before = torch.get_rng_state()

    def repeat(k):
        for _ in range(20):
            with states[k].restored():
                draws[k].append(torch.rand(50))

    threads = [threading.Thread(target=repeat, args=(k,)) for k in draws]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(first, x) for first, *rest in draws.values() for x in rest)
    assert torch.equal(before, torch.get_rng_state())
