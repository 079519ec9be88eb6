"""Suites of measurements: each module has a ``main`` that measures, and a ``summarise``."""
