"""A scheduled loss is a loss: what may be done with it, and what is refused."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchgpipe import GPipe, NoChunk, ScheduledLoss, arguments
from torchgpipe.schedule import one_f_one_b

X, Y = torch.rand(6, 3), torch.rand(6, 3)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def make(loss=F.mse_loss, schedule="1f1b", module=None, chunks=3, checkpoint="never", **options):
    model = GPipe(
        module or layers(), [2, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint
    )
    return ScheduledLoss(model, loss, schedule, **options)


def expected(factor=1.0):
    module = layers()
    (F.mse_loss(module(X), Y) * factor).backward()
    return [x.grad for x in module.parameters()]


def same(training, grads):
    found = [x.grad for x in training.model.parameters()]
    for own, other in zip(found, grads):
        torch.testing.assert_close(own, other)


def test_loss():
    training = make()
    loss = training(X, Y)
    torch.testing.assert_close(loss, F.mse_loss(layers()(X), Y))
    assert loss.shape == ()
    loss.backward()
    same(training, expected())


def test_gradients_come_with_backward():
    training = make()
    training(X, Y)
    assert all(x.grad is None for x in training.parameters())


@pytest.mark.parametrize("change", [lambda x: x * 3, lambda x: x / 2, lambda x: -x + 5])
def test_what_is_done_to_the_loss_counts(change):
    training = make()
    change(training(X, Y)).backward()
    module = layers()
    change(F.mse_loss(module(X), Y)).backward()
    same(training, [x.grad for x in module.parameters()])


def test_losses_add_up():
    training = make()
    (training(X, Y) + training(X, Y)).backward()
    same(training, expected(2))


def test_gradients_add_up():
    training = make()
    for _ in range(3):
        (training(X, Y) / 3).backward()
    same(training, expected())


def test_grad():
    training = make()
    weights = [*training.parameters()]
    for own, other in zip(torch.autograd.grad(training(X, Y), weights), expected()):
        torch.testing.assert_close(own, other)
    assert all(x.grad is None for x in weights)


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_hooks_of_weights_see_the_sum_once(schedule):
    training = make(schedule=schedule)
    seen, after = [], []
    weight = training.model[0].weight
    weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    weight.register_post_accumulate_grad_hook(lambda x: after.append(x.grad.clone()))
    training(X, Y).backward()
    torch.testing.assert_close(seen, [expected()[0]])
    torch.testing.assert_close(after, [2 * expected()[0]])


def test_optimizer_that_steps_in_backward():
    training = make()
    weights = [*training.parameters()]
    for weight in weights:
        own = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    before = [x.detach().clone() for x in weights]
    training(X, Y).backward()
    for own, old, grad in zip(weights, before, expected()):
        torch.testing.assert_close(own, old - 0.1 * grad)


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_is_forward_alone(grad):
    training = make(outputs=True)
    if grad:
        training.eval()
    with torch.set_grad_enabled(grad):
        loss, output = training(X, Y)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.mse_loss(layers()(X), Y))
    torch.testing.assert_close(output, layers()(X))


def test_outputs():
    training = make(outputs=True)
    loss, output = training(X, Y)
    torch.testing.assert_close(output, layers()(X))
    assert not output.requires_grad
    loss.backward()
    same(training, expected())


def test_all_is_frozen():
    training = make(module=layers().requires_grad_(False))
    assert not training(X, Y).requires_grad


def test_loss_that_depends_on_nothing():
    training = make(lambda output, target: F.mse_loss(output.detach(), target))
    with pytest.raises(RuntimeError, match="does not require grad"):
        training(X, Y).backward()


def test_arguments_of_the_loss():
    seen = []

    def loss(output, first, *, second, name):
        seen.append((len(first), second.shape, name))
        return F.mse_loss(output, first)

    training = make(loss, chunks=4)
    training(X, Y, second=NoChunk(torch.rand(9)), name="a").backward()
    assert seen == [(2, (9,), "a"), (2, (9,), "a"), (1, (9,), "a"), (1, (9,), "a")]


def test_several_arguments_of_the_model():
    class First(nn.Linear):
        def forward(self, x, mask, *, factor):
            return super().forward(x * mask) * factor

    module = nn.Sequential(First(3, 3), nn.Tanh(), nn.Linear(3, 3))
    training = make(module=module)
    mask = torch.rand(3)
    loss = training(arguments(X, NoChunk(mask), factor=2.0), Y)
    expected = module[1:](module[0](X, mask, factor=2.0))
    torch.testing.assert_close(loss, F.mse_loss(expected, Y))


def test_weights_of_the_loss():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, output, target):
            return self.factor * F.mse_loss(output, target)

    training = make(Weighted())
    training(X, Y).backward()
    assert "loss.factor" in dict(training.named_parameters())
    torch.testing.assert_close(training.loss.factor.grad, F.mse_loss(layers()(X), Y).detach())


def test_weight_of_another_module():
    outside = nn.Parameter(torch.rand(3))

    class Uses(nn.Linear):
        def forward(self, x):
            return super().forward(x) * outside

    training = make(module=nn.Sequential(Uses(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    training(X, Y).backward()
    grad, outside.grad = outside.grad, None
    F.mse_loss(training.model.module(X), Y).backward()
    torch.testing.assert_close(grad, outside.grad)


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_weight_of_another_module_that_some_micro_batches_use(schedule):
    outside = nn.Parameter(torch.rand(3))

    class Sometimes(nn.Linear):
        runs = 0

        def forward(self, x):
            self.runs += 1
            y = super().forward(x)
            return y * outside if self.runs % 3 == 2 else y

    layer = Sometimes(3, 3)
    training = make(schedule=schedule, module=nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3)))
    training(X, Y).backward()
    grad, outside.grad = outside.grad, None
    module = training.model.module
    sum(F.mse_loss(module(x), y) / 3 for x, y in zip(X.chunk(3), Y.chunk(3))).backward()
    torch.testing.assert_close(grad, outside.grad)


def test_hook_of_a_weight_of_another_module():
    outside = nn.Parameter(torch.rand(3))
    calls = []
    outside.register_hook(calls.append)

    class Uses(nn.Linear):
        def forward(self, x):
            return super().forward(x) * outside

    training = make(module=nn.Sequential(Uses(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    training(X, Y).backward()
    assert len(calls) == 1


def test_head_in_the_loss():
    """A model that is frozen, and a function that uses weights of another module."""
    head = nn.Linear(3, 3)
    training = make(
        lambda output, target: F.mse_loss(head(output), target),
        module=layers().requires_grad_(False),
    )
    training(X, Y).backward()
    grad, head.weight.grad = head.weight.grad, None
    F.mse_loss(head(layers()(X)), Y).backward()
    torch.testing.assert_close(grad, head.weight.grad)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_buffers_of_the_loss(checkpoint):
    """A loss that changes its buffers does so once for each micro-batch, and sees its values."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.ones(()))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, output, target):
            loss = F.mse_loss(self.norm(output).tanh() * self.count, target)
            self.count = self.count + 1
            return loss

    torch.manual_seed(1)
    loss = Counted()
    other = copy.deepcopy(loss)
    training = make(loss, schedule="fill_drain", checkpoint=checkpoint)
    training(X, Y).backward()
    module = layers()
    sum(other(module(x), y) / 3 for x, y in zip(X.chunk(3), Y.chunk(3))).backward()
    assert loss.count == other.count == 4
    assert loss.norm.num_batches_tracked == 3
    same(training, [x.grad for x in module.parameters()])
    torch.testing.assert_close(loss.norm.weight.grad, other.norm.weight.grad)


