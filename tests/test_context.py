"""The modes that are carried from thread to thread."""

import threading
from contextlib import ExitStack

import pytest
import torch

from torchgpipe.context import Context

MODES = {
    "default": [],
    "no_grad": [torch.no_grad],
    "inference_mode": [torch.inference_mode],
    "autocast": [lambda: torch.autocast("cpu", torch.bfloat16)],
    "autocast off within autocast": [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False),
    ],
    "autocast in float16, without cache": [
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)
    ],
    "no_grad and autocast": [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    "grad within inference_mode": [torch.inference_mode, torch.enable_grad],
}


def entered(name):
    stack = ExitStack()
    for mode in MODES[name]:
        stack.enter_context(mode())
    return stack


def same(a, b):
    """Equal but for how autocast, where it is off, would be if it were on."""

    def essential(context):
        return (
            context.grad,
            context.inference,
            [x if x.enabled else x.kind for x in context.autocast],
        )

    return essential(a) == essential(b)


@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("outer", MODES)
def test_carried_into_any_other(inner, outer):
    with entered(inner):
        context = Context.capture()
    with entered(outer):
        before = Context.capture()
        with context.entered():
            assert same(Context.capture(), context)
        assert Context.capture() == before


@pytest.mark.parametrize("name", MODES)
def test_carried_to_another_thread(name):
    found = []

    def run():
        with context.entered():
            found.append(Context.capture())

    with entered(name):
        context = Context.capture()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert same(found[0], context)


def test_accelerator_is_among_the_autocast_types(device):
    with torch.autocast(device.type, torch.bfloat16):
        context = Context.capture()
    assert [x.enabled for x in context.autocast if x.kind == device.type] == [True]


@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_left_by_an_exception(error):
    with torch.no_grad():
        context = Context.capture()
    raised = error("x")
    with pytest.raises(error) as caught, context.entered():
        raise raised
    assert caught.value is raised
    assert torch.is_grad_enabled()
