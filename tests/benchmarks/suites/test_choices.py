"""The summary of the planner's choices, and the settings that they are compared with."""

from benchmarks.suites.choices import summarise

SETTING = {"schedule": "one_f_one_b", "chunks": 8, "balance": [3, 3], "modes": "never"}
FOUND = {"ms": 100.0, "predicted_ms": 99.0, "peak": 1000.0, "predicted_peak": 1010.0}
ROW = {"model": "GPT", "n": 2, "seconds": 1.0, "settings": 9000}
ROW |= {"chosen": SETTING, "best": SETTING, "share": None, "limit": None}


PROOF = {"simulated": 3, "left": 0, "faster": {"ms": 98.0, "peak": 900.0}}


def test_counts():
    rows = [
        {**ROW, **FOUND, **PROOF, "fits": True, "best_ms": 100.0},
        {**ROW, **FOUND, "fits": True, "best_ms": 90.0, "share": 0.7, "limit": 900.0},
        {**ROW, "fits": False, "best_ms": None, "share": 0.4, "limit": 500.0},
        {**ROW, **FOUND, "fits": True, "best_ms": 99.0, "predicted_peak": None},
    ]
    (table,) = summarise({"rows": rows}).tables
    assert table.caption.startswith(
        "2 of 3 choices are within 3 % of the best, 2 of 2 predicted peaks within 5 %, and 1 of 1 "
        "above their limit. Where nothing was said to fit (1 times), something did 0 times. In "
        "1 of 4 rows, nothing of all settings is left open."
    )
    assert table.rows[1][4:9] == ["100.0", "11.1%", "-1.0%", "+1.0%", "111.1%"]
    assert table.rows[2][3:9] == [None] * 6
    assert table.rows[3][7] is None
    assert table.rows[0][9:13] == ["9.0e+03", "3", "98.0", "0"]
    assert table.rows[1][9:13] == [None] * 4
