"""What is measured: each a module with a ``main``, which ``python -m benchmarks`` calls."""
