"""Private names of PyTorch: a canary for each, and the features that fail without one."""

import warnings

import pytest
import torch
from torch import nn

from tests.support import fresh
from torchgpipe import GPipe, _torch
from torchgpipe._torch import dynamo, names
from torchgpipe._torch.names import ATTRIBUTES, NAMES, has, look_up


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


@pytest.mark.parametrize("name", NAMES)
def test_canary(name):
    """PyTorch has the name. If this fails, put the new name into the table."""
    assert has(name)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_canary_of_attributes(attribute):
    owners = (nn.Linear(1, 1), nn.BatchNorm1d(1), torch.empty(1))
    if attribute in ("_metadata", "_torchdynamo_disable", "_torchdynamo_disable_msg"):
        owners = (nn.Linear(1, 1).state_dict(), torch.compiler.disable(lambda: None))
    elif attribute in ("_indices", "_values"):
        owners = (torch.empty(1).to_sparse(),)
    elif attribute == "_forward_cls":
        owners = (type(Doubled.apply(torch.empty(1, requires_grad=True)).grad_fn),)
    elif attribute in ("_sequence_nr", "_register_hook_dict", "_input_metadata"):
        owners = (torch.empty(1, requires_grad=True).exp().grad_fn,)
    assert any(hasattr(owner, attribute) for owner in owners)


@pytest.fixture
def missing(monkeypatch):
    """Make PyTorch lack a name, for all later look-ups."""

    def missing(name):
        entry = NAMES[name]
        monkeypatch.setitem(NAMES, name, entry._replace(path=f"{entry.path}_that_is_gone"))
        if NAMES[name].instead is not None:
            monkeypatch.setitem(vars(_torch), name, look_up(name))
        elif name in vars(_torch):
            monkeypatch.delitem(vars(_torch), name)

    return missing


def train(**options):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 1))
    model = GPipe(layers, [2, 2], devices=["cpu", "cpu"], chunks=2, **options)
    model(torch.ones(4, 2)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


#: Names that every training needs.
NEEDED = {"is_multithreading_enabled", "count_function_modes", "BatchNorm"}


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_without(name, missing):
    if name in NEEDED:
        missing(name)
        with pytest.raises(RuntimeError, match="use a tested version"):
            train()
        return
    expected = train(checkpoint="always")
    missing(name)
    with warnings.catch_warnings():
        # It says that a feature cannot be seen.
        warnings.simplefilter("ignore", RuntimeWarning)
        assert all(map(torch.equal, train(checkpoint="always"), expected))


def test_importing_goes_on_without_any():
    program = """
import sys, torch
for name in [x for x in sys.modules if x.startswith("torchgpipe")]:
    del sys.modules[name]
gone = [name for name in vars(torch._C) if name.startswith("_accelerator") or "stack" in name]
for name in gone:
    delattr(torch._C, name)
import torchgpipe
"""
    assert fresh.run(program) == (0, "", "")


#: Features, and a name that each cannot do without.
FEATURES = {
    "containers": lambda: GPipe(nn.Sequential(nn.Identity()), [1])([torch.ones(1)]),
    "function_mode_at": lambda: with_device(),
    "dispatch_mode_at": lambda: with_dispatch_mode(),
    "DispatchMode": lambda: profile(),
    "set_code_strategy": lambda: compiled(),
}


def with_device():
    with torch.device("cpu"):
        train()


def with_dispatch_mode():
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        train()


def profile():
    from torchgpipe.balance.profile import profile_layers
    from torchgpipe.planner import sandbox

    # An earlier test may have made the class of the mode.
    sandbox._mode.cache_clear()
    profile_layers(nn.Sequential(nn.Linear(1, 1)), torch.ones(1, 1), timeout=0, device="cpu")


def compiled():
    dynamo.uncompiled(lambda: None)
    layers = nn.Sequential(nn.Linear(1, 1))
    layers[0].compile(backend="eager")
    GPipe(layers, [1], devices=["cpu"])(torch.ones(1, 1))


@pytest.mark.parametrize("name", FEATURES)
def test_feature_without_its_name_is_an_error_that_names_it(name, missing, monkeypatch):
    missing(name)
    monkeypatch.setattr(dynamo._preparation, "done", False)
    path = NAMES[name].path.replace(":", ".")
    with pytest.raises(RuntimeError) as caught:
        FEATURES[name]()
    assert path in str(caught.value)
    assert torch.__version__ in str(caught.value)
    assert ", ".join(names.TESTED) in str(caught.value)


@pytest.mark.parametrize("name", ["count_dispatch_modes", "top_hooks", "transform_level"])
def test_feature_that_cannot_be_seen_is_told(name, missing):
    missing(name)
    with pytest.warns(RuntimeWarning, match="cannot be seen with this PyTorch"):
        train()


def test_uses_of_a_storage():
    x = torch.ones(2)
    storage = x.untyped_storage()
    alone = _torch.count_uses(storage._cdata)
    y = x.view(2)
    assert _torch.count_uses(storage._cdata) == alone + 1
    del y, x
    assert _torch.count_uses(storage._cdata) == 1


def test_uses_of_a_storage_without_their_name(missing):
    missing("count_uses")
    # Neither of one tensor, nor of more.
    uses = _torch.count_uses(torch.ones(2).untyped_storage()._cdata)
    assert uses != 1
    assert not uses > 1
