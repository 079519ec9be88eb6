"""Checkpointing: what a cell saves for backward is dropped, and computed again when it is due."""

__all__: list[str] = []
