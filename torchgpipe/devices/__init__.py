"""Devices, their streams, and what they tell of time and memory."""

__all__: list[str] = []
