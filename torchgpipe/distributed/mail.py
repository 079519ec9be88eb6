"""Mail: the post of a process, whose stages send to other processes, and receive from them.

::

    process 0    F of stage 0 ──→ post        post ──→ F of stage 1    process 1
                                   │           ↑
                          send_forward       receive_forward, arrived
                                   └─ message ─┘

What waits in the post for a stage elsewhere is packed and sent; what comes in a message is put
there. Tensors travel on the devices' own links. Forms and the states of generators travel on the
CPU, so no host waits for a device to read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.messages import Forms, Meta, pack, unpack
from torchgpipe.distributed.peers import AFTER, Connections, Exchange, Peers, Routes
from torchgpipe.engine.links import Post, Sent

__all__: list[str] = []

#: The tag of messages that travel on the CPU even if the device is an accelerator: forms and RNG
#: states. It keeps them apart from tensors of micro-batches, which have tag 0.
HOST = 1_000_001


class Mail(Post):
    """The post of one process for one step."""

    def __init__(self, forms: Forms, routes: Routes, peers: Peers, *args: Any) -> None:
        super().__init__(*args)
        self.forms, self.routes = forms, routes
        #: Whether RNG states travel with the micro-batches in this step.
        self.with_numbers = False
        self._device, self._peers = peers.device, peers
        self._connections = Connections(peers)
        #: The exchange of numbers, such as the loss, between all processes at the end of the step;
        #: None before :meth:`expect_the_end`.
        self.after: Exchange | None = None
        #: For each message that is being received (kind F or B, receiving stage, micro-batch): its
        #: tensors, and the works of torch.distributed to wait for before they are read.
        self._coming: dict[tuple[str, int, int], tuple[list[Tensor], list[Any]]] = {}
        #: For each stage and micro-batch, the RNG states that are being received, by type of
        #: device.
        self._states: dict[tuple[int, int], dict[str, Tensor]] = {}
        #: For each message that is being sent (kind F or B, sending stage, micro-batch), the works
        #: of torch.distributed to wait for until it has left.
        self._going: dict[tuple[str, int, int], list[Any]] = {}

    def end(self) -> None:
        """Let go of messages, and of the group, since an exception may refer to this object."""
        del self._connections
        self.after = None
        self._coming.clear()
        self._states.clear()
        self._going.clear()

    def expect_the_end(self) -> None:
        """Begin to receive what the processes tell each other after the step.

        A sender whose receiver is ready sends at once, without a turn of threads.
        """
        self.after = Exchange(self._peers, 6, torch.float64, AFTER)

    def send_forward(self, j: int, i: int) -> None:
        """Send what stage ``j`` has computed of micro-batch ``i``."""
        value, _ = self.values.pop((j + 1, i))
        form, tensors = pack(self.parcels[i].unpacked(value, self.routes.carried[j]))
        peer = self.routes.placement[j + 1]
        works: list[Any] = []
        data = self.forms.told(j + 1, i, form)
        if data is not None:
            works += self._send([torch.tensor([len(data)], device=CPU), data], peer, HOST)
        if self.with_numbers:
            states = self.numbers.all_of(i)
            works += self._send([x.detach() for x in states.values()], peer, HOST)
        self._going["F", j, i] = works + self._send(tensors, peer)

    def receive_forward(self, j: int, i: int) -> None:
        """Begin to receive what stage ``j`` shall compute of micro-batch ``i``."""
        peer = self.routes.placement[j - 1]
        form = self.forms.get(j, i)
        if form is None:
            size = torch.zeros(1, dtype=torch.long, device=CPU)
            self._connections.receive(size, peer, HOST).wait()
            data = torch.empty(int(size), dtype=torch.uint8, device=CPU)
            self._connections.receive(data, peer, HOST).wait()
            form = self.forms.read(j, i, data)
        works = []
        if self.with_numbers:
            before = self.numbers.all_of(i)
            states = self._states[j, i] = {kind: torch.empty_like(x) for kind, x in before.items()}
            works += [self._connections.receive(x, peer, HOST) for x in states.values()]
        self._coming["F", j, i] = self._receive(form.metas, peer, works)

    def arrived(self, j: int, i: int) -> None:
        """Wait for what was received, which waits for stage ``j`` from then on."""
        tensors = self._waited_for("F", j, i)
        if self.with_numbers:
            self.numbers.go_on(i, self._states.pop((j, i)))
        batch = unpack(self.forms.known(j, i), tensors)
        if len(batch.parts) > 1 or batch.shared:
            batch = self.parcels[i].put(batch)
        self.values[j, i] = batch, None

    def send_backward(self, j: int, i: int) -> None:
        """Send the gradients of what stage ``j`` has received of micro-batch ``i``."""
        self._going["B", j, i] = self._send(self._grads(j, i), self.routes.placement[j - 1])

    def _grads(self, j: int, i: int) -> list[Tensor]:
        """The gradients of what stage ``j`` has received; zeros where is none."""
        grads = []
        for part in self.forms.known(j, i).parts:
            waiting = self.grads.get((self.routes.source(part.key, j), i), {})
            sent = waiting.pop(part.key, None)
            for k, meta in enumerate(part.metas):
                if meta.requires_grad:
                    grad = None if sent is None else sent.tensors[k]
                    grads.append(
                        torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
                        if grad is None
                        # A custom backward may keep its gradient, and fill it again for the next
                        # micro-batch. ``Connections.send`` clones what shares memory with another
                        # tensor, as the result of detach() does.
                        else grad.detach()
                    )
        return grads

    def receive_backward(self, j: int, i: int) -> None:
        """Begin to receive the gradients of what stage ``j`` has sent of micro-batch ``i``."""
        metas = self.forms.known(j + 1, i).back
        self._coming["B", j, i] = self._receive(metas, self.routes.placement[j + 1], [])

    def grads_arrived(self, j: int, i: int) -> None:
        """Wait for the gradients that were received, which wait for stages here from then on.

        The other process has then received the outputs. Waiting for their message frees memory,
        which gloo holds until somebody waits.
        """
        rest = iter(self._waited_for("B", j, i))
        for part in self.forms.known(j + 1, i).parts:
            grads = tuple([next(rest) if meta.requires_grad else None for meta in part.metas])
            source = self.routes.source(part.key, j + 1)
            self.grads.setdefault((source, i), {})[part.key] = Sent(grads)
        for work in self._going.pop(("F", j, i)):
            work.wait()

    def wait_for_sent(self) -> None:
        """Wait until all that was sent has left."""
        for work in chain.from_iterable(self._going.values()):
            work.wait()

    def _waited_for(self, kind: str, j: int, i: int) -> list[Tensor]:
        tensors, works = self._coming.pop((kind, j, i))
        for work in works:
            work.wait()
        return tensors

    def _send(self, tensors: Iterable[Tensor], peer: int, tag: int = 0) -> list[Any]:
        works: list[Any] = []
        for x in tensors:
            # For an empty tensor no message is sent, and none is expected.
            if x.numel():
                works += self._connections.send(x, peer, tag)
        return works

    def _receive(
        self, metas: Iterable[Meta], peer: int, works: list[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        tensors, contiguous = [], torch.contiguous_format
        for meta in metas:
            x = torch.empty_like(_like(meta, self._device), memory_format=contiguous)
            tensors.append(x)
            if x.numel():
                works.append(self._connections.receive(x, peer, 0))
        return tensors, works


@lru_cache
def _like(meta: Meta, device: torch.device) -> Tensor:
    """A tensor that takes the memory of one number, for :func:`torch.empty_like`.

    Making a tensor of a given shape takes several times as long.
    """
    return torch.empty((), dtype=meta.dtype, device=device).expand(meta.shape)
