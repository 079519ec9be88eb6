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


@pytest.mark.parametrize(
    ("model", "expected"), [(nn.Linear(1, 1), False), (Named(), True), (Any(), False)]
)
def test_takes_cache(model, expected):
    assert takes_cache(model) is expected
    assert takes_cache(Configured())


def test_without_cache():
    given = {"x": 1}
    assert without_cache(given) == {"x": 1, "use_cache": False}
    assert given == {"x": 1}
    assert without_cache({"use_cache": True}) == {"use_cache": True}
    assert without_cache({"use_cache": None}) == {"use_cache": False}
