"""Guards of random numbers that several threads draw: for each a mutant, and tests of it."""

from tests.virtual.mutants import DROP

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    name: (f"unit.{module}", f"test_{function}", arguments)
    for name, (module, function, arguments) in {
        "set": (
            "engine.test_drawing",
            "layers_that_set_the_generator_take_turns",
            {"name": "seeds", "mode": "never"},
        ),
        "set later": (
            "engine.test_drawing",
            "layers_that_begin_to_set_the_generator_take_turns_from_the_next_step_on",
            {},
        ),
        "begins": (
            "engine.test_drawing",
            "numbers_of_layers_that_begin_to_draw",
            {"around": "nothing", "schedule": "1f1b", "mode": "never"},
        ),
        "begins in checkpoints": (
            "engine.test_drawing",
            "numbers_of_layers_that_begin_to_draw",
            {"around": "checkpoint", "schedule": "1f1b", "mode": "never"},
        ),
        "backward": (
            "engine.test_drawing",
            "numbers_of_backward",
            {"first": lambda x: x, "schedule": "1f1b"},
        ),
        "turns": ("engine.test_drawing", "numbers_are_those_of_gpipe", {}),
        "turns of backwards": ("engine.test_drawing", "backward_that_sets_the_generator", {}),
        "traced": (
            "_torch.test_draws",
            "what_is_traced_has_no_generator",
            {"tracing_mode": "fake"},
        ),
        "within a mode": (
            "_torch.test_draws",
            "numbers_of_a_generator_of_its_own",
            {"name": "rand", "within": True},
        ),
        "elsewhere": (
            "_torch.test_draws",
            "tensors_elsewhere_are_filled_by_a_generator_of_their_device",
            {},
        ),
        "again": ("_torch.test_draws_checkpoints", "recomputations_begin_anew", {}),
    }.items()
}

MUTANTS = {
    "layers that set the generator": (DROP, "set"),
    "layers that set the generator later": (("True", "False"), "set later"),
    "steps that are watched": (("False", "True"), "set"),
    "turns of forwards": (("self._turn(j, inner, watched)", "inner"), "turns"),
    "turns of backwards": (
        ("self._turn(j, backward, backward.watched)", "backward"),
        "turns of backwards",
    ),
    "numbers of a generator of its own": (DROP, "begins"),
    "numbers of backward": (("self._generator is not None", "False"), "backward"),
    "first runs of PyTorch's checkpoints": ((" not in ", " in "), "begins in checkpoints"),
    "recomputations of PyTorch's checkpoints": (("again is None", "True"), "begins in checkpoints"),
    "recomputations begin anew": ((" or known is not run", ""), "again"),
    "draws on the CPU alone": (('tensor.device.type == "cpu" and ', ""), "elsewhere"),
    "draws within a mode": (("not _torch.count_dispatch_modes()", "True"), "within a mode"),
    "draws that are traced": (("not _torch.count_dispatch_modes()", "True"), "traced"),
}
