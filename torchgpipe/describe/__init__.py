"""Descriptions of wrapped models, as tables."""

__all__: list[str] = []
