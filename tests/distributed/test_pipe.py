"""The wrapper: what it takes, what it tells, and what it refuses."""

import copy
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgpipe
from tests.distributed.processes import OLD
from tests.distributed.test_schedules import beside, pipe_of
from tests.support.live_storages import LiveStorages
from tests.support.schedules import linear, relu, same
from torchgpipe.distributed import Pipe
from torchgpipe.schedule import named


def refusal(group, change, kind, rank=None):
    """Call a step, with a change of the model or the arguments; return what is raised."""
    pipe = pipe_of([linear(), relu()], "1f1b", group, chunks=2)
    x, y = torch.rand(2, 4, 6)
    if rank is None or torch.distributed.get_rank(group) == rank:
        x, y = change(pipe, x, y) or (x, y)
    with pytest.raises(kind) as found:
        pipe.step(x, y)
    # Nothing was sent, so the processes go on together.
    after = pipe_of([linear(), relu()], "1f1b", group, chunks=2)
    assert after.step(torch.rand(2, 6), torch.rand(2, 6)).isfinite()
    return str(found.value)


class Counting(nn.Module):
    """A layer that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x


def buffers_of_a_refused_step(group):
    """Have another process refuse a step; the first stage's buffers stay as they were."""
    pipe = pipe_of([nn.Sequential(linear(), Counting()), relu()], "1f1b", group, chunks=2)
    if torch.distributed.get_rank(group):
        pipe.chunks = 4
    with pytest.raises(ValueError, match="settings"):
        pipe.step(*torch.rand(2, 4, 6))
    assert all(x.item() == 0 for x in pipe.buffers())


def test_a_refused_step_leaves_buffers(processes):
    processes.run(buffers_of_a_refused_step, 2)


def without_input(pipe, x, y):
    return None, y


def no_tensor(pipe, x, y):
    return torch.rand(()), y


def fewer_targets(pipe, x, y):
    return x, y[:3]


def other_rows(pipe, x, y):
    return x[:3], y[:3]


def wrong_in_both(pipe, x, y):
    return torch.rand(4, 5), y[1:]


def target_with_a_gradient(pipe, x, y):
    return x, y.requires_grad_()


def more_chunks(pipe, x, y):
    pipe.chunks = 4


def evaluating(pipe, x, y):
    pipe.eval()


def without_loss(pipe, x, y):
    pipe.loss = None


@pytest.mark.parametrize(
    ("change", "kind", "rank", "expected"),
    [
        (
            without_input,
            (ValueError, RuntimeError),
            0,
            ["must be given the input", "rank 0: Value"],
        ),
        (no_tensor, (ValueError, RuntimeError), 0, ["must be an input tensor", "rank 0: Value"]),
        (more_chunks, ValueError, 1, ["same settings.*chunks.*0, 1"] * 2),
        (evaluating, ValueError, 0, ["same settings.*whether backward runs"] * 2),
        (other_rows, ValueError, 1, [r"as many rows .*\[4, 3\]"] * 2),
        (fewer_targets, (ValueError, RuntimeError), 1, ["rank 1: Value", "targets must have as"]),
        # The first layer of the first micro-batch fails, too.
        (
            wrong_in_both,
            (ValueError, RuntimeError),
            None,
            ["rank 1: Value", "targets must have as"],
        ),
        (
            target_with_a_gradient,
            (ValueError, RuntimeError),
            1,
            ["rank 1: Value", "must not require a gradient"],
        ),
        (without_loss, (ValueError, RuntimeError), 1, ["rank 1: Value", "needs the loss"]),
    ],
)
def test_refusals_before_a_step(change, kind, rank, expected, processes):
    found = processes.run(refusal, 2, change, kind, rank)
    for text, pattern in zip(found, expected):
        assert re.search(pattern, text), text


def clipping_alone(group):
    pipe = pipe_of([linear(), linear()], "1f1b", group)
    x, y = torch.rand(2, 2, 6)
    pipe.step(x, y)
    with pytest.raises(ValueError, match="same method.*differing: method"):
        pipe.clip_grad_norm_(1.0) if pipe.is_last else pipe.step(x, y)
    assert pipe.step(x, y).isfinite()


def test_one_process_clips_while_the_others_step(processes):
    processes.run(clipping_alone, 2)


def clipping_otherwise(group):
    pipe = pipe_of([linear(), linear()], "1f1b", group)
    pipe.step(*torch.rand(2, 2, 6))
    with pytest.raises(ValueError, match="same method.*differing: method"):
        pipe.clip_grad_norm_(3.0 if pipe.is_last else 2.0)
    with pytest.raises(ValueError, match=r"norm_type: -1\)"):
        pipe.clip_grad_norm_(1.0, -1)


def test_processes_that_clip_otherwise(processes):
    processes.run(clipping_otherwise, 2)


def sending(group):
    """Sent outputs go when their gradients come."""
    highest = []
    for m in (8, 32):
        pipe = pipe_of([nn.Linear(64, 64), nn.Linear(64, 64)], "1f1b", group, chunks=m)
        x, y = torch.rand(2, 16 * m, 64)
        pipe.step(x, y)
        with LiveStorages() as storages:
            pipe.step(x, y)
        highest.append(storages.highest)
    message = 16 * 64 * 4
    return pipe.is_first, (highest[1] - highest[0]) / message


