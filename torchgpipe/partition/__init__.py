"""A model becomes partitions: its arguments are checked, its layers cut and placed on devices."""

__all__: list[str] = []
