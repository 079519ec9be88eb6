"""Loading of virtual accelerators into a process, and its errors.

This process must not load them, since the other tests are about PyTorch alone. Programs that
load them run in processes of their own.
"""

import os
import runpy
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support import fresh
from tests.support.size import soak
from torchgpipe import _torch, testing
from torchgpipe.testing import loading as build

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def python():
    """Run a program that loads virtual accelerators."""
    try:
        build.build()
    except testing.UnavailableError as error:
        if os.environ.get("TORCHGPIPE_REQUIRE_VIRTUAL") == "1":
            raise
        pytest.skip(str(error))

    def python(program):
        status, out, err = fresh.run(program)
        assert status == 0, err
        return out

    return python


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torchgpipe"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make a program that takes the place of the compiler."""

    def program(body):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return lambda: len((tmp_path / "calls").read_text().splitlines())

    return program


#: A program that makes the file that it is told to.
COMPILES = 'while [ "$1" != "-o" ]; do shift; done; echo library > "$2"'


def test_too_late(python):
    python("""
import torch
from torch import nn
from torchgpipe import GPipe
from torchgpipe.testing import UnavailableError, load

def train(**arguments):
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [1, 1], chunks=2, **arguments)
    model(torch.ones(4, 2, requires_grad=True)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())

train(devices=["cpu", "cpu"])
for _ in range(2):
    try:
        load(2)
    except UnavailableError as error:
        message = str(error)
    else:
        raise AssertionError("it loaded")
    assert "before the first backward" in message
    assert "call torchgpipe.testing.load() at the start of the process" in message
assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
assert not hasattr(torch, "virtual")
train(devices=["cpu", "cpu"])
train()
""")


def test_observing_before_loading():
    with pytest.raises(RuntimeError, match="no virtual .* yet; call torchgpipe.testing.load()"):
        testing.observe().__enter__()


@pytest.mark.parametrize("devices", [0, 65, -1, 2.0, "2", True, None])
def test_counts_of_devices(devices):
    with pytest.raises(ValueError, match="1 to 64 virtual devices"):
        testing.load(devices)


def test_the_place_is_taken(monkeypatch):
    monkeypatch.setattr(_torch, "backend_name", lambda: "npu")
    with pytest.raises(testing.UnavailableError, match=r"is taken \(backend: npu\); use a process"):
        testing.load()


def test_library_that_cannot_be_loaded(cache, program):
    program(COMPILES)
    with pytest.raises(testing.UnavailableError, match=r"\(library: .*\); delete it, or set XDG_"):
        testing.load()


def test_compiled_once(cache, program, monkeypatch, tmp_path):
    calls = program(COMPILES)
    first = build.build()
    assert first.parent == cache
    assert first.read_text() == "library\n"
    # Nothing else is left there.
    assert list(cache.iterdir()) == [first]
    assert build.build() == first
    assert calls() == 1
    # But again when the source has changed.
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "virtual.cpp").write_text("")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "source")
    assert build.build() != first
    assert calls() == 2


def test_one_cpp_library_in_the_process(cache, monkeypatch, tmp_path, python):
    # Some machines have only the static one to link with. A dry run died there.
    monkeypatch.setenv("CXX", " ".join([*build.cxx_compiler(), "-static-libstdc++"]))
    text = "#include <iostream>\nvoid text(long n) { std::cout << n; }"
    (tmp_path / "virtual.cpp").write_text(text)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "flags", lambda: ["-shared", "-fPIC"])
    assert sys.platform == "darwin" or b"libstdc++.so.6" in build.build().read_bytes()


def test_compiler_that_fails(cache, program):
    calls = program('echo "virtual.cpp:1: error: no such thing" >&2; exit 3')
    for _ in range(2):
        with pytest.raises(testing.UnavailableError, match="status: 3.*; use another") as caught:
            build.build()
        assert str(caught.value).endswith("\nvirtual.cpp:1: error: no such thing")
    assert calls() == 2
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_written(program, monkeypatch, tmp_path):
    program(COMPILES)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(testing.UnavailableError, match=r"\(cache: .*\); set XDG_CACHE_HOME to a"):
        build.build()


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(testing.UnavailableError, match=r"\(looked for: g\+\+, .*\); install one"):
        build.cxx_compiler()


def test_compiler_in_the_environment(program, monkeypatch):
    program("")
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -m64")
    assert build.cxx_compiler()[1:] == ["-m64"]
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(testing.UnavailableError, match=r"\(CXX: '/nonexistent/g\+\+'\); unset"):
        build.cxx_compiler()


def test_no_compiler_on_windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(testing.UnavailableError, match="Subsystem for Linux"):
        build.cxx_compiler()


@pytest.mark.parametrize("version", ["2.8.1", "1.13.0+cu117"])
def test_old_torch(version):
    with pytest.raises(testing.UnavailableError, match="need PyTorch 2.11 or newer .*; install a"):
        build.verify_torch(version)


@soak
def test_skipped_where_unavailable(tmp_path):
    """Tests of this project, and the conftest of the guide, skip without a compiler."""
    text = (ROOT / "docs" / "testing.rst").read_text("utf-8")
    block = text.partition("``conftest.py`` such as:")[2].partition("The message of the error")[0]
    code = block.partition(".. code-block:: python")[2]
    (tmp_path / "conftest.py").write_text(dedent(code))
    (tmp_path / "test_it.py").write_text("def test_it(devices): pass\n")
    arguments = ["-q", "-rs", "-p", "no:cacheprovider", "tests/virtual/test_observe.py"]
    status, out, err = fresh.run_new(f"""
import os, pytest, sys
os.environ |= {{"CXX": "/nonexistent", "TORCHGPIPE_REQUIRE_VIRTUAL": ""}}
sys.exit(pytest.main({[*arguments, str(tmp_path)]}))
""")
    assert status == 0, out + err
    assert "passed" not in out
    reason = "need the C++ compiler that the environment names (CXX: '/nonexistent')"
    skipped = [line for line in out.splitlines() if line.startswith("SKIPPED")]
    for file in ("test_observe.py", "test_it.py"):
        assert any(file in line and reason in line for line in skipped), out


def test_fails_where_required(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("TORCHGPIPE_REQUIRE_VIRTUAL", "1")
    # A soak leaves this process on all of its cores.
    monkeypatch.setattr("tests.support.size.SOAK", True)
    with pytest.raises(testing.UnavailableError, match="CXX: '/nonexistent'"):
        runpy.run_path(str(ROOT / "tests" / "virtual" / "conftest.py"))
