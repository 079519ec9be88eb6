"""A loss proves how it weighs its rows, before the first mini-batch is cut."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.examples import MISSING
from tests.unit.transformers.test_trainer import made, model_of, wrapped

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe.transformers import loss_of, pipelined  # noqa: E402


def shifted(logits, ids, mask, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def masked(logits, ids, mask, labels):
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    return (losses.view_as(mask) * mask).sum() / mask.sum()


def added(logits, ids, mask, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def by_rows(logits, ids, mask, labels):
    return torch.stack([F.cross_entropy(x, y) for x, y in zip(logits, labels)]).mean()


def contrasted(logits, ids, mask, labels):
    means = F.normalize(logits.mean(1), dim=1)
    return F.cross_entropy(means @ means.t(), torch.arange(len(means)))


class Own(nn.Module):
    """A model with code of its own: it need not know that a label of -100 is none."""

    def __init__(self, loss, nested=False):
        super().__init__()
        layers = [nn.Embedding(32, 8), nn.Linear(8, 32)]
        # What is called one by one belongs to no child that is called.
        self.layers = nn.ModuleList(layers) if nested else nn.Sequential(*layers)
        self.loss, self.calls = loss, []

    def forward(self, input_ids, attention_mask=None, labels=None):
        self.calls.append(len(input_ids))
        x = input_ids
        for layer in self.layers if isinstance(self.layers, nn.ModuleList) else [self.layers]:
            x = layer(x)
        return {"loss": self.loss(x, input_ids, attention_mask, labels), "logits": x}


def batch(count=6, ignored=-100):
    ids = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < torch.tensor([8, 3, 6, 5, 8, 4])[:count, None]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~mask, ignored)}


def trained(model, given, tmp_path, **options):
    """The loss of a pipelined Trainer, which must be that of the model, and the number of calls."""
    expected = copy.deepcopy(model)(**given)["loss"]
    own = made(
        pipelined(transformers.Trainer),
        wrapped(model),
        tmp_path,
        [],
        {"compute_metrics": None, **options},
    )
    loss = own.compute_loss(own.model, dict(given))
    own.model.zero_grad()
    loss.backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(**given)["loss"].backward()
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("loss", [shifted, masked, added, by_rows, contrasted])
def test_a_loss_of_its_own(loss, tmp_path):
    model = Own(loss)
    trained(model, batch(), tmp_path)
    # Two rows, and each alone, come before the three micro-batches of the step.
    assert model.calls[:3] == [2, 1, 1]
    once = loss is contrasted
    assert model.calls[3:8] == ([2, 2, 2, 2, 6] if once else [2, 2, 2, *model.calls[6:8]])


def test_rows_of_equal_counts_prove_nothing(tmp_path):
    """A label of -100 may be an index to somebody's code, so none is made."""
    model, given = Own(shifted), batch()
    equal = {"input_ids": given["input_ids"], "labels": given["input_ids"]}
    own = made(pipelined(transformers.Trainer), wrapped(model), tmp_path, [])
    for _ in range(2):
        own.compute_loss(model, dict(equal))
    assert model.calls == [2, 1, 1, 2, 2, 2, 2, 2, 2]
    uneven = {"input_ids": given["input_ids"], "labels": given["labels"]}
    expected = copy.deepcopy(model)(**uneven)["loss"]
    torch.testing.assert_close(own.compute_loss(model, uneven), expected)


def test_what_no_way_makes_is_an_error_or_accepted(tmp_path):
    given, trainer = batch(), pipelined(transformers.Trainer)
    own = made(trainer, wrapped(Own(contrasted, nested=True)), tmp_path, [])
    with pytest.raises(ValueError, match="for two rows together.*compute_loss_func.*accept_loss"):
        own.compute_loss(own.model, dict(given))
    accepting = made(
        trainer, wrapped(Own(contrasted, nested=True)), tmp_path, [], {"accept_loss": True}
    )
    assert accepting.compute_loss(accepting.model, dict(given)).isfinite()


