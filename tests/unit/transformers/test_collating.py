"""Mini-batches that cannot be cut by rows: packed rows, and images with a row for each patch."""

import copy

import pytest
import torch
from torch import nn

from tests.examples import MISSING
from tests.unit.transformers.test_trainer import assert_same_weights, made, model_of, wrapped
from torchgpipe import Chunks

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe.transformers import pipelined  # noqa: E402


def texts(count=14):
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(3, 32, (3 + k % 4,), generator=generator) for k in range(count)]
    return [{"input_ids": ids.tolist()} for ids in found]


class Patches(nn.Module):
    """A model of images of which each has a number of patches."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, patches, counts, labels=None):
        each = self.embed(patches).tanh().split(counts.tolist())
        logits = self.head(torch.stack([x.mean(0) for x in each]))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def images(count=14):
    torch.manual_seed(0)
    return [{"patches": torch.rand(1 + k % 3, 4), "labels": k % 3} for k in range(count)]


def collated(examples):
    return {
        "patches": torch.cat([x["patches"] for x in examples]),
        "counts": torch.tensor([len(x["patches"]) for x in examples]),
        "labels": torch.tensor([x["labels"] for x in examples]),
    }


def chunked(examples):
    return Chunks.of([collated(examples[::2]), collated(examples[1::2])])


IMAGE = 9


class TextsWithImages(nn.Module):
    """A model of texts in which a token stands for an image."""

    def __init__(self):
        super().__init__()
        self.embed, self.image, self.head = nn.Embedding(10, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, input_ids, pixel_values=None, labels=None):
        x, where = self.embed(input_ids), input_ids == IMAGE
        if pixel_values is not None:
            x = x.masked_scatter(where[..., None], self.image(pixel_values))
        logits = self.head(x.tanh().mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_images(count=14):
    """Texts with none to two images each; four of them have four."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for k in range(count):
        ids = torch.randint(IMAGE, (4,), generator=generator)
        ids[: (0, 2, 1, 1, 0)[k % 5]] = IMAGE
        found.append({"input_ids": ids, "labels": k % 3})
    return found


def collated_with_images(examples):
    ids = torch.stack([x["input_ids"] for x in examples])
    found = {"input_ids": ids, "labels": torch.tensor([x["labels"] for x in examples])}
    # Each image tells its text.
    texts = ids.double().mean(1).float().repeat_interleave((ids == IMAGE).sum(1))
    return {**found, "pixel_values": texts[:, None].sin().expand(-1, 4)} if len(texts) else found


FLAT = transformers.DataCollatorWithFlattening()
KINDS = {
    "packed": (lambda: model_of("llama"), texts, FLAT, FLAT),
    "patches": (Patches, images, collated, collated),
    "images": (TextsWithImages, with_images, collated_with_images, collated_with_images),
    "by the collator": (Patches, images, collated, chunked),
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_predictions(kind, accumulation, tmp_path):
    make, data, collate, own_collate = KINDS[kind]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    calls = []
    next(model.children()).register_forward_hook(lambda *_: calls.append(1))
    found = []
    for trainer, one, given in (
        (transformers.Trainer, plain, collate),
        (pipelined(transformers.Trainer), wrapped(model), own_collate),
    ):
        own = made(
            trainer,
            one,
            tmp_path,
            data(),
            given={"data_collator": given, "compute_metrics": None},
            gradient_accumulation_steps=accumulation,
            remove_unused_columns=False,
        )
        own.train()
        losses = [x["loss"] for x in own.state.log_history if "loss" in x]
        found.append((losses, own.predict(data()[:5]).predictions))
        calls.append(0)
    assert calls.index(0) == 0
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    if given is collate:
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)
    assert_same_weights(model, plain)
    # Each mini-batch of four examples, or of the rest, is several micro-batches.
    assert sum(calls) > 3 * accumulation


def test_what_others_see(tmp_path):
    """Code that reads a mini-batch sees no micro-batches; examples are collated once."""
    shown, seen = [], []

    class Reads(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            shown.append([*inputs])
            return super().training_step(model, inputs, *args, **kwargs)

    def recorded(examples):
        seen.extend([id(x) for x in examples])
        return collated(examples)

    data, options = images(12), {"remove_unused_columns": False, "max_steps": 3}
    given = {"data_collator": recorded}
    made(pipelined(Reads), wrapped(Patches()), tmp_path, data, given, **options).train()
    assert shown == [["patches", "counts", "labels"]] * 3
    # The first four come twice, and the first time as copies.
    assert sorted(seen[4:]) == sorted(map(id, data))


def test_streamed_dataset(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(images())

    options = {"remove_unused_columns": False, "max_steps": 1}
    given = {"data_collator": collated}
    trainer = pipelined(transformers.Trainer)
    own = made(trainer, wrapped(Patches()), tmp_path, Stream(), given, **options)
    with pytest.raises(ValueError, match="dispatch_batches"):
        own.train()
    options["accelerator_config"] = {"dispatch_batches": False}
    made(trainer, wrapped(Patches()), tmp_path, Stream(), given, **options).train()


def test_arguments_that_the_collator_has_not_made(tmp_path):
    class Masks(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs["labels"] = inputs["labels"].clone()
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = {"remove_unused_columns": False, "max_steps": 1}
    given = {"data_collator": collated}
    own = made(pipelined(Masks), wrapped(Patches()), tmp_path, images(), given, **options)
    with pytest.raises(ValueError, match="must come by name from the data collator"):
        own.train()


class Changes(transformers.Trainer):
    """Replace labels in front of the step, as distillation does."""

    def training_step(self, model, inputs, *args, **kwargs):
        inputs["labels"] = (inputs["labels"] + 1) % 3
        return super().training_step(model, inputs, *args, **kwargs)


def rewriting(examples):
    """Change the examples, and draw."""
    for x in examples:
        x["patches"] = x["patches"] + 1
    found = collated(examples)
    return {**found, "patches": found["patches"] + torch.rand(()) * 0}


@pytest.mark.parametrize(
    ("kind", "collate"), [(Changes, collated), (transformers.Trainer, rewriting)]
)
def test_as_the_plain_trainer(kind, collate, tmp_path):
    torch.manual_seed(0)
    model = Patches()
    plain = copy.deepcopy(model)
    options = {"remove_unused_columns": False, "max_steps": 2, "lr_scheduler_type": "constant"}
    for make, one in ((kind, plain), (pipelined(kind), wrapped(model))):
        data = [{**x} for x in images()]
        made(make, one, tmp_path, data, {"data_collator": collate}, **options).train()
    assert_same_weights(model, plain)


def test_a_collator_that_needs_several_examples(tmp_path):
    def pairs(examples):
        assert len(examples) > 1, "pairs"
        return collated(examples)

    options = {"remove_unused_columns": False, "max_steps": 1}
    trainer = pipelined(transformers.Trainer)
    own = made(trainer, wrapped(Patches()), tmp_path, images(), {"data_collator": pairs}, **options)
    with pytest.warns(UserWarning, match="raised AssertionError: pairs"):
        own.train()
