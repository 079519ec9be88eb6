"""Which layer is on which device: models are checked, cut into partitions, and placed."""

__all__: list[str] = []
