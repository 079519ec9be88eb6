"""Stages as FX graphs: each is traced once, and cut into the instructions of a schedule."""

__all__: list[str] = []
