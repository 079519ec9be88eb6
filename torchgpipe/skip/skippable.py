"""Skippable layers: what they declare, and their ``forward``, which stashes tensors and pops them.

::

    @skippable(stash=["features"])
    class Encode(nn.Module):
        def forward(self, input):
            features = self.convolution(input)
            yield stash("features", features)
            return self.pool(features)

    @skippable(pop=["features"])
    class Decode(nn.Module):
        def forward(self, input):
            features = yield pop("features")
            return torch.cat([self.upsample(input), features], dim=1)

Such layers are used like any other, in a plain :class:`nn.Sequential` as well as wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import isgeneratorfunction
from itertools import pairwise
from typing import Any, TypeVar, cast

from torch import nn

from torchgpipe.checks import has_entries, shown, verify, verify_kind
from torchgpipe.partition.arguments import verify_a_module
from torchgpipe.skip.tracker import (
    Declared,
    Namespace,
    Skip,
    current_skip_tracker,
    describe,
    namespaces,
    skips,
)

__all__ = ["skippable", "stash", "pop", "verify_skippables"]

LayerClass = TypeVar("LayerClass", bound=type[nn.Module])


class stash:
    """Stash a tensor, or any nested structure of tensors: ``yield stash(name, tensor)``.

    Args:
        name: a name that the layer declared.
        tensor: the value for the layer that pops this name; it may be None.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Any) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Pop what was stashed: ``tensor = yield pop(name)``.

    Python holds what a generator is given until the generator yields again or returns. So the value
    stays in memory as long as the layer that pops it runs. Where that layer goes on for long after
    the last use, write the rest as a layer of its own.

    Args:
        name: a name that the layer declared.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[LayerClass], LayerClass]:
    """Declare what layers of a class stash and pop, so that ``forward`` may be a generator.

    The class stays the same one, with the same parameters, and gets a method ``isolate``. If it is
    decorated again, with other names, it stays as it is, and the result is a class derived from it.

    Args:
        stash: the names that every run of the layer stashes, once each.
        pop: the names that every run of the layer pops, once each.

    Raises:
        TypeError: the names are not a collection of strings.
        ValueError: one name is both stashed and popped.
    """
    declared = Declared(_names("stash", stash), _names("pop", pop))
    both = set(declared.stash) & set(declared.pop)
    if both:
        raise ValueError(
            "a layer must not stash a skip under the name by which it pops one "
            f"(names: {sorted(both)}); stash it under a new name"
        )

    def decorate(cls: LayerClass) -> LayerClass:
        is_layer = isinstance(cls, type) and issubclass(cls, nn.Module)
        rule = "only a class of layers can be skippable"
        remedy = "write @skippable(...) above a class derived from nn.Module"
        verify(is_layer, rule, "class", cls, remedy, TypeError)
        # The first @skippable above a class changes the class itself. It derives no other class,
        # since pickle, and super(Class, self) in methods, find the class by its name.
        if "skips_declared" not in vars(cls):
            return _declare(cls, declared, cls)
        first: Any = cls.skips_class  # type: ignore[attr-defined]
        if first.skips_declared == declared:
            return cast(LayerClass, first)
        return cast(LayerClass, _declared_again(first, declared))

    return decorate