def test_messages_that_are_kept(processes):
    found = dict(processes.run(sending, 2))
    assert found[True] < 4


def destroying(group):
    own = torch.distributed.new_group([0, 1])
    pipe = pipe_of([linear(), linear()], "1f1b", own)
    x, y = torch.rand(2, 2, 6)
    pipe.step(x, y)
    torch.distributed.destroy_process_group(own)
    with pytest.raises(RuntimeError, match="must be connected.*destroyed"):
        pipe.step(x, y)
    found = weakref.ref(own)
    del own
    # Its threads end with it.
    assert found() is None
    with pytest.raises(RuntimeError, match="must be connected.*destroyed"):
        pipe.step(x, y)


def test_nothing_holds_a_group_that_is_destroyed(processes):
    processes.run(destroying, 2)


def constructing(group, kind, expected, balance, **options):
    with pytest.raises(kind, match=expected):
        Pipe(nn.Sequential(*[linear() for _ in range(4)]), balance, group=group, **options)


@pytest.mark.parametrize(
    ("balance", "options", "kind", "expected"),
    [
        ([2, 2], {"schedule": "zbv"}, ValueError, r"fit the model and the group.*\[0, 1, 1, 0\]"),
        ([1, 3, 1], {}, ValueError, "add up"),
        ([1, 1, 1, 1], {"schedule": "1f1b"}, ValueError, "processes: 2"),
        ([2, 2], {"schedule": named("1f1b", 4, 1)}, ValueError, "fit the model and the group"),
        ([2, 2], {"schedule": 3}, TypeError, "schedule must be a name"),
        ([2, 2], {"loss": 3}, TypeError, "loss must be a function"),
        ([2, 2], {"chunks": 0}, ValueError, "positive integer"),
        ([2, 2], {"checkpoint": "some"}, ValueError, "checkpoint must be one of"),
    ],
)
def test_refusals_of_the_constructor(balance, options, kind, expected, processes):
    processes.run(constructing, 2, kind, expected, balance, **options)


def different(group, what):
    first = torch.distributed.get_rank(group) == 0
    layers = [linear(), linear(), linear(), nn.Linear(6, 6, bias=first or what != "layers")]
    balance = [2, 2] if first or what != "balance" else [1, 3]
    schedule = "1f1b" if first or what != "schedule" else "fill_drain"
    with pytest.raises(
        ValueError, match=rf"same pipeline.*{what}.*\[0, 1\].*broadcast_object_list"
    ):
        Pipe(nn.Sequential(*layers), balance, group=group, schedule=schedule, chunks=4)


@pytest.mark.parametrize("what", ["layers", "balance", "schedule"])
def test_processes_that_make_different_pipelines(what, processes):
    processes.run(different, 2, what)


@pytest.mark.skipif(bool(OLD), reason=OLD)
def test_no_process_group():
    with pytest.raises(RuntimeError, match="torchrun"):
        Pipe(nn.Sequential(linear()), [1])


def descriptions(group):
    torch.manual_seed(torch.distributed.get_rank(group))
    layers = nn.Sequential()
    for name in ("balance", "body", "forward_", "head"):
        layers.add_module(name, linear())
    pipe = Pipe(layers, [1] * 4, schedule="zbv", loss=F.mse_loss, group=group)
    assert sorted(pipe.state_dict()) == sorted(dict(pipe.named_parameters()))
    return pipe.stages, pipe.placement, pipe.is_first, pipe.is_last, sorted(pipe.state_dict())


def test_attributes(processes):
    one, other = processes.run(descriptions, 2)
    assert one[:4] == ([0, 3], (0, 1, 1, 0), True, True)
    assert other[:4] == ([1, 2], (0, 1, 1, 0), False, False)
    assert one[4] == [f"{layer}.{x}" for layer in ("balance", "head") for x in ("bias", "weight")]
    assert other[4] == [
        f"{layer}.{x}" for layer in ("body", "forward_") for x in ("bias", "weight")
    ]


