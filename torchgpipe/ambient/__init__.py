"""Thread-local settings of a computation: captured, entered in other threads, and restored."""

__all__: list[str] = []