def _declare(cls: LayerClass, declared: Declared, first: LayerClass) -> LayerClass:
    """Make a class skippable, with the class that was decorated first: itself, or its base."""
    forward = cls.forward
    driven = getattr(cls, "skips_driven", None)
    if driven and forward is driven[0]:
        # The class inherits forward from a skippable base class: it is the drive() of that class,
        # and returns no generator. This class's drive() needs the forward that returns one.
        forward = driven[1]

    @wraps(forward)
    def drive(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _drive(self, declared, forward(self, *args, **kwargs))

    load = cls._load_from_state_dict

    @wraps(load)
    def load_either(self: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # Keys of torchgpipe 0.0.7 begin with "module.", but so do the keys of a child that is named
        # "module". So "module." is removed if the layer knows more names of the keys without it.
        old = [key for key in state if key.startswith(f"{prefix}module.")]
        keys = [key.removeprefix(prefix) for key in old]
        new = [key.removeprefix("module.") for key in keys]
        if sum(_unknown(self, key) for key in new) < sum(_unknown(self, key) for key in keys):
            values = [state.pop(key) for key in old]
            state.update({prefix + key: value for key, value in zip(new, values)})
        load(self, state, prefix, *args)

    added = {
        "forward": drive,
        "isolate": isolate,
        "skips_class": first,
        "skips_declared": declared,
        "skips_driven": (drive, forward),
        "_load_from_state_dict": load_either,
    }
    for name, value in added.items():
        setattr(cls, name, value)
    return cls


@cache
def _declared_again(first: Any, declared: Declared) -> Any:
    """Derive a class from a skippable one, to declare other names."""
    named = {name: getattr(first, name) for name in ("__module__", "__qualname__", "__doc__")}
    again = _declare(type(first.__name__, (first,), named), declared, first)
    return picklable(again, _declared_again, first, declared)


def picklable(cls: Any, make: Callable[..., Any], *args: Any) -> Any:
    """Make instances of a class picklable, though pickle does not find the class by its name.

    Instances of subclasses are pickled in the ordinary way.

    Args:
        cls: the class, which is returned.
        make: a function with a name in a module. ``make(*args)`` returns the class, each time.
        *args: objects that can be pickled.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = super(cls, self).__reduce_ex__(protocol)
        return (_new, (make, *args), *reduced[2:]) if type(self) is cls else reduced

    cls.__reduce_ex__ = reduce
    return cls


def _new(make: Callable[..., Any], *args: Any) -> Any:
    cls = make(*args)
    return cls.__new__(cls)


def _unknown(layer: nn.Module, key: str) -> int:
    """Count the names at the end of a key that lead nowhere in a layer."""
    names = key.split(".")
    for k, name in enumerate(names):
        inner = layer._modules.get(name)
        if inner is None:
            return len(names) - k - (name in layer._parameters or name in layer._buffers)
        layer = inner
    return 0


def isolate(self: Any, ns: Namespace, *, only: Iterable[str] | None = None) -> Any:
    """Put skips of this layer into a namespace, apart from skips of the same name elsewhere.

    Args:
        self: the layer, of which this is a method.
        ns: the namespace; the layer at the other end is put into it as well.

    Keyword Args:
        only: the names to put there, by default all.

    Returns:
        The layer itself.

    Raises:
        ValueError: a name was not declared.
    """
    rule, remedy = "skips are isolated by a Namespace", "pass Namespace(), to the other end as well"
    verify_kind(ns, Namespace, rule, "ns", remedy)
    declared = (*self.skips_declared.stash, *self.skips_declared.pop)
    names = declared if only is None else _names("only", only)
    for name in names:
        if name not in declared:
            raise ValueError(
                "only names that the layer declared can be isolated "
                f"(name: {name!r}, declared: {list(declared)}); declare it in @skippable(...)"
            )
    self.skip_namespaces = {**namespaces(self), **dict.fromkeys(names, ns)}
    return self


def _drive(layer: nn.Module, declared: Declared, output: Any) -> Any:
    """Run the generator of a layer, and check that it stashed and popped what was declared."""
    due = {stash: set(declared.stash), pop: set(declared.pop)}
    # A forward that neither stashes nor pops may be a plain function.
    if isinstance(output, Generator):
        generator = output
        try:
            output = _run_generator(layer, declared, generator, due)
        finally:
            # After an error, close() leaves the generator's blocks, such as that of no_grad().
            generator.close()
    for kind, names in due.items():
        if names:
            raise RuntimeError(
                f"a layer must {kind.__name__} all that it declares, in every run "
                f"(layer: {type(layer).__name__}, missing: {sorted(names)}); stash None if there "
                "is nothing to stash, and pop what is not needed, too"
            )
    return output


def _run_generator(
    layer: nn.Module,
    declared: Declared,
    generator: Generator[Any, Any, Any],
    due: dict[type[stash] | type[pop], set[str]],
) -> Any:
    spaces = namespaces(layer)
    tracker = current_skip_tracker()
    sent = None
    while True:
        try:
            asked = generator.send(sent)
        except StopIteration as stop:
            return stop.value
        if not isinstance(asked, (stash, pop)):
            raise TypeError(
                "a skippable layer must yield stash(name, tensor) or pop(name) "
                f"(layer: {type(layer).__name__}, yielded: {type(asked).__name__}); "
                "return the output of the layer"
            )
        if not isinstance(asked.name, str) or asked.name not in due[type(asked)]:
            raise _undeclared(layer, declared, asked)
        due[type(asked)].remove(asked.name)
        skip = (spaces.get(asked.name), asked.name)
        sent = None
        if isinstance(asked, pop):
            sent = tracker.load(skip)
        else:
            tracker.save(skip, asked.tensor)
        # Deleting the request frees a stashed tensor while the layer goes on. A popped tensor stays
        # in memory: Python keeps the argument of send() until the generator yields again.
        del asked


def _undeclared(
    layer: nn.Module, declared: Declared, asked: stash | pop
) -> RuntimeError | TypeError:
    kind = type(asked).__name__
    if not isinstance(asked.name, str):
        return TypeError(
            f"the name of a skip must be a text (layer: {type(layer).__name__}, {kind}: "
            f"{shown(asked.name)}); pass one of {list(getattr(declared, kind))}"
        )
    names = getattr(declared, kind)
    rule = "at most once in a run" if asked.name in names else "only what it declares"
    return RuntimeError(
        f"a layer can {kind} {rule} (layer: {type(layer).__name__}, name: {asked.name!r}, "
        f"declared: {list(names)}); use a name of its own in @skippable({kind}=[...]) for each"
    )


def _names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    is_collection = has_entries(names) and not isinstance(names, str | Mapping)
    entries = tuple(names) if is_collection else ()
    valid = is_collection and all(isinstance(name, str) for name in entries)
    rule, remedy = f"{argument} must be a collection of names", f'write {argument}=["name"]'
    verify(valid, rule, argument, names, remedy, TypeError)
    return entries


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip is stashed once, and popped once by a later layer.

    A skip that a layer both stashes and pops, within itself, may repeat in other such layers.

    Args:
        module: the layers, with skippable ones anywhere within them. A layer may run the layers
            within it in any order.

    Raises:
        TypeError: a skip is not stashed once and popped once, or a layer yields and is not
            skippable; the message lists every fault.
    """
    verify_a_module(module, "module")
    faults: list[str] = []
    stashed: dict[Skip, str] = {}
    popped: dict[Skip, str] = {}
    closed: set[Skip] = set()
    for child, layer in module._modules.items():
        if layer is None:
            continue
        faults += _undecorated(child, layer)
        ends = [(path, *skips(submodule)) for path, submodule in layer.named_modules(prefix=child)]
        here = _closed(ends)
        for path, stashes, _ in ends:
            for skip in stashes:
                if skip in stashed and not (skip in here and skip in closed):
                    faults.append(
                        f"{path} stashes {describe(skip)}, which {stashed[skip]} has stashed before"
                    )
                stashed.setdefault(skip, path)
                closed |= here & {skip}
        for path, _, pops in ends:
            for skip in pops:
                if skip in popped and not (skip in here and skip in closed):
                    faults.append(
                        f"{path} pops {describe(skip)}, which {popped[skip]} has popped before"
                    )
                elif skip not in stashed:
                    faults.append(f"{path} pops {describe(skip)}, which no layer before it stashes")
                popped.setdefault(skip, path)
    faults += [
        f"{path} stashes {describe(skip)}, which no layer pops"
        for skip, path in stashed.items()
        if skip not in popped
    ]
    if faults:
        raise TypeError(
            "every skip must be stashed by one layer and popped by one that comes later, or by "
            f"turns within one layer (faults: {len(faults)}); declare both ends with @skippable, "
            "and put layers of one class into namespaces with isolate(Namespace()):\n"
            + "\n".join(f"- {fault}" for fault in faults)
        )


def _closed(layers: Sequence[tuple[str, list[Skip], list[Skip]]]) -> set[Skip]:
    """Find skips that one layer both stashes and pops, and pops before it stashes them again."""
    ends: dict[Skip, list[str]] = {}
    for _, stashes, pops in layers:
        for kind, skips_of_kind in (("stash", stashes), ("pop", pops)):
            for skip in skips_of_kind:
                ends.setdefault(skip, []).append(kind)
    return {
        skip
        for skip, kinds in ends.items()
        if len(kinds) % 2 == 0 and all(a != b for a, b in pairwise(kinds))
    }


def _undecorated(path: str, layer: nn.Module) -> Iterator[str]:
    """Report layers that yield and are not skippable: the next layer would get a generator."""
    if isgeneratorfunction(layer.forward):
        yield (
            f"{path} ({type(layer).__name__}) yields in forward, and its class is not decorated "
            "with @skippable"
        )
    elif getattr(layer.forward, "__func__", None) is nn.Sequential.forward:
        # Children of other layers are left out: those layers may run the generators themselves.
        for child, inner in layer._modules.items():
            if inner is not None:
                yield from _undecorated(f"{path}.{child}", inner)
