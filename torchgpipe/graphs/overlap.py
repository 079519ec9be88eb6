"""Two parts at once: their operators are interleaved, and run on two streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from torchgpipe.ambient import labels
from torchgpipe.checks import verify_kind
from torchgpipe.devices.streams import (
    AbstractStream,
    make_current,
    record,
    record_stream,
    use_stream,
    wait_for,
    wait_stream,
)
from torchgpipe.graphs.joint import fakes_of, is_view
from torchgpipe.graphs.parts import Part
from torchgpipe.graphs.slices import call_directly
from torchgpipe.values.structure import leaves_of

__all__: list[str] = ["communicates"]


# The streams of two computations of one worker that are interleaved.
#
# ::
#
#   stream of a   a1 ──╮        ╭── a2 ──╮
#   channel            ├─ copy ─│────────╯         arithmetic takes turns,
#   stream of b        ╰── b1 ──╯                  a copy or collective runs beside it
#
# Two computations that run at the same time share the device's arithmetic units, so they take as
# long as in turns. A copy or a collective uses none of these units. It runs on a third stream, the
# channel, and a computation waits for the copy before it uses the result.


class Interleaving:
    """The streams of two computations.

    Args:
        streams: the stream of each computation, which may be one stream.
        channel: the stream of their communication.
        shown_as: the label of each computation; None without an observation.
    """

    def __init__(
        self,
        streams: tuple[AbstractStream, AbstractStream],
        channel: AbstractStream,
        shown_as: Sequence[labels.Label | None] = (None, None),
    ) -> None:
        self._streams, self._channel, self._labels = streams, channel, shown_as
        self._last: AbstractStream | None = None

    def turn(self, k: int) -> None:
        """Let computation ``k`` go on, after the work that the other one has issued."""
        stream = self._streams[k]
        if self._last is not None and self._last != stream:
            # guard: arithmetic takes turns
            wait_stream(stream, self._last)
        make_current(stream)
        self._last = stream
        if self._labels[k] is not None:
            labels.put(self._labels[k])

    def send(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> tuple[Any, Any]:
        """Call a function that communicates; return its result, and the event after it."""
        channel = self._channel
        assert self._last is not None
        # guard: communication after what it sends
        wait_stream(channel, self._last)
        for x in _tensors([*args, *kwargs.values()]):
            # guard: recording what is communicated
            record_stream(x, channel)
        with use_stream(channel):
            result = function(*args, **kwargs)
        return result, record(channel)

    def receive(self, message: tuple[Any, Any]) -> Any:
        """Make the computing stream wait for a communication; return the result of this."""
        assert self._last is not None
        result, event = message
        if event is not None:
            # guard: waiting for communication
            wait_for(self._last, event)
            for x in _tensors([result]):
                # guard: recording the result of communication
                record_stream(x, self._last)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in leaves_of(values) if isinstance(x, Tensor)]


# A pass that interleaves two parts, so that communication of one hides behind the other.
#
# ::
#
#   a     a1 ─ exchange ─ a2          a1, send, b1, send, receive, a2, receive, b2
#   b     b1 ─ exchange ─ b2
#
# Each part is cut after each of its messages, and the pieces of the two parts take turns. A message
# is sent as soon as its tensors are computed, and received right before its first use: arithmetic
# of the other part runs in between. If one part has fewer pieces, its longest are cut in two.
#
# Sources: DualPipe (DeepSeek-V3, arXiv 2412.19437) for forward beside backward; Purandare and
# Fan, Graph-based pipeline parallelism (PyTorch), for the interleaving of graphs.


#: A function that runs two parts interleaved. It takes a list of each part's arguments, which it
#: empties, so that each tensor is freed at its last use; and the streams. It returns the results of
#: each part.
Interleaved = Callable[[list[Any], list[Any], Interleaving], tuple[Sequence[Any], Sequence[Any]]]

_communicating: set[Any] = set()


#: The classes of what :func:`communicates` takes: operators, and overloads of operators.
OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))


def communicates(operator: Any) -> None:
    """Declare that an operator communicates, so that overlaps run arithmetic beside it.

    Args:
        operator: such as ``torch.ops.my_library.exchange``, or an overload of it.

    Raises:
        TypeError: it is no operator.
    """
    rule, remedy = "an operator must be one of torch.ops", "pass such as torch.ops.mine.exchange"
    verify_kind(operator, OPERATORS, rule, "operator", remedy)
    _communicating.add(operator)


def is_communication(node: Node) -> bool:
    """Whether a node moves data and computes little."""
    packet = getattr(node.target, "overloadpacket", None)
    return node.target in _communicating or (packet is not None and packet in _communicating)


def interleaved(a: Part, b: Part) -> Interleaved | None:
    """The function of two parts; None if neither communicates."""
    if b not in a.interleaved_with:
        communicate = any(map(is_communication, [*a.slice.nodes, *b.slice.nodes]))
        a.interleaved_with[b] = overlapped(a, b) if communicate else None
    function: Interleaved | None = a.interleaved_with[b]
    return function


def overlapped(a: Part, b: Part) -> Interleaved:
    """Make one function that runs two parts interleaved."""
    graph = Graph()
    boxes = [graph.placeholder("values_a"), graph.placeholder("values_b")]
    streams = graph.placeholder("streams")
    # For each node of ``a``, and for each node of ``b``, the node of the new graph that computes
    # its value. These are two dicts, since ``a`` and ``b`` may be the same part.
    known: list[dict[Node, Node]] = [{}, {}]
    # For each part, its messages that are sent and not received yet: the part's own node, and the
    # ``send`` in the new graph that stands for it.
    waiting: list[dict[Node, Node]] = [{}, {}]
    for k, part in enumerate((a, b)):
        for node in reversed(part.slice.inputs):
            known[k][node] = graph.call_method("pop", (boxes[k],))

    def use(k: int, node: Node) -> Node:
        if node in waiting[k]:
            known[k][node] = graph.call_method("receive", (streams, waiting[k].pop(node)))
        return known[k][node]

    def receive_before(k: int, node: Node) -> None:
        """Receive messages whose memory a node uses and one of the two changes."""
        effects = (a, b)[k].owner.effects
        written, touched = effects.written_by(node), effects.touched_by(node)
        for message in [*waiting[k]]:
            if written & effects.touched_by(message) or touched & effects.written_by(message):
                # guard: changes in place around a message
                use(k, message)

    turns = zip_longest(*even(pieces_of(a), pieces_of(b)), fillvalue=list[Node]())
    for number, turn in enumerate(turns):
        for k, piece in enumerate(turn):
            if piece or not number:
                graph.call_method("turn", (streams, k))
            for node in piece:
                for x in node.all_input_nodes:
                    use(k, x)
                receive_before(k, node)
                if is_communication(node):
                    args, kwargs = map_arg((node.args, node.kwargs), known[k].__getitem__)
                    target: Any = node.target
                    waiting[k][node] = graph.call_method("send", (streams, target, args, kwargs))
                    continue
                known[k][node] = graph.node_copy(node, known[k].__getitem__)
                if node.op == "get_attr":
                    known[k][node].target = f"{'ab'[k]}.{node.target}"
    results = [
        [None if x is None else use(k, x) for x in part.slice.outputs]
        for k, part in enumerate((a, b))
    ]
    graph.output(tuple(results))
    call_directly(graph)
    root = nn.Module()
    root.a, root.b = a.owner.joint.module, b.owner.joint.module
    function: Interleaved = GraphModule(root, graph).forward
    return function


def pieces_of(part: Part) -> list[list[Node]]:
    """The nodes of a part, cut after each message."""
    pieces: list[list[Node]] = [[]]
    for node in part.slice.nodes:
        pieces[-1].append(node)
        if is_communication(node):
            pieces.append([])
    return pieces


def even(a: list[list[Node]], b: list[list[Node]]) -> tuple[list[list[Node]], list[list[Node]]]:
    """Cut the pieces of the part that has fewer, the longest first, until both have as many."""
    a, b = [*a], [*b]
    few = a if len(a) < len(b) else b
    while len(few) < max(len(a), len(b)):
        longest = max(few, key=lambda piece: sum(map(cost, piece)) if len(piece) > 1 else -1)
        if len(longest) < 2:
            break
        index = few.index(longest)
        few[index : index + 1] = cut_in_two(longest)
    return a, b


def cut_in_two(piece: list[Node]) -> list[list[Node]]:
    """Cut a piece in two that take about as long."""
    whole = sum(map(cost, piece))
    before = [*accumulate(map(cost, piece))]
    middle = min(range(1, len(piece)), key=lambda k: abs(2 * before[k - 1] - whole))
    return [piece[:middle], piece[middle:]]


def cost(node: Node) -> float:
    """Estimate the time of a node: its operations, and the elements that it writes."""
    if is_view(node):
        return 0
    total = float(sum(x.numel() for x in fakes_of(node)))
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:

        def value(x: Node) -> Any:
            return x.meta.get("val")

        args, kwargs = map_arg((node.args, node.kwargs), value)
        total += float(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return total
