"""The rehearsal of `make gpu` on virtual accelerators, at the least size."""

from tests.support.size import soak
from tools import gpu


@soak
def test_rehearsal(tmp_path, capsys):
    assert gpu.main(["--device", "virtual", "--folder", str(tmp_path)]) == 0
    (report,) = tmp_path.rglob("report.md")
    text = report.read_text("utf-8")
    assert [text.index(part.question) for part in gpu.PARTS.values()]
    capsys.readouterr()
    # What has ended is not run again.
    assert gpu.main(["--device", "virtual", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert report.read_text("utf-8") == text
