"""A name of 0.0.7, without which nobody could tell what is wrong with a pickle of 0.0.7."""

from __future__ import annotations

__all__: list[str] = []


class CPUStreamType:
    """An object in each pickle of a whole model of 0.0.7 that has computed on the CPU.

    PyTorch looks for its class before :class:`torchgpipe.GPipe` refuses the pickle.
    """
