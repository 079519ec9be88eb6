"""Block partition: a sequence is cut into blocks whose largest one costs as little as possible."""

from torchgpipe.planner.cuts import solve

__all__ = ["solve"]
