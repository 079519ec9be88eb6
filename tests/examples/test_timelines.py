"""The pictures at the end of the demo, where there is no compiler."""

import pytest

from examples import timelines
from torchgpipe.testing import UnavailableError


def test_without_a_compiler(monkeypatch, tmp_path, capsys):
    def load(count):
        raise UnavailableError("they need a compiler\n(CXX: c++); install one")

    monkeypatch.setattr(timelines, "load", load)
    assert timelines.main(["--folder", str(tmp_path / "pictures")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "no timelines of schedules: they need a compiler (CXX: c++); install one"


@pytest.mark.parametrize("chunks", ["0", "x"])
def test_wrong_options(chunks, capsys):
    with pytest.raises(SystemExit):
        timelines.main(["--chunks", chunks])
    assert "--chunks" in capsys.readouterr().err
