"""The values that flow through a pipeline: micro-batches of any nested structure of tensors."""

__all__: list[str] = []
