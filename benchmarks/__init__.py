"""Benchmarks, each a module with a ``main``: ``python -m benchmarks --help``.

What they share:

==================================================  ==============================================
``command``, ``progress``, ``machine``              command lines, bars, where it was measured
``report``, ``picture``, ``render``, ``report_*``   JSON, Markdown and pictures
``experiments``, ``models``, ``costs``              the papers' settings, models, and their costs
``rivals``, ``library``, ``streams``                other libraries, in processes of their own
``training``, ``plain``, ``stages``, ``cells``      what trains there, in real time
``standins``, ``blocking``, ``critical``            partitions of known cost, and their limits
``carried``, ``switches``                           pipelines without parts of the method
==================================================  ==============================================
"""
