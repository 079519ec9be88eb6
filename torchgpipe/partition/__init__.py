"""Partitions: how a model is cut, which layer goes to which device, and which models are refused.

``arguments`` checks the balance and the devices of a wrapper, ``split`` cuts the model and places
the partitions, and ``sharding`` looks for layers that FSDP2 has sharded.
"""

__all__: list[str] = []
