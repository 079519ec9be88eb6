"""Stages as FX graphs: each is traced once, and cut into the instructions of a schedule."""

from torchgpipe.graphs.overlap import communicates

__all__ = ["communicates"]
