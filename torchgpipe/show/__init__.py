"""Timelines and tables: what steps took, measured or simulated, and what a wrapped model is."""

__all__: list[str] = []
