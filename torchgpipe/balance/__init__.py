"""Balancing: how many layers each partition takes."""

__all__: list[str] = []
