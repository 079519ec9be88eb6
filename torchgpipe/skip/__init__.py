"""Skip connections: a tensor goes from one layer to a later one, past the layers between."""

from torchgpipe.skip.skippable import pop, skippable, stash, verify_skippables
from torchgpipe.skip.tracker import Namespace

__all__ = ["skippable", "stash", "pop", "Namespace", "verify_skippables"]
