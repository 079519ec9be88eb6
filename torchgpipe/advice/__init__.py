"""Advice on a step that was traced: which change of the settings is expected to gain the most."""

__all__: list[str] = []