def test_auxiliary_loss_that_a_layer_keeps():
    """Stages before the layer have run their backward, so its gradient would be lost."""

    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = x.square().mean()
            return super().forward(x)

    training = make(module=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Keeps(3, 3)))
    loss = training(X, Y) + training.model[2].kept
    with pytest.raises(RuntimeError, match="a gradient must come by the loss"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:GPipe trains without pipelining")
def test_one_micro_batch_gets_all_of_its_targets():
    seen = []

    def loss(output, target, whole, table):
        seen.append([len(x) for x in (target, whole, table)])
        return F.mse_loss(output, target)

    make(loss, chunks=1)(X, Y, NoChunk(torch.rand(4)), torch.rand(9, 3))
    assert seen == [[6, 4, 9]]


def test_another_model():
    training = make()
    training(X, Y).backward()
    training.model = GPipe(layers(), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
    training(X, Y).backward()
    same(training, expected())


@pytest.mark.parametrize("target", [list(range(6)), {"a": [[1.0]] * 6}])
def test_targets_that_are_no_tensors(target):
    def loss(output, target):
        return output.mean()

    with pytest.raises(ValueError, match="targets must be tensors"):
        make(loss)(X, target)
    make(loss)(X, NoChunk(target)).backward()


def test_gradient_of_the_target():
    training = make()
    target = Y.clone().requires_grad_()
    with pytest.raises(ValueError, match="targets must not require a gradient"):
        training(X, target)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_options_may_change_between_steps(checkpoint):
    training = make()
    training(X, Y).backward()
    training.zero_grad()
    training.schedule = "zbh1"
    training.model.chunks, training.model.checkpoint = 2, checkpoint
    training(X, Y).backward()
    same(training, expected())


def test_schedule_that_does_not_fit():
    with pytest.raises(ValueError, match="as many stages as partitions"):
        make(schedule=one_f_one_b(3, 3))
    training = make()
    with pytest.raises(ValueError, match="name must be"):
        training.schedule = "no such"
    assert training.schedule == "1f1b"


def test_fewer_rows_than_chunks():
    training = make(schedule=one_f_one_b(2, 4), chunks=4)
    training(X[:2], Y[:2]).backward()
    module = layers()
    F.mse_loss(module(X[:2]), Y[:2]).backward()
    same(training, [x.grad for x in module.parameters()])


def test_targets_with_other_rows():
    with pytest.raises(ValueError, match="targets must have as many rows") as error:
        make()(X, Y[:5])
    assert "shape: (5, 3), rows: 6" in str(error.value)


@pytest.mark.parametrize(("model", "loss"), [(layers(), F.mse_loss), (None, 3)])
def test_wrong_arguments(model, loss):
    model = model or GPipe(layers(), [2, 1], devices=["cpu"] * 2)
    with pytest.raises(TypeError, match="must be a"):
        ScheduledLoss(model, loss)


def test_model_without_partitions():
    with pytest.raises(ValueError, match="model must have a partition"):
        ScheduledLoss(GPipe(nn.Sequential(), []), F.mse_loss)


def test_one_micro_batch_is_a_warning():
    with pytest.warns(UserWarning, match="GPipe trains without pipelining"):
        make(chunks=1)(X, Y)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(duplicate):
    training = make()
    training(X, Y).backward()
    training.zero_grad()
    twin = duplicate(training)
    twin(X, Y).backward()
    same(twin, expected())
    assert all(x.grad is None for x in training.parameters())


def test_state_dict_has_the_keys_of_the_model():
    training = make()
    keys = {f"model.{key}" for key in training.model.state_dict()}
    assert training.state_dict().keys() == keys


class Fails(nn.Linear):
    """A layer that fails when it is told so, in forward or in backward."""

    when = None

    def forward(self, x):
        if self.when == "forward":
            raise KeyError("forward")
        y = super().forward(x)
        if self.when == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, grad):
        raise KeyError("backward")


@pytest.mark.parametrize(("when", "note"), [("forward", "1F0"), ("backward", "1B0")])
def test_failure_names_the_instruction_and_the_next_step_is_right(when, note):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Fails(3, 3))
    training = make(module=module)
    module[2].when = when
    with pytest.raises(KeyError) as error:
        training(X, Y)
    assert any(f"raised in {note} on worker 1" in x for x in error.value.__notes__)
    module[2].when = None
    assert all(x.grad is None for x in training.parameters())
    training(X, Y).backward()
    same(training, expected())


