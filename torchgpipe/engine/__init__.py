"""The engine: which cells run when, by clock cycles or a schedule, on which streams and threads."""

__all__: list[str] = []
