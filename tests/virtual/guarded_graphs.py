"""Guards of stages that are graphs: for each a mutant, and tests that must fail with it."""

from tests.virtual.mutants import DROP

#: Tests, by a short name: the module, the function, and some of its arguments.
TESTS = {
    f"graph {name}": (module, f"test_{function}", arguments)
    for name, (module, function, arguments) in {
        "kept": ("behaviour.test_graph_stages", "layers_that_keep_what_they_have_made", {}),
        "effects": ("unit.graphs.test_joint_effects", "changes_in_place", {}),
        "tidy": ("unit.graphs.test_slices_tidy", "references_behind_a_change_stay", {}),
        "leaves": ("unit.graphs.test_trace_leaves", "trace_that_fails_anywhere", {}),
        "layout": ("unit.graphs.test_parts_strides", "strides_that_no_kernel_returns", {}),
        "layout of outputs": ("unit.graphs.test_parts_strides", "outputs", {}),
        "in place": ("unit.graphs.test_slices_cut", "changes_in_place_are_in_one_half", {}),
        "norm": ("unit.graphs.test_slices_masks", "norm_stays_whole", {}),
        "order": ("unit.graphs.test_parts", "random_numbers_stay_in_order", {}),
        "buffers": ("behaviour.test_graph_stages", "buffers_that_are_read_and_changed", {}),
        "autocast": ("behaviour.test_graph_stages", "layers_that_leave_autocast", {}),
        "numbers": ("behaviour.test_graph_stages", "bits", {"name": "1f1b", "case": "dropout"}),
        "gate": (
            "behaviour.test_graph_changes",
            "nobody_traces_while_an_eager_cell_computes",
            {"name": "zbh1"},
        ),
        "keep": (
            "behaviour.test_keep",
            "graphs_keep_values_too",
            {"recompute": "everything", "compile": None},
        ),
        "overlaps": ("virtual.test_graph_overlaps", "host_that_stumbles", {}),
        "message": ("virtual.test_graph_overlaps", "changes_in_place_around_a_message", {}),
        "pairs": ("virtual.test_graph_overlaps", "pairs_of_forwards_and_of_backwards", {}),
        "time": ("virtual.test_graph_overlaps", "forward_beside_backward", {}),
        "numbers side by side": (
            "virtual.test_graph_overlaps",
            "random_numbers",
            {"kind": "pairs"},
        ),
    }.items()
}

MUTANTS = {
    "changes in place before a node": ((", *self.before(node)", ""), "graph effects"),
    "changes in place after a result": ((", *self.changes(result)", ","), "graph effects"),
    "changes in place before a reference": (
        (" and not effects.between(same, node)", ""),
        "graph tidy",
    ),
    "notes of checkpoints in a trace": (("preserve_node_meta(),", ""), "graph leaves"),
    "views of other strides": (DROP, "graph layout"),
    "strides of arguments": (DROP, "graph layout"),
    "strides of outputs": (DROP, "graph layout of outputs"),
    "changes in place across the halves": (DROP, "graph in place"),
    "results of an operator that both halves need": (DROP, "graph norm"),
    "random numbers of a first run": (("is_random(x) or ", ""), "graph order"),
    "random numbers in the same order": (("is_random(x) or ", ""), "graph order"),
    "what layers keep of a graph": ((" - joint.kept", ""), "graph keep"),
    "buffers of before the first run of a graph": (
        ("copy_with_strides(state[k], state[k].stride())", "state[k]"),
        "graph buffers",
    ),
    "autocast around a graph": (("without_autocast()", "nullcontext()"), "graph autocast"),
    "computing beside a trace": (("with gate", "with nullcontext()"), "graph gate"),
    "arithmetic takes turns": (DROP, "graph time"),
    "communication after what it sends": (DROP, "graph overlaps"),
    "recording what is communicated": (DROP, "graph overlaps"),
    "changes in place around a message": (DROP, "graph message"),
    "waiting for communication": (DROP, "graph overlaps"),
    "recording the result of communication": (DROP, "graph overlaps"),
    "random numbers of an overlap": (
        ("self.part.is_random or other.part.is_random", "False"),
        "graph numbers side by side",
    ),
    "layers that keep what they have made": (("entry.has_run", "True"), "graph kept"),
    "random numbers of a graph": (("numbers.restored()", "nullcontext()"), "graph numbers"),
}
