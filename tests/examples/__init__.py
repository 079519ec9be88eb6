"""The examples, at tiny size."""

import os

#: What timm, Lightning and Transformers raise where they do not load: they import torchvision if it
#: is there, which raises RuntimeError if it was built for another torch.
BROKEN = (ImportError, RuntimeError)

#: What a package of the extras may raise to be done without: nothing where nothing may be missing.
MISSING = () if os.environ.get("TORCHGPIPE_REQUIRE_VIRTUAL") == "1" else BROKEN
