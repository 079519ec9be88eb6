"""How a model is cut into partitions, and placed on devices."""

__all__: list[str] = []
