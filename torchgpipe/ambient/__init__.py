"""What a thread has set around a computation: captured, entered elsewhere, and put back."""

__all__: list[str] = []