class Criterion(nn.Module):
    """A loss with a weight of its own, which is false, as a module without layers may be."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 2.0))

    def __len__(self):
        return 0

    def forward(self, output, target, *, power):
        return ((output - target) * self.scale).abs().pow(power).mean()


def with_arguments(group):
    """Check outputs, arguments of the loss by name, and a loss with weights."""
    layers = [linear(), relu()]
    plain = copy.deepcopy(layers)
    pipe = pipe_of(layers, "1f1b", group, loss=Criterion(), chunks=2, outputs=True)
    x, y = torch.rand(2, 4, 6)
    given = x if pipe.is_first else None
    loss, output = pipe.step(given, *([y] if pipe.is_last else []), power=3)
    criterion = Criterion()
    expected = nn.Sequential(*plain)(x)
    value = criterion(expected, y, power=3)
    value.backward()
    torch.testing.assert_close(loss, value.detach())
    assert not loss.requires_grad
    if pipe.is_last:
        torch.testing.assert_close(output, expected.detach())
        same(pipe.loss.scale.grad, criterion.scale.grad)
    else:
        assert output is None
    with torch.no_grad():
        again, _ = pipe.step(given, *([y] if pipe.is_last else []), power=3)
    torch.testing.assert_close(again, loss)


def test_loss_with_weights_and_outputs(processes):
    processes.run(with_arguments, 2)


def tied(group, name):
    """Check weights that the first and the last stage share, from different values."""
    first = linear()
    layers = [first, relu(), relu(), nn.Sequential(nn.Tanh(), first)]
    one, training = beside(layers)
    if torch.distributed.get_rank(group):
        # As after random numbers of its own.
        nn.init.zeros_(first.weight)
    pipe = pipe_of(layers, name, group, chunks=4)
    optimizers = [torch.optim.AdamW(x.parameters(), 0.01) for x in (one, pipe)]
    for _ in range(2):
        x, y = torch.rand(2, 8, 6)
        training(x, y).backward()
        pipe.step(x, y)
        for optimizer in optimizers:
            optimizer.step()
    for key, own in one.module.state_dict().items():
        if key in pipe.state_dict():
            torch.testing.assert_close(pipe.state_dict()[key], own)


@pytest.mark.parametrize(("name", "size"), [("1f1b", 4), ("zbv", 2), ("interleaved", 2)])
def test_tied_weights(name, size, processes):
    processes.run(tied, size, name)


def one_wrong_balance(group):
    rank = torch.distributed.get_rank(group)
    with pytest.raises((ValueError, RuntimeError)) as found:
        Pipe(nn.Sequential(linear(), linear()), [1, 1 + rank], group=group)
    return type(found.value).__name__, str(found.value)


def test_one_process_that_cannot_make_the_pipeline(processes):
    (kind, text), (other, its) = processes.run(one_wrong_balance, 2)
    assert (kind, other) == ("RuntimeError", "ValueError")
    assert text == f"another process could not make the pipeline: rank 1: ValueError: {its}"


def traced(group):
    """Trace steps of a process; return the computations of the last one."""
    pipe = pipe_of([linear(), relu()], "1f1b", group, chunks=2, checkpoint="never")
    with torchgpipe.trace(pipe) as timeline:
        for _ in range(2):
            pipe.step(torch.rand(4, 6), torch.rand(4, 6))
    assert len(timeline.steps) == 2
    found = pipe.describe()
    assert found.measured > 0
    assert all(row.forward > 0 and row.backward > 0 for row in found.rows)
    return sorted(x.name for x in timeline.step().spans)


def test_trace(processes):
    for rank, found in enumerate(processes.run(traced, 2)):
        assert found == sorted(f"{rank}{kind}{i}" for kind in "FB" for i in range(2))


def table_of(group):
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    modes = ["always", "never", "never", "always"]
    loss = nn.CrossEntropyLoss(torch.ones(3))
    pipe = Pipe(module, [1] * 4, loss=loss, schedule="zbv", chunks=4, checkpoint=modes, group=group)
    device = str(pipe.device)
    assert [row.device for row in pipe.describe().rows] == [device] * 2
    words = [" ".join(x.split()) for x in str(pipe.describe()).split("\n")]
    return [x.replace(device, "here") for x in (*words, repr(pipe).split("\n")[1])]


def test_description(processes):
    (*first, line), (*second, _) = processes.run(table_of, 2)
    assert first == [
        "stage layers parameters bytes device checkpoint",
        "0 0 12 48 B here always",
        "3 3, loss 12 60 B here always",
        "total: 3 layers, 24 parameters, 108 B, chunks: 4, rank: 0, schedule: zbv",
    ]
    assert second[1:] == [
        "1 1 12 48 B here never",
        "2 2 12 48 B here never",
        "total: 2 layers, 24 parameters, 96 B, chunks: 4, rank: 1, schedule: zbv",
    ]
    assert line == (
        "  rank=0, schedule='zbv', devices=['here'], chunks=4, "
        "checkpoint=['always', 'never', 'never', 'always']"
    )


class Doubling(nn.Linear):
    """A layer that notes which of its outputs are alive, when it runs and in its backward."""

    def __init__(self):
        super().__init__(6, 6)
        self.outputs, self.alive = [], []
        self.register_full_backward_hook(lambda *_: self.look())

    def forward(self, x):
        output = super().forward(x) * 2
        self.outputs.append(weakref.ref(output))
        return output

    def look(self):
        self.alive.append([output() is not None for output in self.outputs[:4]])


def outputs_that_live(group):
    layers = [Doubling(), Doubling()]
    pipe = pipe_of(layers, "1f1b", group, chunks=4, checkpoint="always")
    pipe.step(*torch.rand(2, 8, 6))
    assert not any(map(any, layers[torch.distributed.get_rank(group)].alive[:2]))


def test_the_output_of_the_first_cell_does_not_stay(processes):
    processes.run(outputs_that_live, 2)
