"""All of backward: the autograd functions that order, copy and recompute."""

__all__: list[str] = []
