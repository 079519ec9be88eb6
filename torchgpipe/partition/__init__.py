"""How a model becomes partitions: arguments are checked, layers are cut, and placed on devices."""

__all__: list[str] = []
