"""The settings of a thread around a computation: captured, entered elsewhere, and put back."""

__all__: list[str] = []
