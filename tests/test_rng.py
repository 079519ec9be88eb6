"""States of random number generators."""

import threading

import torch

from torchgpipe.rng import RNGState


def draw(device):
    return torch.rand(3), torch.rand(3, device=device)


def test_restored(device):
    state = RNGState(device)
    first = draw(device)
    draw(device)
    expected = RNGState(device)
    after = draw(device)

    expected._set()
    with state.restored():
        again = draw(device)
    # As if nothing had been drawn within the block.
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, after, draw(device)))


def test_cpu_state_is_forgotten_if_unused(device):
    unused = RNGState(device)
    unused.forget_unused()
    assert unused.cpu is None

    used = RNGState(device)
    torch.rand(1)
    used.forget_unused()
    assert used.cpu is not None


def test_unused_cpu_state_is_left_alone(device):
    state = RNGState(device)
    state.forget_unused()
    with state.restored():
        inside = torch.rand(3)
    assert not torch.equal(inside, torch.rand(3))


def test_one_thread_at_a_time_turns_the_cpu_generator_back():
    states, draws = [], {}
    for k in range(4):
        states.append(RNGState(torch.device("cpu")))
        draws[k] = [torch.rand(50)]
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
