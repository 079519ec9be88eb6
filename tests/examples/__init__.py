"""The examples, at tiny size."""

import os

#: Errors of timm, Lightning and Transformers that do not load: they import torchvision if it
#: is there, which raises RuntimeError if it was built for another torch.
BROKEN = (ImportError, RuntimeError)

#: Errors with which tests skip a package of the extras: none where no package may be missing.
MISSING = () if os.environ.get("TORCHGPIPE_REQUIRE_VIRTUAL") == "1" else BROKEN
