"""States of random number generators, and the numbers of micro-batches."""

import threading

import pytest
import torch

from torchgpipe.ambient.generators import get_state, set_state
from torchgpipe.ambient.random_numbers import FirstNumbers, StepNumbers

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.mark.parametrize("draws", [False, True])
def test_a_cell_and_its_checkpoint_read_a_state_once(monkeypatch, draws):
    reads = []
    monkeypatch.setattr(
        "torchgpipe.ambient.random_numbers.get_state",
        lambda device: reads.append(device) or get_state(device),
    )
    numbers = StepNumbers([CPU], 1)
    with numbers:
        reads.clear()
        cell = numbers.of(0, CPU)
        with cell:
            before = get_state(CPU)
            state = FirstNumbers(CPU, cell)
            if draws:
                torch.rand(3)
            state.end_first_run(cell)
            after = get_state(CPU)
        assert reads == [CPU]
        assert torch.equal(numbers.states[0]["cpu"], after)
        assert numbers.drawn == state.drawn == draws
        assert not draws or torch.equal(state.before[CPU], before)


def test_other_numbers_are_an_error():
    state = FirstNumbers(CPU)
    torch.rand(3)
    state.end_first_run()
    message = r"same random numbers.*generator: cpu\)"
    with pytest.raises(RuntimeError, match=message), state.restored():
        torch.rand(4)


def test_numbers_of_another_thread_are_none():
    """Another thread drew during the computation, which drew no numbers itself."""
    state = FirstNumbers(CPU)
    thread = threading.Thread(target=torch.rand, args=(3,))
    thread.start()
    thread.join()
    state.end_first_run()
    with state.restored():
        pass


def drawn(draws, i, device=CPU):
    with draws.of(i, device):
        return torch.rand(3, device=CPU if device == META else device)


def test_meta_device_has_the_generator_of_the_cpu():
    state = get_state(CPU)
    expected = torch.rand(3), torch.rand(3), torch.rand(3)
    set_state(CPU, state)
    draws = StepNumbers([META, CPU], 1)
    with draws:
        found = drawn(draws, 0, META), drawn(draws, 0, CPU)
    assert all(map(torch.equal, expected, [*found, torch.rand(3)]))


def test_who_has_drawn():
    numbers = StepNumbers([CPU], 3)
    with numbers:
        assert not numbers.drawn
        drawn(numbers, 1)
        assert [numbers.has_drawn(i) for i in range(3)] == [False, True, False]
        # Another process goes on with two of them, and one comes back.
        for i in (1, 2):
            numbers.go_on(i, {"cpu": torch.Generator().manual_seed(i).get_state()})
        assert [numbers.has_drawn(i) for i in range(3)] == [False, True, False]
        assert numbers.drawn
