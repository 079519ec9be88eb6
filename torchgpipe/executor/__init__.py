"""Explicit schedules, run: the instructions of each worker on the micro-batches of a step."""

__all__: list[str] = []
