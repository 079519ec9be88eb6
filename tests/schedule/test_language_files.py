"""Files of torch.distributed.pipelining: its classes write what we read, and read what we write."""

import pytest
from hypothesis import assume, given
from torch.distributed.pipelining import schedules as theirs

from tests.schedule.cases import examples, schedules
from torchgpipe.schedule import (
    dualpipe_v,
    fill_drain,
    named,
    read_csv,
    validate,
    write_csv,
)

CLASSES = {
    "ScheduleLoopedBFS": "loop",
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}


class Stage:
    """The attributes of a stage that a schedule reads, without a process group."""

    def __init__(self, index, placement):
        self.stage_index, self.num_stages = index, len(placement)
        self.group_size, self.group_rank = max(placement) + 1, placement[index]
        self.stage_index_to_group_rank = dict(enumerate(placement))
        self.is_first, self.is_last = index == 0, index == len(placement) - 1
        self.has_backward, self.submod, self.group = True, None, None


def placed(style, workers):
    return (
        tuple(range(workers)) * 2 if style == "loop" else (*range(workers), *range(workers)[::-1])
    )


def of_torch(name, placement, chunks):
    stages = [Stage(j, placement) for j, worker in enumerate(placement) if worker == 0]
    first = stages if name in CLASSES else stages[0]
    return getattr(theirs, name)(first, chunks, loss_fn=lambda output, target: output)


@pytest.mark.parametrize(("workers", "rounds"), [(1, 2), (2, 2), (3, 2), (4, 3)])
@pytest.mark.parametrize("name", CLASSES)
def test_their_schedules_are_ours(name, workers, rounds, tmp_path):
    placement, chunks = placed(CLASSES[name], workers), rounds * workers
    schedule = of_torch(name, placement, chunks)
    schedule._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    found = read_csv(tmp_path / "theirs.csv", placement, chunks)
    assert validate(found) == []
    assert found == named(name.removeprefix("Schedule"), workers, chunks)


@pytest.mark.parametrize("name", CLASSES)
def test_they_load_ours(name, tmp_path):
    placement = placed(CLASSES[name], 3)
    ours = named(name.removeprefix("Schedule"), 3, 7)
    write_csv(ours, tmp_path / "ours.csv")
    schedule = of_torch(name, placement, 6)
    schedule._n_microbatches = 7
    schedule._load_csv(tmp_path / "ours.csv", format="compute_only")
    words = [[str(x) for x in schedule.pipeline_order[rank]] for rank in range(3)]
    assert "\n".join(map(" ".join, words)).replace("OVERLAP_F_B", "") == str(ours)


@examples
@given(schedules())
def test_files_and_back(tmp_path_factory, case):
    schedule, _ = case
    assume("R" not in str(schedule))
    path = tmp_path_factory.mktemp("csv") / "schedule.csv"
    write_csv(schedule, path)
    assert read_csv(path, schedule.placement, schedule.chunks) == schedule
    for line in path.read_text("utf-8").splitlines():
        for slot in line.split(","):
            assert str(theirs._Action.from_str(slot)) == slot


def test_spelling(tmp_path):
    path = tmp_path / "schedule.csv"
    write_csv(dualpipe_v(1, 2), path)
    assert path.read_bytes() == b"0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\r\n"
    path.write_text("\ufeff,, 0F0,,\n\n0F0, ,0B0,,\n", encoding="utf-8")
    found = read_csv(path, (0, 1), 1)
    assert str(found) == "0F0\n0F0 0B0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0R0,0B0",
            r"must not contain R, .* \(line: 1, column: 5, found: '0R0'\); .* recompute\(\)",
        ),
        ("0F0\n,0SEND_F0", r"must not contain SEND_F: .*\(line: 2, column: 2, .*compute_only"),
        ("0REDUCE_GRAD", r"must not contain REDUCE_GRAD: .*\(line: 1, column: 1,"),
        ("0UNSHARD", r"must not contain UNSHARD: "),
        ("0RESHARD", r"must not contain RESHARD: "),
        ("(0F0;0R0)OVERLAP_F_B", r"must not contain R, .* \(line: 1, column: 1, "),
        ("0F0,(0F1;0B0)", r"must end in OVERLAP_F_B \(line: 1, column: 5, .*write \(0F1;3B0\)OVER"),
        ("0F0OVERLAP_F_B", r"an overlap, and nothing else, must end in OVERLAP_F_B"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", r"F, B, I, W or R must come next \(line: 1, column: 11,"),
        ("0F0, 1X", r"must come next \(line: 1, column: 7,"),
    ],
)
def test_what_is_no_instruction(text, message, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(path, (0,), 2)


def test_recomputation_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"must do without R \(instruction: 0R7\); write"):
        write_csv(fill_drain(2, 8).recompute(), tmp_path / "schedule.csv")
    assert not (tmp_path / "schedule.csv").exists()
