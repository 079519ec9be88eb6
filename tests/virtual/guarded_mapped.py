"""Guards of what runs mapped modules: for each a mutant, and tests that must fail with it."""

from tests.virtual.mutants import DROP

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    f"mapped {name}": (f"virtual.{module}", f"test_{function}", arguments)
    for name, (module, function, arguments) in {
        "makespan": ("test_mapped", "makespan", {"n": 4, "m": 8}),
        "copies": ("test_mapped", "slow_copies", {}),
        "clones": ("test_mapped_code", "gradients_leave_a_later_visit_as_clones", {"way": "added"}),
        "changed": (
            "test_mapped_code",
            "gradients_leave_a_later_visit_as_clones",
            {"way": "changed"},
        ),
        "functions": (
            "test_mapped_code",
            "functions_that_change_an_earlier_tensor",
            {"change": "inplace"},
        ),
        "checkpoints": (
            "test_mapped_code",
            "checkpoints_of_the_model_itself",
            {"places": [0, 1, 2, 3], "dropout": 0.0, "mode": "always"},
        ),
        "slow host": ("test_mapped", "a_host_that_is_slow_takes_no_time", {"j": 0}),
        "slices dropped": ("test_slices", "the_loss_of_the_caller", {}),
        "labels": ("test_mapped", "copies_of_the_model_itself_hold_nobody_up", {}),
        "encoder and decoder": ("test_mapped", "a_model_that_comes_back_to_its_devices", {}),
        "gemma2": ("test_mapped", "architectures", {"name": "gemma2"}),
        "bart": ("test_mapped", "architectures", {"name": "bart"}),
        "streams": ("test_mapped", "other_streams_of_the_caller", {}),
        "changes": ("test_mapped_values", "gradients_and_buffers", {"kind": "ChangedAfterItLeft"}),
        "no grad": ("test_mapped_values", "gradients_and_buffers", {"kind": "WithoutGradFirst"}),
        "norms": ("test_mapped_values", "gradients_and_buffers", {"kind": "Norms"}),
        "replaced": ("test_mapped_values", "gradients_and_buffers", {"kind": "Replaced"}),
        "ways": ("test_mapped_values", "gradients_and_buffers", {"kind": "Uneven"}),
        "lane": ("test_mapped_values", "memory_of_a_lane_that_a_checkpoint_of_pytorch_reads", {}),
        "casts": ("test_mapped_code", "weights_that_autocast_has_cast", {}),
        "late": ("test_mapped_code", "code_that_comes_back_holds_nobody_up", {}),
        "threads": ("test_mapped_threads", "makespan", {"threads": 4, "mode": "never"}),
        "threads numbers": (
            "test_mapped_threads",
            "the_numbers_are_those_of_one_thread",
            {"rounds": 2, "mode": "never"},
        ),
        "threads models": (
            "test_mapped_threads",
            "models_whose_results_would_depend_on_the_threads",
            {"model": "numbers of the CPU"},
        ),
        "threads modes": ("test_mapped_threads", "modes_that_only_the_caller_computes_in", {}),
        "threads failures": ("test_mapped_threads", "a_failure_ends_all_threads", {}),
        "threads attributes": ("test_mapped_threads", "attributes", {}),
        "threads ends": (
            "test_mapped_threads",
            "micro_batches_that_end_leave_the_numbers_of_others",
            {},
        ),
        "threads streams": ("test_mapped_threads", "streams_of_the_caller", {}),
        "skips": ("test_mapped_code", "skips_that_come_back", {}),
        "lent": ("test_mapped_lent", "training", {"kind": "home after", "threads": 1}),
        "logits": ("test_mapped_logits", "the_most_memory", {}),
        "looks": ("test_mapped_logits", "a_caller_who_looks", {}),
        "left": ("test_mapped_logits", "nothing_is_left", {"mode": "always", "head": 0}),
        "lost": ("test_mapped_together", "changes_in_place_that_would_be_lost", {}),
    }.items()
} | {
    "exchanged in place": (
        "virtual.test_mapped_exchanged",
        "test_what_blocks_change_is_there_for_later_ones",
        {"kind": "tensor", "mode": "always"},
    ),
    "tail given": (
        "unit.mapped.test_tail",
        "test_what_the_code_was_given_has_changed",
        {},
    ),
    "exchanged by threads": ("unit.mapped.test_exchanged", "test_recomputations_take_turns", {}),
    "lent again": (
        "virtual.test_mapped_lent",
        "test_a_layer_in_checkpoints_of_the_model",
        {"reentrant": False},
    ),
    "lent to threads": ("unit.partition.test_placement_lent", "test_threads_take_turns", {}),
    **{
        f"tail {name}": (
            "unit.mapped.test_tail",
            "test_code_of_any_kind",
            {"name": name, "mode": "always"},
        )
        for name in ("function", "cast", "hooked", "changed_later", "drawn")
    },
}