def test_nothing_changes(tmp_path):
    model, seen = Own(shifted), []
    model.layers.append(nn.Dropout())
    model.train()
    own = made(pipelined(transformers.Trainer), wrapped(model), tmp_path, [])
    states = [torch.get_rng_state()]
    model.register_forward_pre_hook(lambda *_: seen.append((model.training, torch.get_rng_state())))
    own.compute_loss(model, batch())
    assert [training for training, _ in seen] == [False] * 3 + [True] * 3
    assert seen[3][1].equal(states[0])
    assert all(x.training for x in model.modules())
    # One row is not cut, and compiled code would be compiled for its shape.
    calls = len(model.calls)
    own.compute_loss(model, batch(1))
    assert len(model.calls) == calls + 1


def test_no_proof_for_compiled_blocks(tmp_path):
    model = Own(shifted)
    model.layers.compile(backend="eager")
    own = made(pipelined(transformers.Trainer), wrapped(model), tmp_path, [])
    own.compute_loss(model, batch())
    assert model.calls == [2, 2, 2]


def test_a_loop_of_ones_own():
    model, given = Own(shifted), batch()
    pipe = wrapped(model)
    expected = model(**given)["loss"]
    assert pipe.verify(given) == "shifted labels"
    torch.testing.assert_close(loss_of(pipe, pipe(**given), given), expected)
    contrastive = wrapped(Own(contrasted))
    with pytest.raises(ValueError, match="compares rows"):
        contrastive.verify(given)
    with pytest.raises(ValueError, match="compares rows"):
        loss_of(contrastive, contrastive(**given), given)


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_models_of_the_library(name):
    ids = batch()["input_ids"]
    pipe = wrapped(model_of(name))
    expected = "labels" if name == "t5" else "shifted labels"
    assert pipe.verify({"input_ids": ids, "labels": ids.clone()}) == expected


def test_losses_of_several_kinds(tmp_path):
    """Masked words and a sentence that follows; answers that are cut off."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, intermediate_size=16)
    ids, ends = batch()["input_ids"], torch.tensor([1, 2, 50, 50, 3, 50])
    for kind, more in (
        ("PreTraining", {"labels": batch()["labels"], "next_sentence_label": torch.arange(6) % 2}),
        ("QuestionAnswering", {"start_positions": ends.clamp(max=4), "end_positions": ends}),
    ):
        model = getattr(transformers, f"BertFor{kind}")(config).eval()
        trained(model, {"input_ids": ids, **more}, tmp_path)


def weighted(logits, ids, mask, labels):
    weight = torch.tensor([5.0, *[1.0] * 31])
    return F.cross_entropy(logits.mean(1), labels, weight=weight)


def test_rows_of_one_class_prove_nothing(tmp_path):
    """One class does not show the weights of classes, so the proof looks at rows of two."""
    given = {**batch(), "labels": torch.tensor([1, 1, 1, 1, 0, 1])}
    trained(Own(weighted), given, tmp_path)
    same = {**batch(), "labels": torch.ones(6, dtype=torch.long)}
    model = Own(weighted)
    trained(model, same, tmp_path)
    assert 1 not in model.calls


def paired(logits, ids, mask, labels):
    chosen, rejected = logits.mean((1, 2)).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def test_rows_that_are_not_computed_alone(tmp_path):
    with pytest.raises(ValueError, match=r"model \(Own\) computes two .*, but not each alone"):
        trained(Own(paired), batch(), tmp_path)


def test_one_row_without_labels(tmp_path):
    """A mini-batch that is one micro-batch has its loss, whatever counts in it."""

    def own(logits, ids, mask, labels):
        counted = (labels != -100).sum().clamp(min=1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted

    given = {key: x[:1] for key, x in batch().items()}
    given["labels"] = torch.full_like(given["labels"], -100)
    trained(Own(own), given, tmp_path)
