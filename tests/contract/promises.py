"""The list of promises, and how one is added.

A promise is a sentence for users, and a function that checks it with any wrapper::

    @promise("Gradients are those of the plain model.")
    def gradients(make):
        model = make(layers)
        ...

The function gets a :class:`~tests.contract.wrapped.Maker`, whose wrapper, checkpoint mode and
devices it does not know. Where a wrapper rightly differs, the promise says so with the reason, and
with what it does instead: the check fails there, with an error or a difference that is named. So
nothing that a wrapper does not do is silent, and no reason outlives what it explains.
"""

from contextlib import ExitStack
from importlib import import_module
from typing import NamedTuple

import pytest

from torchgpipe._torch.dynamo import VERSION

#: The wrappers: the columns of the table. Names of several runs of one begin with its name.
WRAPPERS = ("GPipe", "ScheduledLoss", "ScheduledLoss of graphs", "MappedGPipe", "Pipe")
GRAPHS = "ScheduledLoss of graphs"
#: The checkpoint mode under which PyTorch counts operators, and keeps some results.
POLICY = "policy"

#: The modules of promises, which are the sections of the table.
SECTIONS = (
    "values",
    "tensors",
    "batches",
    "layers",
    "losses",
    "state_of_layers",
    "random",
    "hooks",
    "autograd",
    "modes",
    "compile",
    "warnings",
    "errors",
    "copies",
    "state",
    "memory",
)


class Otherwise(NamedTuple):
    """A difference of a wrapper, which does something else than to keep a promise.

    Args:
        reason: why, as the table says it.
        match: a pattern that the error of the check has then.
        since: the version of PyTorch with which that began.
    """

    reason: str
    match: str
    since: tuple = (0,)


class Promise(NamedTuple):
    """A promise.

    Args:
        sentence: it, in the words of the table.
        check: checks it.
        otherwise: for each wrapper that rightly differs, how; or for the mode of a policy.
        modes: whether the checkpoint mode matters.
        devices: whether it matters that devices are accelerators.
        fails: whether a step fails, after which processes are not connected any more.
        eager: whether stages that should be graphs are eager, as a warning says.
    """

    sentence: str
    check: object
    otherwise: dict
    modes: bool
    devices: bool
    fails: bool
    eager: bool

    def fails_under(self, mode):
        """Whether a step fails, since that is the promise or what a policy does instead."""
        return self.fails or (mode == POLICY and self.instead(POLICY) is not None)

    def instead(self, *names):
        """Find what a wrapper or a mode among some names does instead; None if nothing."""
        found = [self.otherwise[name] for name in names if name in self.otherwise]
        return next((x for x in found if x.since <= VERSION), None)

    @property
    def name(self):
        return f"{self.check.__module__.rpartition('.')[2]}:{self.check.__name__}"


#: All promises, by name.
PROMISES = {}


def promise(sentence, *, otherwise=None, modes=False, devices=False, fails=False, eager=False):
    """Add a function to the list of promises: see :class:`Promise`."""

    def add(check):
        found = Promise(sentence, check, otherwise or {}, modes, devices, fails, eager)
        assert set(found.otherwise) <= {*WRAPPERS, POLICY}
        assert found.name not in PROMISES
        PROMISES[found.name] = found
        return check

    return add


def keeps(name, make):
    """Check that a wrapper keeps a promise, or does what it says that it does instead."""
    found = PROMISES[name]
    other = found.instead(make.wrapper, make.mode)
    with ExitStack() as stack:
        if found.eager and make.wrapper == GRAPHS:
            stack.enter_context(pytest.warns(UserWarning, match="runs eagerly"))
        if other is not None:
            errors = (Exception, pytest.fail.Exception)
            stack.enter_context(pytest.raises(errors, match=other.match))
        found.check(make)


for _section in SECTIONS:
    import_module(f"tests.contract.{_section}")
