"""A model that is loaded shard by shard."""

import json

import pytest
import torch

from tests.examples import MISSING

pytest.importorskip("safetensors", exc_type=MISSING)

from safetensors.torch import load_file, save_file

from examples import larger_than_a_device as example
from torchgpipe import GPipe

CPU = torch.device("cpu")
OTHER = {"0": "model.embed", **{str(k): f"model.layers.{k - 1}" for k in range(1, 12)}}
OTHER |= {"12": "model.norm", "13": "lm_head"}
OWN = {name: own for own, name in OTHER.items()}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(example, "places", lambda partitions: [CPU] * partitions)


@pytest.fixture
def source(tmp_path):
    """A model of 14 layers in files that end within partitions."""
    torch.manual_seed(0)
    plain = example.decoder(11, 8)
    example.save_shards([plain[:5], plain[5:9], plain[9:]], tmp_path, OTHER)
    return plain


def meta(balance):
    with torch.device("meta"):
        return GPipe(example.decoder(11, 8), balance, devices=[CPU] * len(balance))


def test_example(capsys, monkeypatch):
    assert example.main(["--width", "16"]) == 0
    assert "outputs differ from the plain model's by 0.0e+00" in capsys.readouterr().out
    monkeypatch.setattr(example, "load_shards", lambda *_: None)
    assert example.main(["--width", "16"]) == 1


@pytest.mark.parametrize("balance", [[14], [3, 11], [2, 5, 5, 2]], ids=str)
def test_comes_and_goes_in_any_balance(balance, source, tmp_path):
    model = meta(balance)
    assert example.not_loaded(model)
    example.load_shards(model, tmp_path, OWN)
    assert not example.not_loaded(model)
    x = torch.randint(256, (2, 5))
    assert torch.equal(model(x), source(x))

    again = tmp_path / "again"
    again.mkdir()
    largest = example.save_shards(model.partitions, again, OTHER)
    assert largest == max(example.size(partition) for partition in model.partitions)
    index = json.loads((again / example.INDEX).read_text("utf-8"))
    assert index["metadata"]["total_size"] == example.size(source)
    saved = {name: load_file(again / file)[name] for name, file in index["weight_map"].items()}
    assert len(saved) == len(source.state_dict())
    for name, tensor in source.state_dict().items():
        assert torch.equal(saved[example.renamed(name, OTHER)], tensor)


def test_a_tensor_is_in_no_file(source, tmp_path):
    file = tmp_path / "model-00002.safetensors"
    save_file({k: x for k, x in load_file(file).items() if k != "model.layers.5.norm.bias"}, file)
    with pytest.raises(ValueError, match=r"no file has \['partitions\.1\.6\.norm\.bias'\]"):
        example.load_shards(meta([3, 11]), tmp_path, OWN)


def test_a_tensor_that_the_model_has_not(source, tmp_path):
    file = tmp_path / "model-00002.safetensors"
    save_file(load_file(file) | {"model.other.weight": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"has no \['model\.other\.weight'\], but model-00002"):
        example.load_shards(meta([3, 11]), tmp_path, OWN)


def test_a_buffer_that_no_file_has(source, tmp_path):
    """A layer may compute such a buffer on the meta device."""
    model = meta([3, 11])
    model[4].inverse.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"no file has buffers .*\['partitions\.1\.4\.inverse'\]"):
        example.load_shards(model, tmp_path, OWN)


@pytest.mark.parametrize("assign", [False, True])
def test_files_of_torch_save(assign, source, tmp_path):
    """Files are mapped into memory, so that copies read them, or nothing copies them at all."""
    for j, part in enumerate([source[:5], source[5:]]):
        torch.save(part.state_dict(), tmp_path / f"{j}.pt")
    model = meta([3, 11])
    missing = set(model.state_dict())
    for j in range(2):
        state = torch.load(tmp_path / f"{j}.pt", mmap=True)
        keys = model.load_state_dict(state, strict=False, assign=assign)
        assert not keys.unexpected_keys
        missing &= set(keys.missing_keys)
    assert not missing
    assert (model[-1].weight.data_ptr() == state["13.weight"].data_ptr()) == assign
    x = torch.randint(256, (2, 5))
    assert torch.equal(model(x), source(x))
    assert not example.not_loaded(model)


def test_layers_that_initialise_themselves():
    """Layers initialise themselves in place, with the random numbers of the plain model."""
    torch.manual_seed(3)
    plain = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)], torch.nn.LayerNorm(3))
    with torch.device("meta"):
        module = torch.nn.Sequential(
            *[torch.nn.Linear(3, 3) for _ in range(3)], torch.nn.LayerNorm(3)
        )
    model = GPipe(module, [2, 2], devices=[CPU] * 2)
    torch.manual_seed(3)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    assert not example.not_loaded(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
