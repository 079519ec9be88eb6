"""Timelines: spans of work, measured or simulated, as pictures, shares and files."""

__all__: list[str] = []
