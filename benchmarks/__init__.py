"""Measurements; each is a module with a ``main``, run by ``python -m benchmarks.<name>``."""