def test_hooks_are_back_after_a_failure():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Fails(3, 3))
    training = make(module=module)
    calls = []
    module[0].weight.register_hook(calls.append)
    module[2].when = "forward"
    with pytest.raises(KeyError):
        training(X, Y)
    module[2].when = None
    training(X, Y).backward()
    assert len(calls) == 1


def test_gradient_scaler():
    """Gradients that are too small for float16 reach the weights, as with the loss outside."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def loss(output, target):
        return (output.half() * 1e-7).float().mean()

    training = make(loss, scaler=scaler)
    scaler.scale(training(X, Y)).backward()
    module = layers()
    scaler.scale(loss(module(X), Y)).backward()
    for own, other in zip(training.model.parameters(), module.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=2e-2, atol=0)
    assert module[0].weight.grad.abs().max() > 0


def test_scale_is_divided_out():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    training = make(scaler=scaler)
    loss = training(X, Y)
    torch.testing.assert_close(loss, F.mse_loss(layers()(X), Y))
    loss.backward()
    same(training, expected())


def test_float16_without_a_scaler():
    training = make()
    with (
        torch.autocast("cpu", torch.float16),
        pytest.warns(UserWarning, match="needs the gradient scaler"),
    ):
        training(X, Y)


class Exact(nn.Linear):
    """A layer that computes without autocast, and whose backward shall do so, too."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_autocast(checkpoint):
    """Backward runs without autocast, as it does outside of its block."""
    module = nn.Sequential(nn.Linear(3, 3), Exact(3, 3), Exact(3, 3))
    training = make(module=copy.deepcopy(module), checkpoint=checkpoint)
    with torch.autocast("cpu", torch.bfloat16):
        training(X, Y).backward()
    for x, y in zip(X.chunk(3), Y.chunk(3)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(module(x), y)
        (loss / 3).backward()
    same(training, [x.grad for x in module.parameters()])