MUTANTS = {
    "the graph of the latest slice": (DROP, "mapped slices dropped"),
    "checkpoints around modules": (DROP, "mapped checkpoints"),
    "recording for a later visit": (DROP, "mapped bart"),
    "recording for a checkpoint of PyTorch": (DROP, "mapped lane"),
    "lane of what is fetched": (("self.lane", "self.stage.compute"), "mapped copies"),
    "join of what is fetched": (("if needed", "if False"), "mapped slow host"),
    "lane of what is sent on": (("self.lane", "self.stage.compute"), "mapped makespan"),
    "join of what leaves": (("fence.before(self.i, j)", "[]"), "mapped slow host"),
    "lead of a course": (("max(lead", "max(lead + 1"), "mapped slow host"),
    "recomputation before the gradient": (("self.checkpoints", "()"), "mapped makespan"),
    "copies of what has changed": (
        ("version != tensor._version", "False"),
        "mapped changes",
    ),
    "copies without grad": (("tensor.requires_grad", "False"), "mapped no grad"),
    "waiting for an earlier visit": (DROP, "mapped bart"),
    "streams of a later visit": (DROP, "mapped late"),
    "the caller's streams after a course": (DROP, "mapped bart"),
    "one visit at a time": (("last is not stage", "False"), "mapped norms"),
    "recording what a visit may replace": (DROP, "mapped replaced"),
    "code of a later visit": (("_later(func", "_moved(func"), "mapped clones"),
    "taking over from an earlier visit": (
        ("wait(self.before, compute, *foreign)", "foreign"),
        "mapped clones",
    ),
    "changes of what an earlier visit has made": (
        ("aliases[id(target)].clone()", "target"),
        "mapped changed",
    ),
    "functions that are told to change in place": (
        (' or kwargs.get("inplace")', ""),
        "mapped functions",
    ),
    "recording outputs of later visits": (DROP, "mapped functions"),
    "weights that were cast": (("if stage.visit", "if False"), "mapped casts"),
    "code that comes back": (DROP, "mapped late"),
    "turns on a stage": (("i == 0 or", "True or"), "mapped threads"),
    "turns on a device": (("stage[0] not in self._holders", "True"), "mapped threads numbers"),
    "order of nodes": (DROP, "mapped threads"),
    "leaving a device with its numbers": (DROP, "mapped threads ends"),
    "sending before others come": (("if x.device != device", "if False"), "mapped threads"),
    "numbers of the CPU in threads": (
        ("content(numbers) != content(get_state(CPU))", "False"),
        "mapped threads models",
    ),
    "modes that the caller of a model computes in": (
        ("not context.alone", "True"),
        "mapped threads modes",
    ),
    "errors of the first micro-batch": (("min(self._failed, i)", "-1"), "mapped threads failures"),
    "attributes of threads": (("if changed", "if False"), "mapped threads attributes"),
    "the caller's streams in a thread": (DROP, "mapped threads streams"),
    "weights that are lent": (DROP, "mapped lent"),
    "weights that checkpoints of the model need again": (
        ("self._lasting.lock)", "type(self._lasting.lock)())"),
        "lent again",
    ),
    "weights that several threads lend": (("with self._lock", "if True"), "lent to threads"),
    "mappings of several devices": (
        ("with self._lock if again else nullcontext()", "if True"),
        "exchanged by threads",
    ),
    "changes in mappings": (("again and self", "False and self"), "exchanged in place"),
    "changes that would be lost": (("!= version", "is None"), "mapped lost"),
    "what was changed past the tail": (
        ("all(states[id(x)].fits(x) for x in tensors if id(x) in states)", "True"),
        "tail function",
    ),
    "casts of the tail": (("casts_as(self._checkpoint.context.modes)", "True"), "tail cast"),
    "hooks within the tail": (("current_hooks() is None", "True"), "tail hooked"),
    "numbers of the tail": (("not self._numbers.drawn", "True"), "tail drawn"),
    "changes within the tail": (("version_of(x) == version", "True"), "tail changed_later"),
    "what the tail was given": (("version_of(x) != version", "False"), "tail given"),
    "dropping what the tail has kept": (DROP, "mapped logits"),
    "waiting for what somebody looks at": (DROP, "mapped looks"),
    "letting go of what is omitted": (DROP, "mapped left"),
    "copies of the model itself": (("TARGETS.get(func)", "None"), "mapped labels"),
}
