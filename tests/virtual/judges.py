"""Tests that fail without a guard, and how they are run."""

import importlib
import inspect

import pytest
import torch
from torch import nn

from tests.behaviour import test_changes
from tests.support.helpers import CPUS

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    "limit": ("virtual.test_limit", "test_the_limit", {"n": 4, "m": 8}),
    "many": ("virtual.test_limit", "test_more_micro_batches_than_streams", {}),
    "few streams": (
        "virtual.test_limit",
        "test_few_copy_streams_do",
        {"requires_grad": False},
    ),
    "slow host": (
        "virtual.test_limit",
        "test_a_host_that_is_slow_takes_no_time",
        {"requires_grad": False, "j": 0},
    ),
    "shared limit": (
        "virtual.test_limit",
        "test_partitions_that_share_devices_overlap",
        {"n": 4, "m": 8, "place": "one device"},
    ),
    "skip": ("virtual.test_limit", "test_a_skip_that_arrives_just_in_time_takes_no_time", {}),
    "peak": (
        "virtual.test_memory",
        "test_peak",
        {"n": 4, "m": 8, "layers": 16, "own": False},
    ),
    "detour": (
        "virtual.test_memory",
        "test_one_micro_batch_is_recomputed_at_a_time",
        {"n": 2, "requires_grad": False},
    ),
    "skip peak": (
        "virtual.test_memory",
        "test_a_skip_is_kept_no_longer_than_it_is_on_its_way",
        {},
    ),
    "skip and value": (
        "virtual.test_memory",
        "test_skip_that_is_the_value_too_is_let_go_at_its_last_use",
        {"grad": "no_grad"},
    ),
    "skip leaving": (
        "virtual.test_memory",
        "test_skip_that_is_the_value_too_leaves_as_one",
        {"grad": "no_grad"},
    ),
    "gradients of a skip": (
        "virtual.test_memory",
        "test_gradients_of_a_skip_that_is_the_value_too_are_added_in_place",
        {"mode": "never"},
    ),
    "skip in a second run": (
        "virtual.test_memory",
        "test_skip_is_let_go_at_its_last_use_in_a_second_run",
        {"first": nn.Identity(), "hooks": False},
    ),
    "order of skips": (
        "virtual.test_skips",
        "test_gradients_leave_in_the_order_in_which_they_are_needed",
        {},
    ),
    "shifted": ("virtual.test_parity", "test_parity", {"name": "shifted", "n": 4}),
    "dropout": ("virtual.test_parity", "test_parity", {"name": "dropout", "n": 4}),
    "long skip": ("virtual.test_parity", "test_parity", {"name": "a long skip", "n": 4}),
    "shared last": (
        "virtual.test_parity",
        "test_partitions_that_share_devices",
        {"place": [0, 1, 1], "name": "a long skip"},
    ),
    "optimizer's streams": (
        "virtual.test_parity",
        "test_the_caller_changes_its_streams",
        {"place": [0, 1, 2], "when": "for the optimizer"},
    ),
    "freed gradients": (
        "virtual.test_parity",
        "test_gradients_are_freed_at_the_end_of_a_step",
        {"place": [0, 0, 1]},
    ),
    "freed outputs": (
        "virtual.test_parity",
        "test_outputs_are_freed_when_they_are_joined",
        {"place": [0, 1, 0]},
    ),
    "statistics": (
        "virtual.test_batchnorm",
        "test_a_forward_without_backward",
        {"place": [0, 0]},
    ),
    "gradients between": (
        "virtual.test_parity",
        "test_what_else_a_caller_does",
        {"place": [0, 0, 1], "way": "gradients scaled between"},
    ),
    "frozen weights": ("virtual.test_parity", "test_weights_without_a_gradient", {}),
    "the CPU and one shared": (
        "virtual.test_parity",
        "test_the_cpu_among_them",
        {"place": [0, 0, "cpu"]},
    ),
    "from the CPU": ("virtual.test_parity", "test_the_cpu_among_them", {"place": [0, "cpu"]}),
    "what has left": (
        "virtual.test_memory",
        "test_what_has_left_a_device_is_not_kept_there",
        {"mode": "always"},
    ),
    "failure": ("virtual.test_parity", "test_a_layer_that_fails", {"place": [0, 0, 1]}),
    "shared layers": (
        "virtual.test_parity",
        "test_partitions_that_share_layers",
        {"place": [0, 0, 0, 0]},
    ),
    "same memory": (
        "virtual.test_parity",
        "test_a_layer_that_returns_the_same_memory",
        {"place": [0, 1, 2]},
    ),
    "last use": (
        "behaviour.test_skips_memory",
        "test_alive_until_its_last_use",
        {"devices": CPUS[:2], "balance": [1, 4], "grad": False},
    ),
    "same numbers": (
        "virtual.test_random_numbers",
        "test_same_on_any_devices",
        {"place": [0, 1, 0, 1], "chunks": 3},
    ),
    "generators as found": (
        "virtual.test_random_numbers",
        "test_layer_that_fails_leaves_all_generators_as_found",
        {"place": [0, 1], "call": 2},
    ),
    "types of devices": (
        "virtual.test_random_numbers",
        "test_each_type_of_device_has_numbers_of_its_own",
        {"place": ["cpu", 2, 1, "cpu"], "chunks": 3},
    ),
    "other numbers": (
        "behaviour.test_random_numbers",
        "test_all_numbers_differ",
        {"balance": [1, 1]},
    ),
    "a later micro-batch": (
        "behaviour.test_random_numbers",
        "test_generator_goes_on_when_only_a_later_micro_batch_draws",
        {"balance": [1, 1]},
    ),
    "one step at a time": (
        "unit.ambient.test_nesting",
        "test_one_step_at_a_time",
        {"timeout": 0.2},
    ),
    "a step within a cell": (
        "unit.ambient.test_nesting",
        "test_step_within_a_cell_does_not_wait",
        {"timeout": 0.2},
    ),
    "a recomputation within a cell": (
        "unit.ambient.test_nesting",
        "test_recomputation_within_a_cell_does_not_wait",
        {"timeout": 0.2},
    ),
    "a step that does not begin": (
        "unit.ambient.test_nesting",
        "test_step_that_does_not_begin_has_nobody_wait",
        {"timeout": 0.2},
    ),
    "frozen partitions": (
        "unit.engine.test_pipeline",
        "test_frozen_partition_is_not_recomputed",
        {},
    ),
    "weights changed": (
        "unit.engine.test_pipeline",
        "test_frozen_tensor_changed_before_backward_is_an_error",
        {"name": "0.weight", "checkpointed": 3},
    ),
    "hooks changed": (
        "behaviour.test_changes",
        "test_changed_between_forward_and_backward",
        {"change": test_changes.hook_removed},
    ),
    "parameters passed on": (
        "unit.engine.test_pipeline",
        "test_parameter_that_is_passed_on_is_not_changed",
        {"view": False},
    ),
    "parameter changed": (
        "behaviour.test_changes",
        "test_parameter_that_the_layer_changes_after_its_use_is_an_error",
        {"mode": "always"},
    ),
    "nothing to do": (
        "behaviour.test_recomputation",
        "test_empty_tensors_keep_nothing_alive",
        {"end": "forward"},
    ),
    "always called": (
        "behaviour.test_recomputation",
        "test_hooks_that_are_always_called_are_called_in_a_second_run_too",
        {"mode": "always"},
    ),
    "what goes whole": (
        "behaviour.test_in_place",
        "test_what_every_micro_batch_gets_is_not_to_be_changed",
        {"j": 0},
    ),
    "never blocks": (
        "unit.engine.test_workers",
        "test_caller_runs_all_of_what_never_blocks",
        {},
    ),
    "recomputation of a step": (
        "unit.ambient.test_nesting",
        "test_recomputation_of_a_step_within_a_cell_holds_its_locks",
        {"timeout": 0.2},
    ),
    "hooks": ("behaviour.test_modes", "test_hooks_see_what_they_see_in_the_plain_model", {}),
    "hooks of what is kept": (
        "behaviour.test_modes",
        "test_hooks_see_what_checkpointing_keeps",
        {},
    ),
    "modes": (
        "behaviour.test_modes",
        "test_layers_see_what_the_caller_has_set",
        {"name": "device"},
    ),
    "modes of backward": (
        "behaviour.test_modes",
        "test_second_run_sees_no_mode_of_backward",
        {"backward": "dispatch modes", "places": ["cpu"] * 2},
    ),
    "threads of an operator": (
        "behaviour.test_modes",
        "test_second_run_sees_no_mode_of_backward",
        {"backward": "three threads", "places": ["cpu"] * 2},
    ),
    "what a backward leaves": (
        "behaviour.test_failures",
        "test_all_tensors_are_released_once_the_exception_is_dropped",
        {"kind": "backward", "k": 1, "places": ["cpu"] * 3},
    ),
    "at a time": (
        "behaviour.test_threads",
        "test_nothing_runs_beside_a_recomputation_of_its_layers",
        {},
    ),
    "interrupted": (
        "behaviour.test_unwinding",
        "test_interrupted_where_something_was_set",
        {"window": "a skip tracker", "places": ["cpu"] * 2},
    ),
    "changing buffers": (
        "behaviour.test_changing_buffers",
        "test_gradients_and_buffers_are_those_of_the_plain_model",
        {"name": "codebook", "device": torch.device("cpu"), "rows": torch.randn(6, 4)},
    ),
    "norm": (
        "behaviour.test_changing_buffers",
        "test_gradients_and_buffers_are_those_of_the_plain_model",
        {"name": "norm", "device": torch.device("cpu"), "rows": torch.ones(6, 4).cumsum(1)},
    ),
    "noise": (
        "behaviour.test_unwritten",
        "test_noise_of_rrelu",
        {"name": "module", "device": torch.device("cpu")},
    ),
    "let go": ("unit.recompute.test_input", "test_input_is_let_go_by_the_recomputation", {}),
}


def judge(test, devices):
    """Run a test, in all checkpoint modes if it takes one."""
    module, function, arguments = TESTS[test]
    check = getattr(importlib.import_module(f"tests.{module}"), function)
    names = inspect.signature(check).parameters
    for mode in ("never", "except_last", "always") if "mode" in names else [None]:
        with pytest.MonkeyPatch.context() as patch:
            given = {"devices": devices, "device": devices[0], "mode": mode, "monkeypatch": patch}
            given |= {"places": devices[:2]} | arguments
            check(**{name: value for name, value in given.items() if name in names})
