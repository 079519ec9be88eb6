"""Notes on exceptions."""

from tests.support.helpers import note_of
from torchgpipe.ambient import notes as note
from torchgpipe.ambient.notes import add_note


def test_exception_that_is_raised_again_bears_one_note():
    error = KeyError("x")
    for _ in range(3):
        add_note(error, "where")
    assert note_of(error) == "where"


def test_note_before_python_3_11(monkeypatch):
    monkeypatch.setattr(note.sys, "version_info", (3, 10, 0))
    error = KeyError("x")
    error.__cause__ = cause = ValueError("why")
    error.__context__ = context = TypeError("while")
    add_note(error, "where")
    add_note(error, "where")
    assert error.__cause__.args == ("where",)
    assert error.__cause__.__cause__ is cause
    assert error.__cause__.__context__ is context
