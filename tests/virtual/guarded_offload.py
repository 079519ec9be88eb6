"""Guards of what leaves for the host: for each a mutant, and tests that must fail with it."""

from tests.support.offload import LAYERS
from tests.virtual import test_offload
from tests.virtual.mutants import DROP
from tests.virtual.test_offload_chosen import AndSmall, AndTrials

_CHOSEN = ("virtual.test_offload_chosen",)
_LAYERS = ("virtual.test_offload", "test_layers_that_save_tensors_of_all_sorts")

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    "offloaded, bits": (
        "virtual.test_offload",
        "test_gradients_are_the_same_bit_by_bit",
        {"n": 2, "kind": "all"},
    ),
    "offloaded, by others": ("virtual.test_offload", "test_what_others_hold_stays", {}),
    "offloaded, spoilt": ("virtual.test_offload", "test_what_has_changed_is_an_error", {}),
    "offloaded, failed": (
        "virtual.test_offload",
        "test_a_step_that_fails_leaves_no_buffer_lost",
        {"where": "backward"},
    ),
    "offloaded, weights": (
        "virtual.test_offload",
        "test_each_storage_leaves_once_and_weights_stay",
        {"kind": "views of weights", "count": 5},
    ),
    "offloaded, beside": (*_CHOSEN, "test_what_a_stream_has_not_computed_yet_stays", {}),
    "offloaded, small": (*_CHOSEN, "test_as_much_leaves_as_without", {"make": AndSmall}),
    "offloaded, trials": (*_CHOSEN, "test_as_much_leaves_as_without", {"make": AndTrials}),
    "norms of one run": (
        "behaviour.test_policies",
        "test_norms_that_are_deferred",
        {"kind": "products", "wrapper": "GPipe"},
    ),
    "casts of policies": (
        "behaviour.test_policies",
        "test_casts_of_weights",
        {"wrapper": "GPipe", "around": False},
    ),
    "changed arguments": (
        "behaviour.test_policies",
        "test_operators_that_do_more_than_to_return_are_computed_again",
        {"wrapper": "GPipe", "kind": "changes"},
    ),
    "offloaded, graph": ("virtual.test_offload", "test_a_step_leaves_nothing_on_the_device", {}),
} | {f"offloaded, {kind}": (*_LAYERS, {"kind": kind, "use": test_offload.once}) for kind in LAYERS}

MUTANTS = {
    "the last reader of a buffer": (DROP, "offloaded, failed"),
    "copies that nobody waits for": (DROP, "offloaded, failed"),
    "saved without its graph": (("tensor.detach()", "tensor"), "offloaded, graph"),
    "weights stay": (
        ("type(tensor) is not Tensor or is_own_leaf(tensor)", "False"),
        "offloaded, weights",
    ),
    "more than views": (("tensor.is_conj() or tensor.is_neg()", "False"), "offloaded, complex"),
    "what has changed by now": (("any(x.is_changed for x in group) or ", ""), "offloaded, spoilt"),
    "what somebody else holds": ((" or is_held(group)", ""), "offloaded, by others"),
    "out after the layers": (DROP, "offloaded, bits"),
    "back after compute": (DROP, "offloaded, bits"),
    "compute after copies": (DROP, "offloaded, bits"),
    "layers with a stream of their own": (
        ("is_current(self.stream)", "True"),
        "offloaded, beside",
    ),
    "operators that do more than to return": (
        ("does_more(operator, args, kwargs)", "False"),
        "changed arguments",
    ),
    "graphs that are thrown away": (("ref(view)", "lambda: view"), "offloaded, trials"),
    "casts of both runs": (("own_casts()", "torch.enable_grad()"), "casts of policies"),
    "operators of one run": (("uncounted()", "torch.no_grad()"), "norms of one run"),
    "small views of large storages": (("storage.nbytes()", "tensor.nbytes"), "offloaded, small"),
}
