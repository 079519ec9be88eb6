"""The engine: in what order micro-batches run, on which streams, and which thread issues them."""

__all__: list[str] = []
