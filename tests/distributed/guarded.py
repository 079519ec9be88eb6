"""Guards that need several processes: for each a mutant without it, and a case that must fail."""

from tests.distributed.test_pipe import more_chunks, wrong_in_both
from tests.virtual.mutants import DROP

#: By guard: the change, the case, the number of processes, and the arguments.
MUTANTS = {
    "clone of what goes to a process": (
        ("is_alone(tensor)", "True"),
        "test_messages:again",
        2,
        ["1f1b"],
    ),
    "numbers travel until nothing draws": (
        ("not all(x[4] for x in answers)", "False"),
        "test_schedules:train",
        2,
        ["fill_drain", 2, "never"],
    ),
    "errors that all raise": (DROP, "test_pipe:refusal", 2, [more_chunks, ValueError, 1]),
    "what is wrong in several processes": (
        DROP,
        "test_pipe:refusal",
        2,
        [wrong_in_both, (ValueError, RuntimeError)],
    ),
    "buffers of a step that is refused": (DROP, "test_pipe:buffers_of_a_refused_step", 2, []),
    "generators of all processes": (DROP, "test_schedules:train", 2, ["fill_drain", 2, "never"]),
    "gradients of tied weights": (DROP, "test_pipe:tied", 4, ["1f1b"]),
    "skips that share memory elsewhere": (
        ("form.shared", "frozenset()"),
        "test_messages:skip_changed_in_place",
        2,
        [],
    ),
}
