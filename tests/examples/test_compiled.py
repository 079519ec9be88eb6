"""The example of compiled blocks, with inductor where there is a C++ compiler."""

import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from examples import compiled
from tests.support.size import soak

# The compiler reads the gradient of every input, also of one that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
#: Inductor imports what PyTorch itself calls deprecated.
deprecated = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture
def inductor(tmp_path, monkeypatch):
    """Use an empty cache of compiled code, and skip without a C++ compiler."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)


# What differs from the other backend is PyTorch's own, and a C++ compiler takes long.
@soak
@deprecated
@pytest.mark.usefixtures("inductor")
def test_inductor(capsys):
    compiled.main(["--steps", "8", "--checkpoint", "always", "--chunks", "2"])
    out = capsys.readouterr().out
    assert "1 after the last" in out
    assert float(out.split("difference  ")[1].split()[0]) < 1e-3


@soak
def test_falling(capsys):
    assert compiled.main(["--backend", "aot_eager"]) == 0
    assert compiled.main(["--backend", "aot_eager", "--steps", "2"]) == 1
    assert "Not as it should be" in capsys.readouterr().out
