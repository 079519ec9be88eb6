import os

import pytest

#: A test that takes long and shows little more than a shorter one: ``TORCHGPIPE_SOAK=1`` runs it.
soak = pytest.mark.skipif(
    os.environ.get("TORCHGPIPE_SOAK", "0") == "0", reason="long; TORCHGPIPE_SOAK=1 runs it"
)
