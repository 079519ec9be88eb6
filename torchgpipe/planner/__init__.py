"""The planner: which balance, chunks, checkpoints and schedule are fastest and fit into memory."""

__all__: list[str] = []
