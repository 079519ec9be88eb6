"""Mapped modules: micro-batches of any model, each one a call of the model's own forward."""

__all__: list[str] = []
