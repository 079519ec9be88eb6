"""A progress bar over steps whose number is not known before."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


class Progress:
    """A progress bar within a ``with`` block, or nothing.

    Args:
        shown: whether there is a bar.
        title: the word before it.
        unit: the word for a step.
        total: how many steps there will be, as far as is known.

    Raises:
        ImportError: there is one, and tqdm is not installed.
    """

    def __init__(self, shown: bool, title: str, unit: str, total: int) -> None:
        self._bar = _bar(desc=title, total=total, unit=unit) if shown else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self) -> None:
        """Move on by a step."""
        if self._bar is not None:
            self._bar.update()

    def expect(self, total: int) -> None:
        """Change how many steps there will be."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.refresh()


def _bar(**options: Any) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "a progress bar needs tqdm (progress: True); run `pip install tqdm`"
        ) from error
    return tqdm(**options)
