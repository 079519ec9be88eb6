"""Costs of layers, critical paths, and stand-ins that take known times."""
