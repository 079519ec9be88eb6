"""Notes on exceptions."""

import pytest

from tests.support.helpers import note_of
from torchgpipe.ambient import notes as note
from torchgpipe.ambient.notes import add_note, layer, noted


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


def test_nobody_asks_for_the_text_of_a_note_that_is_not_needed():
    class Place:
        asked = 0

        def __str__(self):
            self.asked += 1
            return "where"

    place = Place()
    with noted(place):
        pass
    assert not place.asked
    with pytest.raises(KeyError) as caught, noted(place):
        raise KeyError
    assert note_of(caught.value) == "where"


def test_block_within_a_layer_leaves_its_name():
    with pytest.raises(KeyError) as caught, noted("where"):
        layer.name, layer.kind = "outer", "Module"
        with noted("within"):
            assert layer.name is None
        raise KeyError
    assert note_of(caught.value) == "where, layer outer (Module)"
