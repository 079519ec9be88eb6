"""The summary of the planner's choices, beside the best that is known."""

from benchmarks.suites.choices import summarise

SETTING = {"schedule": "one_f_one_b", "chunks": 8, "balance": [3, 3], "modes": "never"}
FOUND = {"ms": 100.0, "predicted_ms": 99.0, "peak": 1000.0, "predicted_peak": 1010.0}
CHOSEN = {**SETTING, **FOUND, "fits": True, "seconds": 1.0}
NONE = {**SETTING, "fits": False, "seconds": 1.0}
ROW = {"model": "GPT", "n": 2, "best": SETTING, "best_ms": 100.0, "share": None, "limit": None}


def test_counts():
    rows = [
        {**ROW, "predicted": CHOSEN, "proven": CHOSEN},
        {**ROW, "predicted": CHOSEN, "proven": NONE, "limit": 900.0, "share": 0.7, "best_ms": 90.0},
    ]
    (table,) = summarise({"rows": rows}).tables
    assert table.caption == (
        "predicted: 1 of 2 within 10% of the best, 1 above their limit; nothing was said to fit 0 "
        "times, and something does 0 times. proven: 1 of 1 within 5% of the best, 0 above their "
        "limit; nothing was said to fit 1 times, and something does 1 times."
    )
    setting = "one_f_one_b, [3, 3], never"
    assert table.rows[0][3:] == ["predicted", setting, "100.0", "0.0%", None, "+1.0%", "1.0"]
    assert table.rows[2][6:9] == ["11.1%", "111.1%", "+1.0%"]
    assert table.rows[3][3:] == ["proven", *[None] * 5, "1.0"]
