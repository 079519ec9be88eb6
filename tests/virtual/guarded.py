"""Guards of the package: for each a mutant without it, and tests that must fail then."""

import torch
from torch import nn

from tests.behaviour import test_changes
from tests.support.helpers import CPUS
from tests.virtual.mutants import DROP

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    "buffer replaced": (
        "behaviour.test_changes",
        "test_memory_of_a_buffer_replaced_where_nothing_is_computed_again",
        {"mode": "always"},
    ),
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
    "skip in a recomputation": (
        "virtual.test_memory",
        "test_skip_is_let_go_at_its_last_use_in_a_recomputation",
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
    "early": ("virtual.test_memory", "test_gradients_that_nobody_needs_yet_stay_away", {"j": 1}),
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
    "sent once": (
        "distributed.test_messages",
        "test_one_tensor_in_two_places_is_sent_once",
        {},
    ),
    "one at a generator": (
        "unit.ambient.test_generators_defaults",
        "test_one_thread_at_a_time_uses_a_generator",
        {},
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
        "contract.test_contract",
        "test_promise",
        {"name": "random:other_numbers", "run": "GPipe", "mode": "never"},
    ),
    "a later micro-batch": (
        "contract.test_contract",
        "test_promise",
        {"name": "random:drawn_late", "run": "GPipe", "mode": "never"},
    ),
    "one step at a time": (
        "unit.ambient.test_generators_nesting",
        "test_one_step_at_a_time",
        {"timeout": 0.2},
    ),
    "a recomputation within a cell": (
        "unit.ambient.test_generators_nesting",
        "test_recomputation_within_a_cell_does_not_wait",
        {"timeout": 0.2},
    ),
    "a step that does not begin": (
        "unit.ambient.test_generators_nesting",
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
    "nothing to do": (
        "behaviour.test_recomputation",
        "test_empty_tensors_keep_nothing_alive",
        {"end": "forward"},
    ),
    "always called": (
        "behaviour.test_recomputation",
        "test_hooks_that_are_always_called_are_called_in_a_recomputation_too",
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
    "one thread at the generator": (
        "unit.ambient.test_generators_nesting",
        "test_one_thread_at_a_time_turns_the_cpu_generator_back",
        {},
    ),
    "hooks": ("behaviour.test_modes", "test_hooks_see_what_they_see_in_the_plain_model", {}),
    "hooks of what is kept": (
        "behaviour.test_modes",
        "test_hooks_see_what_checkpointing_keeps",
        {},
    ),
    "modes": ("virtual.test_contract", "test_promise", {"name": "modes:seen", "run": "GPipe"}),
    "modes of backward": (
        "contract.test_contract",
        "test_promise",
        {"name": "modes:seen_again", "run": "GPipe", "mode": "always"},
    ),
    "what a backward leaves": (
        "contract.test_contract",
        "test_promise",
        {"name": "memory:errors", "run": "GPipe"},
    ),
    "at a time": (
        "behaviour.test_threads",
        "test_nothing_runs_beside_a_recomputation_of_its_layers",
        {},
    ),
    "interrupted": (
        "behaviour.test_unwinding",
        "test_interrupted_where_something_was_set",
        {"window": "attributes of a thread, afterwards", "places": ["cpu"] * 2},
    ),
    "changing buffers": (
        "behaviour.test_changing_buffers",
        "test_two_forwards_before_their_backwards",
        {"name": "codebook", "device": torch.device("cpu"), "rows": torch.randn(6, 4)},
    ),
    "norm": (
        "behaviour.test_changing_buffers",
        "test_statistics_after_a_step_on_zeros",
        {"device": torch.device("cpu"), "rows": torch.ones(6, 4).cumsum(1)},
    ),
    "noise": (
        "behaviour.test_unwritten",
        "test_noise_of_rrelu",
        {"name": "module", "device": torch.device("cpu")},
    ),
    "let go": ("unit.recompute.test_runs_input", "test_input_is_let_go_by_the_recomputation", {}),
}

#: Guards: what is changed in the line below the marker `# guard: name` in the package's source,
#: and the tests of which each fails then.
MUTANTS = {
    "hand-over by Wait": (DROP, "limit"),
    "hand-over by Copy": (DROP, "shared limit"),
    "waiting": (DROP, "limit"),
    "recording": (DROP, "limit"),
    "clone in forward": ((".clone()", ""), "same memory"),
    "clone in backward": (("_cloned(grads, ctx.next_stream, ctx.prev_stream)", "grads"), "shifted"),
    "source's lane": (("other=prev_stream", "other=next_stream"), "limit"),
    "target's lane": (("other=ctx.prev_stream", "other=ctx.next_stream"), "limit"),
    "one clone": (("id(tensor) not in clones", "True"), "skip leaving"),
    "hand-over in leaving": (DROP, "limit"),
    "lane of Copy": (("use_stream(lane)", "use_stream(self.stream)"), "skip"),
    "lane of arriving Wait": (("batch =", "with use_stream(lane): batch ="), "shifted"),
    "lane of leaving Wait": (("batch =", "with use_stream(lane): batch ="), "same memory"),
    "lane of what leaves": (("use_stream(lane)", "use_stream(self.stream)"), "limit"),
    "a lane for skips": (
        ("streams.values if part is VALUE else streams.skips", "streams.values"),
        "skip",
    ),
    "skips first": (
        (
            "VALUE: j - 1, **by_partition(skip_layout.popped[j])",
            "**by_partition(skip_layout.popped[j]), VALUE: j - 1",
        ),
        "order of skips",
    ),
    "near skips first": (
        (
            "by_partition(skip_layout.popped[j])",
            "dict(reversed(by_partition(skip_layout.popped[j]).items()))",
        ),
        "order of skips",
    ),
    "lanes in turns": (("i % len(copies)", "0"), "limit"),
    "lanes beside computing": (("copies[i % len(copies)]", "self.compute[k]"), "limit"),
    "stream of recomputation": (("use_stream(self.stream), ", ""), "limit"),
    "one tensor is sent once": (("not in numbers", "is not None"), "sent once"),
    "one thread at a generator": (("with _lock", "if True"), "one at a generator"),
    "random numbers": (("numbers.restored(), ", ""), "dropout"),
    "join [1]": ((", phonies", ""), "detour"),
    "join [1] before the layers": (("batch.requires_grad", "False"), "detour"),
    "join [1']": (DROP, "slow host"),
    "fork [2]": (DROP, "slow host"),
    "a short lead": (("k - j + 1", "self.lead"), "early"),
    "lead [3]": (DROP, "slow host"),
    "lead in forward": (DROP, "few streams"),
    "gradient of a fork": (("expand_as", "view_as"), "gradients of a skip"),
    "no leaves": (
        ("next(unpacked) if need else x.detach()", "x.detach().requires_grad_(need)"),
        "skip in a recomputation",
    ),
    "memory of a phony": (("as_strided_copy", "as_strided"), "what has left"),
    "after the caller": (DROP, "shared last"),
    "before the caller": (DROP, "failure"),
    "copies after the caller": (
        ("{compute, *values, *skips}", "{compute}"),
        "the CPU and one shared",
    ),
    "backward after the caller": (DROP, "gradients between"),
    "backward before the caller": (("ctx.end", "lambda: None"), "frozen weights"),
    "recording gradients": (("parameter.grad is not None", "False"), "freed gradients"),
    "recording moments": (DROP, "statistics"),
    "back to the caller": (("VALUE in self.targets[-1]", "False"), "freed outputs"),
    "own streams": (("count > 1", "False"), "shared limit"),
    "groups": (("groups(self.partitions)", "list(range(len(self.partitions)))"), "shared layers"),
    "letting go of a skip": (("pop(skip, None)", "get(skip)"), "last use"),
    "letting go of the input": (DROP, "last use"),
    "letting go of what is watched": (("counter_of(x)", "x"), "skip and value"),
    "letting go of slots": (
        ("places, self.places = self.places, []", "places = self.places"),
        "peak",
    ),
    "letting go of what was kept": (
        ("(stored, numbers), self.stored = self.stored, None", "stored, numbers = self.stored"),
        "let go",
    ),
    "numbers go on": (DROP, "same numbers"),
    "numbers are taken along": (DROP, "same numbers"),
    "numbers by type of device": (
        ("self.states[self.kind]", "self.states['cpu']"),
        "types of devices",
    ),
    "generators are put back": (("self._devices", "()"), "same numbers"),
    "generators are put back after an exception": (
        ("kind is None and ", ""),
        "generators as found",
    ),
    "seeds of micro-batches": ((" + i", ""), "other numbers"),
    "seeds of steps": (
        ("self._begin.of(self._m, kind) if drawn else before", "before"),
        "a later micro-batch",
    ),
    "locks of a step": (("locks_of(self._devices)", "[]"), "one step at a time"),
    "no locks within a cell": (
        ("if computing.within", "if False"),
        "a recomputation within a cell",
    ),
    "locks after a failure": (
        ("with locks[0]:", "if locks[0].__enter__():"),
        "a step that does not begin",
    ),
    "locks of a recomputation": (("locks_of([CPU])", "[]"), "one thread at the generator"),
    "workers only for what blocks": (("not self.seen_to_block", "False"), "never blocks"),
    "modes that only the caller computes in": (("context.alone or ", ""), "hooks"),
    "modes of a recomputation": (DROP, "modes"),
    "modes of backward": (DROP, "modes of backward"),
    "context variables": (
        ("self.context.run(self.function, again)", "self.function(again)"),
        "modes",
    ),
    "threads of an operator": (DROP, "modes of backward"),
    "what is kept is packed": (("_hooks_of_caller()", "None"), "hooks of what is kept"),
    "what a backward leaves": (DROP, "what a backward leaves"),
    "a partition at a time": (("self.lock, ", ""), "at a time"),
    "what is interrupted": (("SavedSettings(devices, modes),", ""), "interrupted"),
    "hooks of the forward": (("now.hooks != wanted.hooks", "False"), "hooks changed"),
    "leaves": (
        ("tensor.clone() if base.requires_grad and base.is_leaf else ", ""),
        "parameters passed on",
    ),
    "to the end for hooks": (("self.whole or ", ""), "always called"),
    "kept without its graph": (("tensor.detach()", "tensor"), "nothing to do"),
    "versions of what goes whole": (("kind is None", "False"), "what goes whole"),
    "what is written after it was saved": (
        ("not tensor.requires_grad", "False"),
        "noise",
    ),
    "buffers of before the first run": (DROP, "changing buffers"),
    "statistics of norms": (("name in UNCOUNTED", "False"), "norm"),
    "buffers as they were": ((" if is_parameter else x.detach()", ""), "buffer replaced"),
    "keeping what lasts": (("self.lasting.get(key)", "None"), "frozen partitions"),
    "no Recompute for nothing": ((" if checkpoint.stored is not None", ""), "frozen partitions"),
    "versions of what is kept": (
        ("saved._version != self.kept.versions[id(saved)]", "False"),
        "weights changed",
    ),
}
