"""How micro-batches run: the pipeline, its cells, their streams, and who issues them."""

__all__: list[str] = []
