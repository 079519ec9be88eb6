"""Agreement: what processes are given for a step, and tell each other before and after it.

Two processes that disagree, as on the number of micro-batches, would wait for each other for good,
or take the bytes of one tensor for another. And a process that finds something wrong with its
arguments must not leave the others waiting. So all exchange a few numbers. The first stage computes
its first cell meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe._torch.attributes import parameters_of
from torchgpipe.ambient.modes import verify_no_transform
from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.streams import CPU, device_types
from torchgpipe.distributed.failures import error_text, shared_failures
from torchgpipe.distributed.mail import Mail
from torchgpipe.distributed.peers import Exchange, Peers, Routes, digest, first_difference
from torchgpipe.engine.criterion import arguments_of
from torchgpipe.engine.wrapper import MiniBatch, verify_call
from torchgpipe.schedule.language import Schedule
from torchgpipe.values.division import Division, FlatInput, divided, row_count
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []


class StepInputs(NamedTuple):
    """The part of a step that the caller gives to this process.

    Args:
        mini_batch: the input; None but for the first stage.
        arguments: the further arguments of the loss, for each micro-batch of the last stage; None
            where none of them tells the number of rows.
        arriving: the events of their copies.
        rows: the number of rows of the mini-batch, as far as this process knows.
    """

    mini_batch: MiniBatch | None = None
    arguments: Sequence[Any] | None = None
    arriving: Sequence[Any] = ()
    rows: int = 0

    @property
    def division(self) -> Division:
        """The division of the input; one without micro-batches if others know it."""
        return Division([]) if self.mini_batch is None else self.mini_batch.division

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches of the first stage."""
        return [] if self.mini_batch is None else self.mini_batch.batches

    @property
    def shapes(self) -> str:
        """All that the shapes and dtypes of a step's messages depend on, as text."""
        kinds, batches = device_types(), self.batches
        casts = [(x, torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in kinds]
        inputs = [
            ([(tuple(x.shape), x.dtype, x.requires_grad) for x in batch], batch.others)
            for batch in (batches if self.division.is_varied else [*batches[:1], *batches[-1:]])
        ]
        # Grad mode alone does not tell whether tensors in messages require gradients: in inference
        # mode none does.
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return repr((len(batches), self.rows, modes, casts, inputs))


class Reader:
    """The checks and the split of what the caller gives to this process."""

    def __init__(self, routes: Routes, device: torch.device, streams: StreamPool) -> None:
        self._routes, self._device, self._streams = routes, device, streams

    def read(self, pipe: Any, input: Any, terms: Any) -> StepInputs:
        """Check and split."""
        mini_batch = None
        if not self._routes.is_first:
            verify_call(pipe, ())
        elif input is None:
            raise ValueError(
                "the process of the first stage must be given the input (input: None, rank: "
                f"{self._routes.rank}); pass it in this process at least"
            )
        else:
            mini_batch = MiniBatch(pipe, input)
        rows, targets = 0, FlatInput(terms if self._routes.is_last else None)
        if mini_batch is not None:
            rows = mini_batch.flat.rows
        elif self._routes.is_last:
            rows = row_count(input) or targets.rows
        arguments: Sequence[Any] | None = None
        arriving: Sequence[Any] = ()
        if self._routes.is_last and terms is not None:
            if pipe.loss is None:
                raise ValueError(
                    "a step needs the loss of each micro-batch (loss: None); pass Pipe(..., "
                    "loss=torch.nn.functional.cross_entropy), for one, or call the model for its "
                    "output"
                )
            if mini_batch is not None:
                arguments, arriving = self.arguments(terms, mini_batch.division)
            elif rows and not targets.given:
                division = Division(divided(rows, max(1, min(rows, pipe.chunks))))
                arguments, arriving = self.arguments(terms, division)
        return StepInputs(mini_batch, arguments, arriving, rows)

    def arguments(self, terms: Any, division: Division) -> tuple[Sequence[Any], Sequence[Any]]:
        """The further arguments of the loss of each micro-batch, and the events of their copies."""
        return arguments_of(terms, division, self._streams, self._device)


#: The dtypes that a sum of losses may have. Processes tell each other a dtype as its index here.
DTYPES = (torch.float32, torch.float64)

#: For one layer, what may decide whether it draws random numbers: whether it is in train mode, and
#: the plain values among its attributes.
Flags: TypeAlias = tuple[Any, ...]

#: The settings of a step that must be the same in all processes, as error messages name them.
SETTINGS = ("method", "chunks", "checkpoint", "whether backward runs")

PLAIN = {bool, int, float, str, type(None)}


class Agreed(NamedTuple):
    """A step as all processes know it.

    Args:
        division: the division of the mini-batch.
        shapes: stands for all that shapes and dtypes of messages depend on.
        with_numbers: whether states of generators travel with the micro-batches.
    """

    division: Division
    shapes: int
    with_numbers: bool


class StepLoss(NamedTuple):
    """The loss of a step, and what its gradients are still to be divided by, if by anything."""

    value: Tensor
    divisor: Tensor | None


class Agreement:
    """The comparisons of one process with all others: of pipelines, and before and after steps."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        #: The :data:`Flags` of each layer of this process, in the present step.
        self._flags: Any = None
        #: The ``_flags`` of the last step, if no process drew random numbers in it; otherwise None.
        #: If no process's ``_flags`` have changed since then, RNG states need not travel.
        self._quiet: Any = None

    @contextmanager
    def on_errors(self) -> Iterator[None]:
        """Raise in all processes if one of them raises within a ``with`` block.

        Raises:
            RuntimeError: another process has raised.
        """
        error = None
        with shared_failures(self._peers):
            try:
                yield
            except Exception as raised:
                error = raised
            texts = self._peers.texts("" if error is None else error_text(error))
        if error is not None:
            raise error
        if any(texts):
            raise _of_others("make the pipeline", texts)

    def same_pipeline(
        self, module: nn.Module, loss: Any, balance: Sequence[int], schedule: Schedule
    ) -> None:
        """Check that all processes make the same pipeline.

        Raises:
            ValueError: they differ in layers, balance or schedule.
        """
        named = [*module.named_parameters(), *module.named_buffers()]
        if isinstance(loss, nn.Module):
            named += [*loss.named_parameters(), *loss.named_buffers()]
        layers = repr([(name, tuple(x.shape), x.dtype) for name, x in named])
        with shared_failures(self._peers):
            digests = [digest(layers), digest(repr(balance)), digest(repr(schedule))]
            by_rank = self._peers.gathered(digests)
        if differs := first_difference(("layers", "balance", "schedule"), by_rank):
            raise ValueError(
                "all processes must make the same pipeline, or they would train different models "
                f"({differs}); decide in one process, and tell the others with "
                "torch.distributed.broadcast_object_list"
            )

    def same_call(self, name: str) -> None:
        """Check that all processes call the same method, and not a step.

        Raises:
            ValueError: another process calls something else.
        """
        # Within a torch.func transform no message arrives, so each process checks by itself.
        verify_no_transform()
        with shared_failures(self._peers):
            exchange = self._told([name, *SETTINGS[1:]], [0] * 8)
            self._answers(None, exchange)

    def _told(self, settings: Sequence[Any], numbers: Sequence[int]) -> Exchange:
        """Begin an exchange, and tell the others digests of settings, and numbers."""
        exchange = Exchange(self._peers, len(settings) + len(numbers))
        exchange.tell([*map(digest, map(repr, settings)), *numbers])
        return exchange

    def _answers(self, error: Exception | None, exchange: Exchange) -> list[list[int]]:
        """The numbers of all processes, if none has an error or other settings."""
        by_rank = exchange.heard()
        numbers = [x[len(SETTINGS) :] for x in by_rank]
        if any(x[0] for x in numbers):
            texts = self._peers.texts(error_text(error) if error else "")
            raise self._known(error or _of_others("begin the step", texts))
        if differs := first_difference(SETTINGS, by_rank):
            differ = ValueError(
                "all processes must call the same method, and a step with the same settings "
                f"({differs}); call it in all processes at the same time"
            )
            raise self._known(differ)
        return numbers

    def _known(self, error: Exception) -> Exception:
        """An error that all processes raise, which does not end their connections."""
        # guard: errors that all raise
        self._peers.known = error
        return error

    def begin(
        self,
        inputs: StepInputs,
        shapes: str,
        settings: Sequence[Any],
        flags: list[Flags],
        trainable: int,
        error: Exception | None,
    ) -> Callable[[], Agreed]:
        """Begin to agree on a step, and return what waits for the others.

        Args:
            inputs: what the caller gives to this process.
            shapes: describes the micro-batches, where the first stage is.
            settings: what all processes have to have in common: :data:`SETTINGS`.
            flags: what may make the layers of this process draw random numbers.
            trainable: stands for the parameters of this process.
            error: what this process has found wrong, if anything.
        """
        self._flags = flags
        (sizes, *marks), quiet = inputs.division, flags == self._quiet
        # The forms of messages depend on the micro-batches, on which parameters train, and on which
        # layers are in train mode (the first flag of each).
        form = digest(repr((shapes, trainable, [x[0] for x in flags])))
        exchange = self._told(settings, [bool(error), len(sizes), inputs.rows, form, quiet, *marks])
        agreed: list[Agreed] = []

        def agree() -> Agreed:
            if not agreed:
                agreed.append(self._agreed(error, exchange))
            return agreed[0]

        return agree

    def _agreed(self, error: Exception | None, exchange: Exchange) -> Agreed:
        """A step that all processes agree on.

        Raises:
            ValueError: the settings differ, or another process calls something else.
            RuntimeError: another process has found something wrong.
        """
        answers = self._answers(error, exchange)
        first = next(x for x in answers if x[1])
        counts = {x[2] for x in answers if x[2]}
        if len(counts) > 1:
            differ = ValueError(
                "the first and the last stage must be given as many rows (rows by rank, 0 where "
                f"nothing is read: {[x[2] for x in answers]}); load the same mini-batch in both "
                "processes"
            )
            raise self._known(differ)
        # guard: numbers travel until nothing draws
        with_numbers = not all(x[4] for x in answers)
        division = Division(divided(first[2], first[1]), *map(bool, first[5:]))
        return Agreed(division, digest(repr([x[3] for x in answers])), with_numbers)

    def end(self, mail: Mail, value: Tensor | None, divisor: Tensor | None) -> StepLoss | None:
        """Tell the others that the step is done, and return its loss; None without one."""
        numbers, last = mail.numbers, mail.routes.placement[-1]
        drew, any_drew = numbers.has_drawn(0), numbers.drawn
        code = -1 if value is None else DTYPES.index(value.dtype)
        # The exchange takes numbers from the host, which would have to wait for a loss on an
        # accelerator. Such a loss is broadcast below, and 1.0 stands in its place in the exchange.
        here = self._peers.device == CPU
        pair = [float(x) if here and x is not None else 1.0 for x in (value, divisor)]
        assert mail.after is not None
        mail.after.tell([drew, any_drew, code, divisor is not None, *pair])
        _, _, code, divides, *pair = mail.after.heard_of(last)
        if code < 0:
            return None
        # The exchange carries float64 numbers, which hold values of both DTYPES exactly.
        both = torch.tensor(pair, dtype=DTYPES[int(code)], device=self._peers.device)
        if not here:
            for k, x in enumerate((value, divisor)):
                if x is not None:
                    both[k] = x
            self._peers.fill(both, last)
        return StepLoss(both[0].clone(), both[1] if divides else None)

    def wait_for_all(self, mail: Mail) -> None:
        """Wait until all are done with a step, and agree on the state of the generators after it.

        As after a step in one process, generators are where the first micro-batch has left them.
        """
        numbers, placement = mail.numbers, mail.routes.placement
        assert mail.after is not None
        by_rank = mail.after.heard()
        self._quiet = None if any(x[1] for x in by_rank) else self._flags
        if self._quiet is None:
            # If RNG states travel with micro-batches, the last stage's process has those after the
            # first micro-batch. Otherwise a process that drew for it has them. If none drew for it,
            # all processes continue with states of stage 0's process.
            drawers = [k for k, x in enumerate(by_rank) if x[0]]
            states = numbers.all_of(0) if drawers else numbers.after()
            states = {kind: x.clone() for kind, x in states.items()}
            travelled = bool(drawers) and mail.with_numbers
            source = placement[-1] if travelled else [*drawers, placement[0]][0]
            for state in states.values():
                self._peers.fill(state, source)
            # guard: generators of all processes
            numbers.set_for_caller(states)


def trainable_in(modules: Iterable[nn.Module]) -> int:
    """A number that stands for the parameters of modules, as they are now."""
    parameters = parameters_of(modules)
    return digest(repr([(*x.shape, x.dtype, x.requires_grad) for x in parameters]))


def flags_of(modules: Iterable[nn.Module]) -> list[Flags]:
    """Find what decides whether layers draw: in which mode they are, and their attributes.

    All plain values count, since nobody knows the names of probabilities, switches and counters.
    A layer that draws for some data alone, as :class:`nn.RReLU`, has flags that equal no others.
    """
    return [
        (
            *[value for value in x.__dict__.values() if type(value) in PLAIN],
            *([object()] if type(x) is nn.RReLU and x.training else []),
        )
        for x in modules
    ]


def _of_others(what: str, texts: Sequence[str]) -> RuntimeError:
    reports = "; ".join(f"rank {k}: {text}" for k, text in enumerate(texts) if text)
    return RuntimeError(f"another process could not {what}: {reports}")
