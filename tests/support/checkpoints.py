"""Checkpoints that fail as those of PyTorch do before 2.13."""

from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operators", "old_checkpoint"]


class Operators(TorchDispatchMode):
    """A mode that calls each operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def _entered():
    with Operators(), saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


_SOURCE = """
def old_checkpoint(function, *args):
    generator = entered()
    next(generator)
    found = function(*args)
    next(generator, None)
    return found
"""

_globals = {"__name__": "torch.utils.checkpoint", "entered": _entered}
exec(_SOURCE, _globals)

#: Calls a function in modes that a generator leaves, which an error in the function keeps waiting.
old_checkpoint = _globals["old_checkpoint"]
