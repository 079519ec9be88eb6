"""The private names of PyTorch's pipelining that several processes need."""

import pytest
from torch.distributed.pipelining import schedules

from tests.distributed.processes import OLD
from torchgpipe._torch import pipelining
from torchgpipe.schedule import named, write_csv


def test_version_that_is_too_old(monkeypatch):
    monkeypatch.setattr(pipelining, "VERSION", (2, 12))
    with pytest.raises(ImportError, match="2.13 or newer.*ScheduledLoss"):
        pipelining.verify_version()


def test_missing_runtime(monkeypatch):
    monkeypatch.delattr(schedules, "_PipelineScheduleRuntime")
    with pytest.raises(ImportError, match="2.13 or newer"):
        pipelining.verify_version()


@pytest.mark.skipif(bool(OLD), reason=OLD)
def test_names():
    pipelining.verify_version()
    runtime = schedules._PipelineScheduleRuntime
    assert callable(runtime._load_csv)
    kinds = {x.name for x in schedules._ComputationType}
    assert kinds >= {*pipelining.LETTERS, *pipelining.MESSAGES, *pipelining.OTHERS}


def test_actions_of_a_file(tmp_path):
    path = tmp_path / "schedule.csv"
    write_csv(named("dualpipe_v", 2, 4), path)
    actions = [
        schedules._Action.from_str(word) for word in path.read_text().replace("\n", ",").split(",")
    ]
    found = [pipelining.read(action) for action in actions if action]
    assert {does for does, _ in found} == {"compute"}
    assert {letter for _, parts in found for _, letter, _ in parts} == {*"FBIW"}
    assert {len(parts) for _, parts in found} == {1, 2}


@pytest.mark.parametrize(
    ("text", "does"), [("1SEND_F2", "send"), ("1RECV_B2", "receive"), ("1B2", "compute")]
)
def test_actions(text, does):
    kind = "F" if "_F" in text else "B"
    assert pipelining.read(schedules._Action.from_str(text)) == (does, [(1, kind, 2)])
