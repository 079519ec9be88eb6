"""The numbers of nodes."""

import threading

import torch

from torchgpipe.autograd.nodes import next_number, number_from


def node():
    return torch.zeros((), requires_grad=True).view(()).grad_fn._sequence_nr()


def test_numbers():
    first = next_number()
    assert node() == first
    number_from(first + 10)
    assert node() == first + 10
    # What is after already stays where it is.
    number_from(first)
    assert node() == first + 11


def test_each_thread_counts_for_itself():
    number_from(next_number() + 5)
    found = []
    thread = threading.Thread(target=lambda: found.append(next_number()))
    thread.start()
    thread.join()
    assert found == [0]


def test_without_grad_nothing_is_numbered():
    first = next_number()
    with torch.no_grad():
        number_from(first + 10)
    assert next_number() == first
