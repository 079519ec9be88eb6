"""What flows through a pipeline: micro-batches, made of any nested structure of tensors."""

__all__: list[str] = []
