"""Arguments that users pass: what is wrong is an error, and a likely mistake is a warning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.checks import has_entries, verify, verify_function, verify_kind, verify_number
from torchgpipe.devices.streams import CPU, Device, accelerators, canonical_device
from torchgpipe.values.division import (
    Division,
    FlatInput,
    is_list_of_rows,
    is_shape,
    rows_in,
    tensors_of_row,
)
from torchgpipe.values.structure import ATOMS, LEAF, MISSING, Arguments, InputMark, leaves_of, names

__all__ = ["MISSING"]


# The balance, the devices and the settings of a wrapper, checked before anything is moved.


#: The longest ``timeout`` of a measurement that :func:`checked_timeout` accepts, in seconds.
DAY = 86_400


def positive_int(value: Any) -> int | None:
    """A positive number of things as an integer; None for anything else, such as True or 1.5.

    8 / 2 is such a number, and so is an element of a tensor or of an array.
    """
    try:
        number = int(value)
        return number if number > 0 and number == value and not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def checked_count(value: Any, name: str, things: str, remedy: str) -> int:
    """Check a number of things, and return it as an integer.

    Raises:
        ValueError: the number is no positive integer.
    """
    number = positive_int(value)
    if number is None:
        rule = f"{name} must be a positive integer, the number of {things}"
        raise ValueError(f"{rule} ({name}: {value!r}); {remedy}")
    return number


def checked_chunks(chunks: Any) -> int:
    """Check a number of micro-batches: see :func:`checked_count`."""
    return checked_count(chunks, "chunks", "micro-batches", "chunks=1 does without micro-batches")


def checked_threads(threads: Any) -> int:
    """Check a number of threads: see :func:`checked_count`."""
    remedy = "threads=1 computes all in the thread of the caller"
    return checked_count(threads, "threads", "threads that compute micro-batches", remedy)


def checked_timeout(timeout: Any) -> float:
    """Check the seconds of a measurement.

    Raises:
        TypeError: they are no number.
        ValueError: they are negative, or more than a day.
    """
    rule = "timeout must be the seconds to measure, from 0 to a day"
    remedy = "pass 1.0, or 0 for a few rounds alone"
    verify_number(timeout, rule, "timeout", remedy)
    verify(timeout <= DAY, rule, "timeout", timeout, remedy)
    seconds: float = timeout
    return seconds


def verify_scale(param_scale: Any) -> None:
    """Check how many times its own memory a parameter takes.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or not finite.
    """
    rule = (
        "param_scale must not be negative, since it is how many times its own memory a parameter "
        "takes in training"
    )
    verify_number(param_scale, rule, "param_scale", "2 is for SGD, 4 for Adam")


def verify_a_module(module: Any, name: str) -> None:
    """Check that a value is a module.

    Raises:
        TypeError: it is none.
    """
    remedy = "pass the model itself, an object and not its class"
    verify_kind(module, nn.Module, f"{name} must be an nn.Module", name, remedy)


def verify_loss(loss: Any, weight_of: Any = None) -> None:
    """Check that a loss can be called, and the function of its targets that tells its weight.

    Raises:
        TypeError: one cannot.
        ValueError: the loss says of itself that it is a sum, and no function tells its weight.
    """
    rule = "loss must be a function of an output and its targets"
    verify_function(loss, rule, "loss", "pass torch.nn.functional.cross_entropy, for one")
    if weight_of is not None:
        rule, remedy = "weight_of must be a function of the targets", "pass such as torch.numel"
        verify_function(weight_of, rule, "weight_of", remedy)
        return
    attributes = loss.keywords if isinstance(loss, partial) else getattr(loss, "__dict__", {})
    rule = "loss must be a mean over the rows of its micro-batch"
    remedy = "take the mean, return (sum, number of what is summed up), or pass weight_of"
    verify(attributes.get("reduction") != "sum", rule, "reduction", "sum", remedy)


def checked_index(index: Any) -> Any:
    """Check the index of a layer, or of several.

    Raises:
        TypeError: it is none.
    """
    valid = isinstance(index, slice) or hasattr(index, "__index__")
    verify(valid, "a layer has a number", "index", index, "pass such as 0, or -1", TypeError)
    return index


def checked_balance(balance: Iterable[int] | None, module: nn.Sequential) -> list[int]:
    """Check a balance, and return it as a list.

    Raises:
        TypeError: the balance is no sequence.
        ValueError: the balance is missing, has something else than positive integers, or does not
            add up to the number of layers.
    """
    if balance is None:
        raise ValueError(
            "balance must be given, the number of layers of each partition (balance: None); for "
            f"one partition, pass [{len(module)}], and for several 'auto' and a sample, or ask "
            "torchgpipe.balance.balance_by_time"
        )
    try:
        entries = list(balance)
    except TypeError:
        raise TypeError(
            "balance must be a sequence with the number of layers of each partition "
            f"(balance: {balance!r}); for one partition, pass [{len(module)}]"
        ) from None
    sizes = [size for size in map(positive_int, entries) if size is not None]
    if len(sizes) < len(entries):
        raise ValueError(
            "balance must be positive integers, the number of layers in each partition "
            f"(balance: {entries}); leave a partition without layers out"
        )
    if sum(sizes) != len(module):
        raise ValueError(
            "balance must add up to the number of layers "
            f"(balance: {sizes}, sum: {sum(sizes)}, layers: {len(module)}); "
            "give every layer to one partition, or ask torchgpipe.balance.balance_by_time"
        )
    return sizes


def checked_devices(devices: Iterable[Device] | None, partitions: int) -> list[torch.device]:
    """Check devices, and return one for each partition.

    Args:
        devices: the devices; by default all accelerators, or else the CPU for each partition.
        partitions: how many partitions there are.

    Raises:
        TypeError: the devices are no sequence.
        ValueError: this machine has no such device.
        IndexError: there are fewer devices than partitions.
    """
    chosen: Sequence[Device] = accelerators() or [CPU] * partitions
    if devices is not None:
        if isinstance(devices, str) or not has_entries(devices):
            raise TypeError(
                "devices must be a sequence with a device for each partition "
                f"(devices: {devices!r}); for one device for all, pass [{str(devices)!r}] * "
                f"{partitions}"
            )
        chosen = list(devices)
    if len(chosen) < partitions:
        raise IndexError(
            "there must be a device for each partition "
            f"(partitions: {partitions}, devices: {[str(device) for device in chosen]}); "
            "use fewer partitions, or name a device several times"
        )
    return [checked_device(device) for device in chosen[:partitions]]


def checked_device(device: Device) -> torch.device:
    """Check that this machine has a device.

    Raises:
        ValueError: it has not.
    """
    known = [CPU, *accelerators()]
    try:
        chosen = canonical_device(device)
        there = chosen in known or chosen.type == "meta"
    except (RuntimeError, TypeError, ValueError, OverflowError):
        # PyTorch knows no such name, or the device is an index, and there is no accelerator.
        there = False
    if not there:
        raise ValueError(
            "devices must be the CPU or accelerators of this machine "
            f"(device: {device}, there are: {', '.join(map(str, known))}); name one that is "
            "there, several times if need be"
        )
    return chosen


def verify_filled(tensor: Tensor, name: str, devices: Iterable[torch.device]) -> None:
    """Check that a tensor has values for devices other than the meta device.

    Raises:
        ValueError: it has none.
    """
    if tensor.is_meta and not any(device.type == "meta" for device in devices):
        raise ValueError(
            f"{name} must have values, and a tensor on the meta device has none ({name}: meta, "
            f"shape: {tuple(tensor.shape)}); make it on another device, as by device='cpu'"
        )


# Likely mistakes: calls that are allowed, but seldom meant. Each is a warning, once per wrapper.
#
# A warning may be wrong, since it is not known what a layer does with its input. So each message
# also says how to silence it.


#: PyTorch's layers that take dimension 0 for the sequence, unless made with batch_first=True.
SEQUENCES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


class Traps:
    """The warnings that one wrapper has given. A copy of the wrapper does not give them again."""

    def __init__(self, wrapper: str) -> None:
        self._wrapper = wrapper
        self._known: set[str] = set()
        #: Whether a mini-batch has come since ``chunks`` was set: idle() looks only at the first.
        self.seen = False
        #: Whether a step has looked for buffers that layers change in forward: only one step looks.
        self.knows_state = False

    def sequence_first(self, layers: Iterable[nn.Module], chunks: int) -> None:
        """Warn if layers take dimension 0 for the sequence while it is split."""
        if chunks == 1 or "sequence" in self._known:
            return
        paths = list(chain.from_iterable(map(_sequence_first, layers)))
        if paths:
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            warn(
                f"{self._wrapper} splits dimension 0 into micro-batches, and layers made without "
                f"batch_first=True take it for the sequence (layers: {', '.join(paths[:3])}{more}, "
                f"chunks: {chunks}); make them with batch_first=True, and put the batch first in "
                "the input. Where a layer transposes its input itself, all is well: silence this "
                f"by warnings.filterwarnings('ignore', '{self._wrapper} splits dimension 0')"
            )
            self._known.add("sequence")

    def lists(self, input: FlatInput, micro_batches: int) -> None:
        """Warn of lists and arrays with an entry for each row: most are not split."""
        if micro_batches == 1 or input.spec is LEAF:
            return
        rows = input.rows
        looked = {} if not rows or "lists" in self._known else objects_in(input)
        if whole := [name for name, x in looked.items() if _entries(x) == rows]:
            warn(
                f"{self._wrapper} splits tensors, and gives lists and arrays whole to every "
                f"micro-batch (input: {', '.join(whole)}, entries: {rows}, micro-batches: "
                f"{micro_batches}); pass a tensor to have it split, such as the indices of the "
                "entries, what is divided already as torchgpipe.Chunks(values), and what every "
                "micro-batch shall get whole as torchgpipe.NoChunk(value)"
                f"{self._silenced('splits tensors, and gives lists')}"
            )
            self._known.add("lists")
        # A list with an entry for each row is split as a list. If each tensor in it has as many
        # rows, the caller may have meant to split the tensors.
        lists = input.named(is_list_of_rows)
        sizes = {
            name: {len(x) for entry in entries for x in tensors_of_row(entry)}
            for name, entries in lists.items()
        }
        common = {rows}
        if sizes and not any(rows_in(x) for x in input.leaves if type(x) is not list):
            # In a list of mappings, each mapping is a row: nobody means to split the tensors in it.
            mapped = any(isinstance(x, Mapping) for entries in lists.values() for x in entries)
            common = set() if mapped else set.union(*sizes.values())
        either = [name for name, rows_of in sizes.items() if len(common) == 1 and rows_of == common]
        if either and "either" not in self._known:
            warn(
                f"{self._wrapper} splits a list with an entry for each row as a list, and not the "
                f"tensors in it (input: {', '.join(either)}, entries: {rows}, rows: {rows}); pass "
                "a tuple to have the tensors in it split"
                f"{self._silenced('splits a list')}"
            )
            self._known.add("either")

    def _silenced(self, words: str) -> str:
        """The end of a message, which says how to silence it."""
        wrapper, by = self._wrapper, "warnings.filterwarnings('ignore', "
        return f". If all is as you mean it, silence this by {by}'{wrapper} {words}')"

    def idle(self, devices: int, division: Division) -> None:
        """Warn if the first mini-batch has fewer micro-batches than devices, which then wait.

        Later ones may be the rest of an epoch.
        """
        m, rows = division.m, sum(division.sizes)
        before, self.seen = self.seen, True
        if before or m >= devices or "idle" in self._known:
            return
        self._known.add("idle")
        count = f"micro-batches: {m}, " + ("" if division.is_given else f"rows: {rows}, ")
        if division.is_given:
            change = "pass more in one call (in a Trainer: raise chunks, or accumulate more)"
        elif rows > m:
            change = f"set model.chunks, for a start to {min(rows, 4 * devices)}"
        else:
            change = "pass more rows in one call, or several mini-batches, marked by Chunks"
            if self._wrapper == "MappedGPipe":
                change += ", or divide long sequences of a causal model, as by slices=8"
        words = f"{self._wrapper} leaves devices idle"
        warn(
            f"{words} for {(devices - 1) / (devices + m - 1):.0%} of a training step, since it has "
            f"fewer micro-batches than devices ({count}devices: {devices}); {change}, or silence "
            f"this by warnings.filterwarnings('ignore', '{words}')"
        )

    def coupled(
        self,
        outputs: Sequence[Sequence[torch.Size]],
        rows: Sequence[int],
        inputs: Sequence[torch.Size],
        parameters: Iterable[Tensor],
    ) -> None:
        """Warn if an output compares the rows of its micro-batch with each other.

        The shapes are those in the outputs of the first micro-batch and, if they are known, of the
        last.
        """
        if len(rows) < 2 or rows[0] < 2 or "coupled" in self._known or not outputs:
            return
        # If the last micro-batch has fewer rows, its output shows which sizes change with the rows.
        told = rows[-1] != rows[0] and len(outputs) > 1
        pairs = [(rows[0], rows[0]), (rows[-1], rows[-1])][: len(outputs)]
        if not any([*shapes] == pairs for shapes in zip(*outputs)):
            return
        # If all micro-batches have equally many rows, a size of an output may equal their number by
        # chance. So there is no warning if a feature or a parameter has this size, too.
        if not told and (
            any(rows[0] in x[1:] for x in inputs) or any(rows[0] in x.shape for x in parameters)
        ):
            return
        warn(
            "an output has an entry for each pair of rows, so each row is compared with those of "
            f"its micro-batch alone (output: {(rows[0], rows[0])}, rows of the mini-batch: "
            f"{sum(rows)}); return what is compared, and compare it after the wrapper, where all "
            "rows are. If that is what you mean, silence this by warnings.filterwarnings('ignore', "
            "'an output has an entry for each pair')"
        )
        self._known.add("coupled")


def _sequence_first(module: nn.Module, path: str = "") -> Iterator[str]:
    """The outermost layers for which dimension 0 is the sequence."""
    if isinstance(module, SEQUENCES):
        if any(getattr(x, "batch_first", True) is False for x in module.modules()):
            yield f"{path or 'the model'} ({type(module).__name__})"
        return
    for name, child in module.named_children():
        yield from _sequence_first(child, f"{path}.{name}" if path else name)


def objects_in(input: FlatInput) -> dict[str, Any]:
    """The objects that go whole without a mark, by paths; a list or tuple without tensors is one.

    Without any, if there are fewer numbers and texts than rows, and nothing else.
    """
    if sum(type(x) in ATOMS for x in input.leaves) < input.rows and not input.objects:
        return {}
    # The tuple that holds the arguments of a call is no object of the caller's.
    args = input.value.args if isinstance(input.value, Arguments) else None

    def is_leaf(x: Any) -> bool:
        if type(x) not in (list, tuple) or x is args or input.is_leaf(x):
            return input.is_leaf(x)
        return not any(isinstance(leaf, InputMark | Tensor) for leaf in leaves_of(x))

    pairs = names(input.value, is_leaf)
    return {name: x for name, x in pairs if not (isinstance(x, Tensor) or input.is_leaf(x))}


def _entries(value: Any) -> int | None:
    """The number of entries of an object without tensors, which may be rows.

    None for text, sets, shapes and modules, and for what has only None in it.
    """
    if isinstance(value, tuple | list):
        # The entries of a named tuple are fields, and no rows.
        is_list = type(value) in (tuple, list) and any(x is not None for x in value)
        return len(value) if is_list and not is_shape(value) else None
    if not isinstance(value, nn.Module | Mapping | str | bytes | set | frozenset):
        # Most objects have no length, and arrays without a dimension have one that raises.
        with suppress(Exception):
            return len(value)
    return None
