"""``python -m benchmarks`` names the benchmarks and runs one of them."""

import pytest

from benchmarks.__main__ import NAMES, main


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help(argv, capsys):
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "usage: python -m benchmarks NAME" in printed
    for name in NAMES:
        (line,) = [x for x in printed.splitlines() if x.startswith(f"  {name} ")]
        assert line.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_help_of_one(name, capsys):
    with pytest.raises(SystemExit) as status:
        main([name, "--help"])
    assert status.value.code == 0
    assert f"usage: python -m benchmarks {name}" in capsys.readouterr().out


def test_unknown_name(capsys):
    assert main(["nothing"]) == 2
    assert "no such benchmark (name: 'nothing')" in capsys.readouterr().err
