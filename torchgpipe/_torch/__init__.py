"""Every private name of PyTorch that the package uses, in one place."""

__all__: list[str] = []
