"""The built-in schedules are valid for all sizes, and the formulas of the guide are right."""

import re
from fractions import Fraction
from pathlib import Path

import pytest

from tests.schedule.cases import BUILT_IN, share
from tests.support.size import some
from torchgpipe.schedule import bounds, named, simulate, validate

GUIDE = Path(__file__).parents[2] / "docs/schedule.rst"
#: For each schedule: name, "at most" or nothing, bubble, condition, peak.
ROWS = re.findall(
    r"^(\w+)\n~+\n\n\.\. image.*\n.*\n\n"
    r"Bubble (at most )?``(.+)``(.*); peak (?:at most )?``(.+)``\.$",
    GUIDE.read_text("utf-8"),
    re.MULTILINE,
)
EQUAL = [row for row in ROWS if "at F = I = W" in row[3]]
ALWAYS = [row for row in ROWS if row not in EQUAL]


@pytest.mark.parametrize("name", BUILT_IN)
def test_valid_for_all_sizes(name):
    for workers in some((1, 2, 3, 5), (1, 2, 4)):
        for chunks in some((1, 2, 3, 4, 5, 7, 10, 13), (1, 2, 4, 7)):
            schedule = BUILT_IN[name](workers, chunks)
            assert validate(schedule) == []
            assert schedule.chunks == chunks
            assert len(schedule.program) == workers


@pytest.mark.parametrize("name", BUILT_IN)
def test_sizes_are_positive_integers(name):
    for sizes in ((0, 4), (4, 0), (2.0, 4), (True, 4), ("4", 4), (4, None)):
        with pytest.raises(ValueError, match=r"must be a positive integer \(.*\); use at least 1"):
            BUILT_IN[name](*sizes)


def value(formula, p, m, v, f, i, w):
    """Evaluate a formula of the guide: letters, numbers, and products without a sign."""
    python = re.sub(r"(?<=[\dP)]) ?(?=[A-Z(]|max)", "*", formula)
    names = {"P": p, "M": m, "v": Fraction(v), "F": f, "I": i, "W": w, "B": i + w, "max": max}
    return eval(python, names)


def check(row, p, m, costs, **parameters):
    name, at_most, bubble, _, peak = row
    schedule = named(name, p, m, **parameters)
    v = len(schedule.placement) // p
    report = simulate(schedule, share(schedule, costs))
    for formula, measured in ((bubble, min(report.bubble)), (peak, max(report.peak))):
        expected = value(formula, p, m, v, *costs)
        assert measured <= expected if at_most else measured == expected


def test_the_guide_has_all():
    assert [row[0] for row in ROWS] == [name for name in draw_names() if name != "recompute"]
    assert (len(ALWAYS), len(EQUAL)) == (7, 5)


def draw_names():
    return re.findall(r"schedules/(\w+)\.svg", GUIDE.read_text("utf-8"))


@pytest.mark.parametrize("row", ALWAYS, ids=lambda row: row[0])
@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 1), (3, 1, 2), (1, 4, 3), (1, 1, 3)])
def test_formulas_of_the_guide(row, costs):
    full = [(p, rounds) for p in (2, 3, 4, 6) for rounds in (2, 3, 5)]
    for p, rounds in some(full, [(2, 2), (3, 3), (4, 2)]):
        check(row, p, rounds * p, costs)
        if row[0].startswith("interleaved"):
            check(row, p, rounds * p, costs, stages_per_worker=3)


@pytest.mark.parametrize("row", EQUAL, ids=lambda row: row[0])
def test_formulas_of_the_guide_at_equal_costs(row):
    for p in some((2, 3, 4, 5, 6, 7, 8, 11, 12), (2, 3, 4, 5, 6)):
        for rounds in some((2, 3) if p < 9 else (2,), (2, 3) if p < 4 else (2,)):
            check(row, p, rounds * p, (Fraction(1),) * 3)


@pytest.mark.parametrize("p", some([1, 2, 3, 4, 7], [1, 2, 3, 4]))
def test_nothing_is_faster_than_zero_bubbles(p):
    for m in (2 * p, 2 * p + 1, 4 * p):
        for name in ("zero_bubble_h1", "zero_bubble_v", "interleaved_zero_bubble"):
            schedule = named(name, p, m if name != "interleaved_zero_bubble" else 2 * p)
            limit = bounds(schedule.placement, schedule.chunks)
            assert limit.gap(simulate(schedule)) == 0


@pytest.mark.parametrize(("waves", "most"), [(1, 1.5), (2, 7 / 3), (3, 4)])
def test_waves(waves, most):
    """The docstring of wave gives these bounds, for P up to 8."""
    for p in some((2, 3, 4, 5, 7, 8), (2, 3, 4)):
        for m in (p, 2 * p + 1):
            schedule = named("wave", p, m, waves=waves)
            report = simulate(schedule)
            least = 3 * (p - 1)
            assert least <= min(report.bubble) <= most * least
            assert max(report.peak) <= 3 * p * waves
