"""Guards of what runs schedules: for each a mutant without it, and tests that must fail then."""

from tests.virtual.mutants import DROP

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    name: (f"virtual.{module}", f"test_{function}", arguments)
    for name, (module, function, arguments) in {
        "workers of one device": ("test_schedule_races", "workers_of_one_device", {}),
        "gradients by hand": ("test_schedule_races", "gradients_that_the_caller_asks_for", {}),
        "state of one device": (
            "test_schedule_races",
            "workers_of_one_device_that_share_a_layer_with_state",
            {},
        ),
        "time of one device": (
            "test_schedule_times",
            "workers_that_share_a_device",
            {"name": "1f1b"},
        ),
        "a V": ("test_schedule_races", "a_v", {}),
        "overlaps": ("test_schedule_races", "overlaps", {}),
        "hooks of weights": ("test_schedule_races", "hooks_of_weights", {}),
        "the other order": ("test_schedule_races", "overlaps_in_the_other_order", {}),
        "targets": ("test_schedule_races", "targets_from_another_device", {}),
        "evaluation": ("test_schedule_races", "evaluation_with_targets_from_another_device", {}),
        "what arrives": ("test_schedule_memory", "what_arrives_is_let_go_of", {}),
    }.items()
} | {
    name: (f"unit.{module}", f"test_{function}", arguments)
    for name, (module, function, arguments) in {
        "strays": ("test_scheduled_targets", "weight_of_another_module", {}),
        "strays of overlaps": (
            "test_scheduled_targets",
            "weight_of_another_module_in_cells_that_overlap",
            {},
        ),
        "hooks of strays": ("test_scheduled_targets", "hook_of_a_weight_of_another_module", {}),
        "autocast": ("test_scheduled", "autocast", {"checkpoint": "never"}),
        "halves": ("autograd.test_halves", "what_only_the_input_needed_is_let_go_of", {}),
        "hooks of nodes": (
            "autograd.test_halves",
            "hooks_of_nodes_run_once_with_all_gradients",
            {},
        ),
        "shared sums": ("engine.test_outcome", "sums_that_share_memory", {}),
        "changes of what arrives": (
            "autograd.test_nodes_ends_entrance",
            "layers_may_change_what_enters",
            {},
        ),
        "at once": ("engine.test_outcome", "gradients_added_at_once", {}),
        "sums of all": (
            "test_scheduled",
            "large_weights_of_two_workers",
            {},
        ),
    }.items()
}

TESTS |= {
    "casts": ("unit.ambient.test_context", "test_casts_of_weights_are_forgotten", {}),
    "casts of workers": (
        "behaviour.test_autocast",
        "test_layers_that_enter_autocast_in_a_worker",
        {"around": "a block"},
    ),
    "casts that come late": (
        "behaviour.test_autocast",
        "test_casts_that_a_worker_makes_after_its_step_has_failed",
        {},
    ),
    "the CPU": (
        "virtual.test_random_numbers",
        "test_stages_on_an_accelerator_and_the_cpu",
        {"is_first": True, "draws": [False, True], "schedule": "1f1b"},
    ),
    "turns": ("unit.engine.test_drawing", "test_numbers_are_those_of_gpipe", {}),
    "draws late": (
        "unit.engine.test_drawing",
        "test_layers_that_begin_to_draw_are_an_error_once",
        {},
    ),
}

MUTANTS = {
    "nesting of autocast": (("= nested", "= False"), "casts"),
    "casts of the caller's block": (DROP, "casts of workers"),
    "casts after a failure": (DROP, "casts that come late"),
    "start of an overlap": (DROP, "overlaps"),
    "end of an overlap": (DROP, "overlaps"),
    "recording for the other stream": (DROP, "overlaps", "the other order"),
    "turns of computations": (("lock if x in shared else ", ""), "turns"),
    "turns beside the CPU": (("{*counts}", "shared"), "the CPU"),
    "draws without turns": (("!= before", "is None"), "draws late"),
    "strays": (
        ("cell.look_for_strays(self.sums.nodes[cell.j])", "[]"),
        "strays",
    ),
    "hooks of strays": (DROP, "hooks of strays"),
    "strays met once": ((" if id(x) not in known", ""), "strays of overlaps"),
    "autocast in backward": ((" if casts", " if False"), "autocast"),
    "own streams of workers": (("count > 1", "False"), "time of one device"),
    "workers that share layers": (("count > 1", "False"), "state of one device"),
    "waiting for what is sent": (DROP, "a V"),
    "recording what is received": (DROP, "a V"),
    "recording what goes to the caller": (DROP, "workers of one device"),
    "waiting for targets": (DROP, "targets"),
    "recording targets": (DROP, "evaluation"),
    "workers after the caller": (DROP, "workers of one device"),
    "the caller after workers": (DROP, "workers of one device"),
    "sums of what is not ours": (("is_alone(total)", "True"), "shared sums"),
    "sums instead of gradients": ((" or grad is total", ""), "at once"),
    "sums of weights that workers share": ((" if count[key] == 1", ""), "sums of all"),
    "recording what is handed over": (DROP, "gradients by hand"),
    "recording what hooks return": (DROP, "hooks of weights"),
    "what only the input needed": (DROP, "halves"),
    "hooks of nodes": ((" or (self._hooked and changes_gradients(node))", ""), "hooks of nodes"),
    "letting go of what arrives": (("x.detach()", "x"), "what arrives"),
    "changes of what arrives": (("all(map(is_alone, tensors))", "True"), "changes of what arrives"),
}
