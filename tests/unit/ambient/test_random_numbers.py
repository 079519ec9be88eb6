"""States of random number generators, and the numbers of micro-batches."""

import threading

import pytest
import torch

from torchgpipe.ambient.random_numbers import FirstNumbers, StepNumbers, _set, get_state, set_state

CPU = torch.device("cpu")
META = torch.device("meta")


def draw(device):
    return torch.rand(3), torch.rand(3, device=device)


def test_restored(device):
    state = FirstNumbers(device)
    first = draw(device)
    state.settle()
    draw(device)
    now = FirstNumbers(device)
    after = draw(device)

    _set(now.before)
    with state.restored():
        again = draw(device)
    # As if nothing had been drawn within the block.
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, after, draw(device)))


def test_restored_after_an_exception(device):
    state = FirstNumbers(device)
    draw(device)
    state.settle()
    now = FirstNumbers(device)
    after = draw(device)
    _set(now.before)
    with pytest.raises(KeyError), state.restored():
        draw(device)
        raise KeyError
    assert all(map(torch.equal, after, draw(device)))


def test_generator_that_is_not_drawn_from_is_left_alone():
    state = FirstNumbers(CPU)
    state.settle()
    assert state.before == {}
    with state.restored():
        inside = torch.rand(3)
    assert not torch.equal(inside, torch.rand(3))


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
            state.settle(cell)
            after = get_state(CPU)
        assert reads == [CPU]
        assert torch.equal(numbers.states[0]["cpu"], after)
        assert numbers.drawn == state.drawn == draws
        assert not draws or torch.equal(state.before[CPU], before)


def test_other_numbers_are_an_error():
    state = FirstNumbers(CPU)
    torch.rand(3)
    state.settle()
    message = r"same random numbers.*generator: cpu\)"
    with pytest.raises(RuntimeError, match=message), state.restored():
        torch.rand(4)


def test_numbers_of_another_thread_are_none():
    """Another thread drew during the computation, which drew no numbers itself."""
    state = FirstNumbers(CPU)
    thread = threading.Thread(target=torch.rand, args=(3,))
    thread.start()
    thread.join()
    state.settle()
    with state.restored():
        pass


def test_within_itself():
    outer = FirstNumbers(CPU)
    torch.rand(1)
    inner = FirstNumbers(CPU)
    first = torch.rand(3)
    inner.settle()
    outer.settle()
    with outer.restored():
        torch.rand(1)
        with inner.restored():
            assert torch.equal(first, torch.rand(3))
        torch.rand(3)


def test_state_of_a_generator(device):
    state = get_state(device)
    first = torch.rand(3, device=device)
    assert not torch.equal(state, get_state(device))
    set_state(device, state)
    assert torch.equal(first, torch.rand(3, device=device))


def drawn(draws, i, device=CPU):
    with draws.of(i, device):
        return torch.rand(3, device=CPU if device == META else device)


def test_first_micro_batch_goes_on_with_the_numbers_of_the_caller(device):
    state = get_state(device)
    expected = [torch.rand(3, device=device) for _ in range(3)]
    set_state(device, state)
    draws = StepNumbers([device], 3)
    with draws:
        found = [drawn(draws, i, device) for i in (0, 1, 2, 0, 1)]
    found.append(torch.rand(3, device=device))
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[3])
    assert torch.equal(expected[2], found[5])
    assert len(torch.cat(found).unique()) == 18


def test_micro_batches_draw_the_same_in_any_order():
    state, found = get_state(CPU), []
    for order in ([0, 1, 2, 0, 1, 2], [2, 1, 0, 0, 1, 2], [0, 0, 1, 1, 2, 2]):
        set_state(CPU, state)
        draws = StepNumbers([CPU, CPU], 3)
        with draws:
            numbers = [(i, drawn(draws, i).tolist()) for i in order]
        found.append([*sorted(numbers, key=lambda each: each[0]), torch.rand(3).tolist()])
    assert found[0] == found[1] == found[2]


def test_what_is_drawn_between_cells_counts_for_nobody():
    state, found = get_state(CPU), []
    for between in (0, 5):
        set_state(CPU, state)
        draws = StepNumbers([CPU], 2)
        with draws:
            numbers = []
            for i in (0, 1, 0):
                torch.rand(between)
                numbers.append(drawn(draws, i))
        found.append([*numbers, torch.rand(3)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("m", [1, 2, 8])
def test_caller_finds_its_generator_where_nothing_was_drawn(m, device):
    state = get_state(device)
    draws = StepNumbers([device], m)
    with draws:
        for i in range(m):
            with draws.of(i, device):
                pass
    assert torch.equal(state, get_state(device))


@pytest.mark.parametrize("i", [1, 2])
def test_caller_goes_on_elsewhere_where_another_micro_batch_drew(i):
    state = get_state(CPU)
    draws = StepNumbers([CPU], 3)
    found = []
    for _ in range(2):
        with draws:
            found += [drawn(draws, i)]
        found += [get_state(CPU)]
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(state, found[1])
    assert not torch.equal(found[1], found[3])


def test_caller_finds_its_generator_after_an_exception(device):
    state = get_state(device)
    draws = StepNumbers([device], 2)
    with pytest.raises(KeyError), draws:
        drawn(draws, 1, device)
        with draws.of(0, device):
            torch.rand(3, device=device)
            raise KeyError
    assert torch.equal(state, get_state(device))


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
