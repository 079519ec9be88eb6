"""Each safeguard is needed: a test fails without it."""

import pytest

from tests.virtual.judges import judge
from tests.virtual.mutants import DROP, guards, mutated

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
    "lane of Copy": (("method.owner(lane, self.stream)", "self.stream"), "skip"),
    "lane of arriving Wait": (("batch =", "with use_stream(lane): batch ="), "shifted"),
    "lane of leaving Wait": (("batch =", "with use_stream(lane): batch ="), "same memory"),
    "lane of what leaves": (("owner(lane, self.stream)", "self.stream"), "limit"),
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
    "random numbers": (("numbers.restored(), ", ""), "dropout"),
    "join [1]": ((", phonies", ""), "detour"),
    "join [1] before the layers": (("batch.requires_grad", "False"), "detour"),
    "join [1']": (DROP, "slow host"),
    "fork [2]": (DROP, "slow host"),
    "lead [3]": (("*[(i - lead, k) for k in self.step.lanes.held_by[j]]", ""), "slow host"),
    "lead in forward": (DROP, "few streams"),
    "gradient of a fork": (("expand_as", "view_as"), "gradients of a skip"),
    "no leaves": (
        ("next(found) if need else x.detach()", "x.detach().requires_grad_(need)"),
        "skip in a second run",
    ),
    "memory of a phony": (
        ("torch.cat(phonies)", "(phonies[0] if len(phonies) == 1 else torch.cat(phonies))"),
        "what has left",
    ),
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
    "own streams": (("0 if partitions == 1 else partitions", "0"), "shared limit"),
    "groups": (("groups(self.partitions)", "list(range(len(self.partitions)))"), "shared layers"),
    "letting go of a skip": (("pop(skip, None)", "get(skip)"), "last use"),
    "letting go of the input": (DROP, "last use"),
    "letting go of what is watched": (("counter_of(x)", "x"), "skip and value"),
    "letting go of slots": (("slots, self.slots = self.slots, []", "slots = self.slots"), "peak"),
    "letting go of what was kept": (
        ("(stored, numbers), self.stored = self.stored, None", "stored, numbers = self.stored"),
        "let go",
    ),
    "numbers go on": (DROP, "same numbers"),
    "numbers are taken along": (DROP, "same numbers"),
    "numbers by type of device": (
        ("self.states[self.kind]", "self.states[min(self.states)]"),
        "types of devices",
    ),
    "generators are put back": (("self._devices", "()"), "same numbers"),
    "generators are put back after an exception": (
        ("error is None and ", ""),
        "generators as found",
    ),
    "seeds of micro-batches": ((" + i", ""), "other numbers"),
    "seeds of steps": (
        ("self._state(device, self._m) if drawn else found", "found"),
        "a later micro-batch",
    ),
    "locks of a step": (("locks_of(self._devices)", "[]"), "one step at a time"),
    "no locks within a cell": (
        ("[] if nesting.depth else ", ""),
        "a step within a cell",
        "a recomputation within a cell",
    ),
    "locks after a failure": (
        ("with locks[0]:", "if locks[0].__enter__():"),
        "a step that does not begin",
    ),
    "locks of a recomputation around a step": (
        ("*self.exchanged, ", ""),
        "recomputation of a step",
    ),
    "workers only for what blocks": (("not self.seen_to_block", "False"), "never blocks"),
    "modes that only the caller computes in": (("context.alone or ", ""), "hooks"),
    "modes of a second run": (DROP, "modes"),
    "modes of backward": (DROP, "modes of backward"),
    "context variables": (
        ("self.context.run(self.function, again)", "self.function(again)"),
        "modes",
    ),
    "threads of an operator": (DROP, "threads of an operator"),
    "what is kept is packed": (("_hooks_of_caller()", "None"), "hooks of what is kept"),
    "what a backward leaves": (DROP, "what a backward leaves"),
    "a partition at a time": (("self.lock, ", ""), "at a time"),
    "what is interrupted": (("Snapshot(self._devices), ", ""), "interrupted"),
    "hooks of the forward": (("now.hooks != found.hooks", "False"), "hooks changed"),
    "leaves": (
        ("tensor.clone() if base.requires_grad and base.is_leaf else ", ""),
        "parameters passed on",
    ),
    "to the end after a change": ((" or changed", ""), "parameter changed"),
    "to the end for hooks": (("self.whole or ", ""), "always called"),
    "kept without its graph": (
        (" if isinstance(tensor, nn.Parameter) else tensor.detach()", ""),
        "nothing to do",
    ),
    "versions of what goes whole": (("kind is None", "False"), "what goes whole"),
    "what is written after it was saved": (
        ("not tensor.requires_grad and not slot.lasting", "False"),
        "noise",
    ),
    "buffers of before the first run": (DROP, "changing buffers"),
    "norms that read their statistics": (
        (" if type(module).forward.__module__ in NORMS else ()", ""),
        "norm",
    ),
    "keeping what lasts": (("own in self.lasting", "False"), "frozen partitions"),
    "no Recompute for nothing": (("self.stored is None or ", ""), "frozen partitions"),
    "versions of what is kept": (("tensor._version != slot.version", "False"), "weights changed"),
}


CASES = [(name, test) for name, (_, *tests) in MUTANTS.items() for test in tests]


@pytest.mark.parametrize(("name", "test"), CASES)
def test_a_test_fails_without(devices, name, test):
    change, *_ = MUTANTS[name]
    # A race that needs a host which stumbles at the right moment may need several attempts.
    for _ in range(20):
        try:
            with mutated(name, change):
                judge(test, devices)
        except (AssertionError, UserWarning, pytest.fail.Exception):
            return
    pytest.fail(f"{test} passes")


@pytest.mark.parametrize("test", ["limit", "shifted", "last use"])
def test_what_finds_it_passes_otherwise(devices, test):
    """A test that finds a mutant passes with the plain package, imported anew."""
    with mutated("waiting", ("", "")):
        judge(test, devices)


def test_every_guard_has_a_mutant():
    assert set(guards()) == set(MUTANTS)


def test_a_marker_without_its_line_is_an_error():
    fragment = ("nothing of the kind", "")
    with pytest.raises(LookupError, match=fragment[0]), mutated("waiting", fragment):
        pass
