"""How results are kept: JSON with a line for each row, so that two runs can be compared by eye."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(path: Path, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Writes ``{**head, "rows": rows}``.

    Args:
        path: the file, which is replaced.
        head: what holds for all rows: the machine, versions, options.
        rows: what was measured.
    """
    before, after = json.dumps({**head, "rows": [None]}, indent=1).rsplit("null", 1)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f"{before}{lines}{after}\n", encoding="utf-8")
