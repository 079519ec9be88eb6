"""Guards of what recomputations find as it is: a mutant for each, and tests that must fail."""

import torch

from tests.behaviour import test_changes
from tests.support.offload import Side
from tests.support.once import Swapped
from tests.virtual.mutants import DROP
from tests.virtual.test_side_streams import SideAtLast

_BESIDE = ("virtual.test_side_streams", "test_what_is_computed_again_is_there")

_TAIL = {"make": Swapped, "place": {"": 0, "student": 1, "teacher": 0}, "threads": 1}

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    "kept value": ("behaviour.test_keep", "test_a_kept_value_is_let_go_of", {"runs": False}),
    "policy": ("virtual.test_selective", "test_a_policy_is_asked_for_the_layers_alone", {}),
    "kept value changed": ("behaviour.test_keep", "test_a_changed_value_is_an_error", {}),
    "jagged": (
        "behaviour.test_tensor_kinds",
        "test_nested_tensors_between_partitions",
        {"layout": torch.jagged},
    ),
    "buffer changed": (
        "behaviour.test_changes",
        "test_buffer_changed_between_forward_and_backward",
        {"mode": "always", "change": test_changes.change_in_place, "large": False},
    ),
    "given": ("virtual.test_once", "test_a_forward_without_backward", {}),
    "state in the tail": ("virtual.test_once", "test_maps", _TAIL),
    "given in one run": ("virtual.test_once", "test_a_policy", {}),
    "beside, order": (*_BESIDE, {"layer": Side, "wrapper": "GPipe", "mode": "always"}),
    "beside, memory": (*_BESIDE, {"layer": Side, "wrapper": "1f1b", "mode": "always"}),
    "beside, end": (*_BESIDE, {"layer": SideAtLast, "wrapper": "1f1b", "mode": "always"}),
}

MUTANTS = {
    "kept values without their graph": (("leaf.detach()", "leaf"), "kept value"),
    "versions of kept values": (("!= version", "is None"), "kept value changed"),
    "operators around the layers": (
        ("self._around(copies), policy", "policy, self._around(copies)"),
        "policy",
    ),
    "buffers that layers read": (
        ("*[(common.keys[k], common.copies[k]) for k in changed], ", ""),
        "buffer changed",
    ),
    "recording what is given": (DROP, "given"),
    "operators of what is given": (("uncounted()", "torch.no_grad()"), "given in one run"),
    "state of the mini-batch in the tail": (("lasting(x)", "x.detach()"), "state in the tail"),
    "to the end for other streams": (
        ("self.has_side_streams = self.whole", "self.has_side_streams"),
        "beside, end",
    ),
    "recomputed beside": (DROP, "beside, order"),
    "memory of what was recomputed beside": (DROP, "beside, memory"),
    "lengths of jagged tensors": (("tensor.is_nested", "False"), "jagged"),
}
