"""Mail: the messages of a step.

Tensors travel on the devices' own links. Forms and the states of generators travel on the CPU, so
no host waits for a device to read them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe._torch import pipelining
from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.messages import Form, Meta
from torchgpipe.distributed.peers import Peers
from torchgpipe.distributed.routes import Routes
from torchgpipe.distributed.worker import Worker

__all__: list[str] = []

#: The tag of messages on the CPU, which tells them from those of a device that is the CPU, too.
HOST = 1_000_001

#: How many kinds of steps are remembered.
MOST = 100


class Mail:
    """The messages of one process.

    Args:
        routes: in which process each stage is.
        peers: the processes of the pipeline.
    """

    def __init__(self, routes: Routes, peers: Peers) -> None:
        self.routes, self.peers, self.device = routes, peers, peers.device
        #: The forms that both ends know: by shapes of a step, stage that receives, and rows.
        self._known: dict[tuple[Any, int, int], Form] = {}
        #: The shapes of the steps that these are of.
        self._seen: set[Any] = set()

    def begin(self, worker: Worker, shapes: Any, rows: Sequence[int], with_numbers: bool) -> None:
        """Begin a step.

        Args:
            worker: what computes it.
            shapes: stands for all that the shapes of messages depend on, in all processes.
            rows: the rows of each micro-batch.
            with_numbers: whether states of generators travel with the micro-batches.
        """
        if shapes not in self._seen and len(self._seen) == MOST:
            # All processes see the same shapes, and forget them in the same step.
            self._seen.clear()
            self._known.clear()
        #: Whether both ends know the forms of all messages of the step.
        self.forms_are_known = shapes in self._seen
        self._seen.add(shapes)
        self.worker, self._shapes, self._rows = worker, shapes, rows
        self._group = self.peers.group
        self._with_numbers = with_numbers
        #: What has come or is on its way, by stage and micro-batch, and what to wait for.
        self._tensors: dict[tuple[str, int, int], list[Tensor]] = {}
        self._works: dict[tuple[str, int, int], list[Any]] = {}
        self._sent: dict[tuple[str, int, int], list[Any]] = {}
        self._forms: dict[tuple[int, int], Form] = {}
        self._states: dict[tuple[int, int], dict[str, Tensor]] = {}

    def end(self) -> None:
        """Let go of all tensors."""
        del self.worker, self._group
        self._tensors.clear()
        self._works.clear()
        self._sent.clear()
        self._forms.clear()
        self._states.clear()

    def send_forward(self, j: int, i: int) -> None:
        """Send what stage ``j`` has computed of micro-batch ``i``."""
        form, tensors = self.worker.leaving(j + 1, i)
        peer = self.routes.placement[j + 1]
        key = self._shapes, j + 1, self._rows[i]
        known = self._known.get(key)
        works: list[Any] = []
        if known is None:
            data = pickled(form.renamed(self.routes.names), j)
            # As the receiver reads it: an object in it may change after that.
            self._known[key] = self._read(data)
            works += self._send([torch.tensor([len(data)], device=CPU), data], peer, HOST)
        elif not known.is_like(form):
            raise _differs(j, i, known, form)
        if self._with_numbers:
            states = self.worker.step.numbers.states[i]
            works += self._send([x.detach() for x in states.values()], peer, HOST)
        self._sent["F", j, i] = works + self._send(tensors, peer)

    def receive_forward(self, j: int, i: int) -> None:
        """Begin to receive what stage ``j`` shall compute of micro-batch ``i``."""
        peer = self.routes.placement[j - 1]
        key = self._shapes, j, self._rows[i]
        if key not in self._known:
            size = torch.zeros(1, dtype=torch.long, device=CPU)
            dist.recv(size, group=self._group, group_src=peer, tag=HOST)
            data = torch.empty(int(size), dtype=torch.uint8, device=CPU)
            dist.recv(data, group=self._group, group_src=peer, tag=HOST)
            self._known[key] = self._read(data)
        form = self._forms[j, i] = self._known[key]
        works = []
        if self._with_numbers:
            before = self.worker.step.numbers.states[i]
            states = {kind: torch.empty_like(x) for kind, x in before.items()}
            works += self._receive(states.values(), peer, HOST)
            self._states[j, i] = states
        self._tensors["F", j, i] = tensors = self._empty(form.metas)
        self._works["F", j, i] = works + self._receive(tensors, peer)

    def arrived(self, j: int, i: int) -> None:
        """Wait for what was received, and give it to the worker."""
        tensors = self._waited_for("F", j, i)
        self.worker.arrive(j, i, self._forms.pop((j, i)), tensors, self._states.pop((j, i), None))

    def send_backward(self, j: int, i: int) -> None:
        """Send the gradients of what stage ``j`` has received of micro-batch ``i``."""
        grads = self.worker.grads_leaving(j, i)
        self._sent["B", j, i] = self._send(grads, self.routes.placement[j - 1])

    def receive_backward(self, j: int, i: int) -> None:
        """Begin to receive the gradients of what stage ``j`` has sent of micro-batch ``i``."""
        metas = [x for x in self.worker.forms[j + 1, i].metas if x.requires_grad]
        self._tensors["B", j, i] = tensors = self._empty(metas)
        self._works["B", j, i] = self._receive(tensors, self.routes.placement[j + 1])

    def grads_arrived(self, j: int, i: int) -> None:
        """Wait for the gradients that were received, and give them to the worker.

        What they are gradients of has been received, then, and is let go of: under gloo, messages
        keep their memory until somebody waits for them.
        """
        self.worker.grads_arrive(j + 1, i, self._waited_for("B", j, i))
        for work in self._sent.pop(("F", j, i)):
            work.wait()

    def wait_for_sent(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            _, works = self._sent.popitem()
            for work in works:
                work.wait()

    def _read(self, data: Tensor) -> Form:
        form: Form = pickle.loads(data.numpy().tobytes())
        return form.renamed(self.routes.parts)

    def _waited_for(self, kind: str, j: int, i: int) -> list[Tensor]:
        for work in self._works.pop((kind, j, i)):
            work.wait()
        return self._tensors.pop((kind, j, i))

    def _empty(self, metas: Iterable[Meta]) -> list[Tensor]:
        return [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in metas]

    def _send(self, tensors: Iterable[Tensor], peer: int, tag: int = 0) -> list[Any]:
        works: list[Any] = []
        for x in tensors:
            # An empty tensor takes no message.
            if x.numel():
                # A layer may return the same memory the next time, or a view of more.
                # guard: clone of what goes to a process
                if not pipelining.is_alone(x):
                    x = x.clone(memory_format=torch.contiguous_format)
                works.append(dist.isend(x.detach(), group=self._group, group_dst=peer, tag=tag))
        return works

    def _receive(self, tensors: Iterable[Tensor], peer: int, tag: int = 0) -> list[Any]:
        group = self._group
        return [dist.irecv(x, group=group, group_src=peer, tag=tag) for x in tensors if x.numel()]


def pickled(form: Form, j: int) -> Tensor:
    """A form as a tensor of bytes.

    Raises:
        TypeError: something in it cannot be sent to another process.
    """
    try:
        data = pickle.dumps(form)
    except Exception as error:
        raise TypeError(
            "what passes between processes must be tensors, and other objects that pickle takes "
            f"(stage: {j}, {type(error).__name__}: {error}); have the layers pass tensors or plain "
            "numbers, or put both layers into one stage"
        ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(CPU)


def _differs(j: int, i: int, known: Form, form: Form) -> ValueError:
    announced, sent = known.difference(form)
    return ValueError(
        "what a stage sends to another process must have the same structure and shapes for all "
        "micro-batches of as many rows, since it is announced once "
        f"(stage: {j}, micro-batch: {i}, announced: {announced}, sent: {sent}); pad tensors to one "
        "shape, pass what differs as a tensor, or put both layers into one stage"
    )
