"""A progress bar, or none."""

import builtins

import pytest

from torchgpipe.planner.progress import Progress


def test_steps(capsys):
    pytest.importorskip("tqdm")
    with Progress(True, "title", "step", 3) as bar:
        bar.step()
        bar.expect(2)
        bar.step()
    shown = capsys.readouterr().err
    assert "title" in shown
    assert "2/2" in shown


def test_none_is_shown(capsys, monkeypatch):
    monkeypatch.setattr(builtins, "__import__", without_tqdm(builtins.__import__))
    with Progress(False, "title", "step", 3) as bar:
        bar.step()
        bar.expect(2)
    assert capsys.readouterr().err == ""


def test_tqdm_is_missing(monkeypatch):
    monkeypatch.setattr(builtins, "__import__", without_tqdm(builtins.__import__))
    with pytest.raises(ImportError, match="pip install tqdm"):
        Progress(True, "title", "step", 3)


def without_tqdm(load):
    def load_others(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return load(name, *args, **kwargs)

    return load_others
