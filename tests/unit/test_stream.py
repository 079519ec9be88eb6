"""A pickle of a whole model of 0.0.7 is an error that says what to do."""

import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.skip.tracker import SkipLayout
from torchgpipe.stream import CPUStreamType


class Old:
    """An object whose pickle is that of a wrapper of 0.0.7: the class, and these attributes.

    Args:
        streams: the copy streams, which it makes in its first step.
    """

    def __init__(self, streams):
        module = nn.ModuleList([nn.Sequential(OrderedDict([("0", nn.Linear(2, 2))]))])
        layout = object.__new__(SkipLayout)
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


@pytest.mark.parametrize("streams", [[], [[object.__new__(CPUStreamType)] * 2]])
def test_pickle_of_0_0_7(streams):
    file = io.BytesIO()
    torch.save(Old(streams), file)
    file.seek(0)
    message = r"torchgpipe 0\.0\.7 pickled.*\(balance: \[1\]\).*save its state_dict\(\)"
    with pytest.raises(TypeError, match=message):
        torch.load(file, weights_only=False)
    with pytest.raises(TypeError, match=message):
        pickle.loads(pickle.dumps(Old(streams)))
