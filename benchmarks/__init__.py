"""Benchmarks: ``python -m benchmarks --help`` lists the commands.

============  =====================================================================================
``suites``    measurements: each module has a ``main`` and a ``summarise``; ``tables`` for long ones
``simulate``  costs of layers, critical paths, and stand-ins for partitions
``rivals``    training by other libraries, by ours and without a pipeline, in other processes
``report``    results as JSON and Markdown, and the machine that measured them
``models``    the papers' models and experiments, and images
``results``   measured data
============  =====================================================================================

A room imports itself and the rooms below it in this table, never one above. Beside the rooms are
the command line (``__main__``, ``command``, ``progress``) and ``render``, which needs the suites.
"""
