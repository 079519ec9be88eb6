"""Advice: which plan is best for a model, and which change helps a step that was traced."""

__all__: list[str] = []
