"""The way of a model to its devices: it is checked, cut into partitions, and placed."""

__all__: list[str] = []
