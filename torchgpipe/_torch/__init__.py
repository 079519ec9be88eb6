"""Every private name of PyTorch that the package uses, in one place.

``_torch.get_stream(0)`` is ``torch._C._accelerator_getStream(0)``. A name is looked up when it is
used for the first time, and not at import: PyTorch may drop or rename any of them, and then only
what needs it is lost. :mod:`torchgpipe._torch.names` is the table. Private attributes of objects
are in :mod:`torchgpipe._torch.attributes`, and what PyTorch's compiler is told is in
:mod:`torchgpipe._torch.dynamo`.
"""

from __future__ import annotations

from typing import Any

from torchgpipe._torch.names import NAMES, look_up

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Look a name of the table up, and keep the result as an attribute of this module."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = look_up(name)
    return value
