"""Plans: the candidates that the planner has found, and how to wrap a model as one of them says."""

__all__: list[str] = []
