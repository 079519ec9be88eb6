"""Benchmarks: ``python -m benchmarks --help`` lists the commands.

============  ====================================================================================
``suites``    what is measured: each a module with a ``main``; the longer tables in ``tables``
``simulate``  costs of layers, critical paths, and stand-ins that take known times
``rivals``    whoever trains: other libraries, ours and plain training, in processes of their own
``report``    results as JSON, Markdown and pictures, and the machine they were measured on
``models``    the papers' models and experiments, and images
``results``   what was measured, as data
============  ====================================================================================

A room imports itself and the rooms below it in this table, never one above.
"""
