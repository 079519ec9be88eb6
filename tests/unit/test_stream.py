"""A pickle of a whole model of 0.0.7 is an error that says what to do."""

import io
import pickle
import sys
from collections import OrderedDict
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch import nn

from torchgpipe import GPipe

#: Classes of 0.0.7, which pickles name by their modules there, whatever these are today.
CLASSES = [
    type(name, (), {"__module__": module})
    for module, name in (
        ("torchgpipe.skip.layout", "SkipLayout"),
        ("torchgpipe.stream", "CPUStreamType"),
    )
]
SkipLayout, CPUStreamType = CLASSES


def modules():
    """The modules of these classes, which only pickling may find."""
    found = {cls.__module__: ModuleType(cls.__module__) for cls in CLASSES}
    for cls in CLASSES:
        setattr(found[cls.__module__], cls.__name__, cls)
    return found


class Old:
    """An object whose pickle is that of a wrapper of 0.0.7: the class, and these attributes.

    Args:
        streams: the copy streams, which it makes in its first step.
    """

    def __init__(self, streams):
        module = nn.ModuleList([nn.Sequential(OrderedDict([("0", nn.Linear(2, 2))]))])
        layout = SkipLayout()
        layout.by_ns_name, layout.by_partition = {}, [[]]
        self.state = vars(nn.Module()) | {
            "_modules": {"partitions": module},
            "chunks": 2,
            "checkpoint": "except_last",
            "balance": [1],
            "devices": [torch.device("cpu")],
            "_copy_streams": streams,
            "_skip_layout": layout,
        }

    def __reduce__(self):
        return object.__new__, (GPipe,), self.state


@pytest.mark.parametrize("streams", [[], [[CPUStreamType()] * 2]])
def test_pickle_of_0_0_7(streams):
    file = io.BytesIO()
    with patch.dict(sys.modules, modules()):
        torch.save(Old(streams), file)
        pickled = pickle.dumps(Old(streams))
    file.seek(0)
    message = r"torchgpipe 0\.0\.7 pickled.*\(balance: \[1\]\).*save its state_dict\(\)"
    with pytest.raises(TypeError, match=message):
        torch.load(file, weights_only=False)
    with pytest.raises(TypeError, match=message):
        pickle.loads(pickled)
