"""Caches of models that write text are turned off, unless a call says something else."""

from types import SimpleNamespace

import pytest
from torch import nn

from torchgpipe.mapped.hugging_face import takes_cache, without_cache


class Named(nn.Module):
    def forward(self, x, use_cache=None):
        return x


class Any(nn.Module):
    def forward(self, x, **kwargs):
        return x


class Configured(Any):
    config = SimpleNamespace(use_cache=True)


class Composed(Any):
    """A model of several, whose config knows itself, too."""

    def __init__(self, **parts):
        super().__init__()
        self.config = SimpleNamespace(sizes=[1, 2], kind=str, **parts)
        self.config.own = self.config


@pytest.mark.parametrize(
    ("model", "expected"), [(nn.Linear(1, 1), False), (Named(), True), (Any(), False)]
)
def test_takes_cache(model, expected):
    assert takes_cache(model) is expected
    assert takes_cache(Configured())


def test_configs_within_the_config():
    inner = SimpleNamespace(use_cache=True)
    assert takes_cache(Composed(any_name=inner))
    assert takes_cache(Composed(parts={"text": [SimpleNamespace(deep=inner)]}))
    assert not takes_cache(Composed(vision=SimpleNamespace(width=2)))


def test_without_cache():
    given = {"x": 1}
    assert without_cache(given) == {"x": 1, "use_cache": False}
    assert given == {"x": 1}
    assert without_cache({"use_cache": True}) == {"use_cache": True}
    assert without_cache({"use_cache": None}) == {"use_cache": False}
