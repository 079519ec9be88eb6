"""Device maps name modules, cover all tensors, and give shared tensors one home."""

import pytest
import torch
from torch import nn

from torchgpipe.mapped.device_map import checked_map, mapped_modules, owner, place

CPU, META = torch.device("cpu"), torch.device("meta")


class Model(nn.Module):
    """A model with a list of layers, and a layer with two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.again = self.embed
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.again(self.layers[1](self.layers[0](self.embed(x))))


def names(model, device_map):
    return [mapped.name for mapped in mapped_modules(model, device_map)]


def test_a_module_belongs_to_the_longest_name():
    found = {"": CPU, "layers": CPU, "layers.1": CPU}
    assert owner("embed.weight", found) == ""
    assert owner("layers.0.weight", found) == "layers"
    assert owner("layers.1.weight", found) == "layers.1"
    assert owner("layers.10.weight", found) == "layers"
    assert owner("embed.weight", {"layers": CPU}) is None


def test_a_module_with_a_name_below_it_is_divided():
    model = Model()
    assert names(model, {"": CPU}) == [""]
    assert names(model, {"": CPU, "embed": CPU, "layers.0": CPU}) == [
        *["layers.1", "embed", "layers.0"]
    ]
    assert names(model, {"layers": CPU, "layers.1": CPU}) == ["layers.0", "layers.1"]


def test_a_module_with_names_on_several_devices_has_a_place_for_each():
    places = {"embed": CPU, "layers": CPU, "again": META}
    model = Model()
    first = mapped_modules(model, places)[0]
    assert [(x.name, x.device) for x in (first, *first.names)] == [("embed", CPU), ("again", META)]
    assert [len(x.lent) for x in (first, *first.names)] == [2, 2]


@pytest.mark.parametrize(
    ("device_map", "error", "message"),
    [
        (["embed"], TypeError, "names of modules"),
        ({0: "cpu"}, TypeError, "names of modules"),
        ({}, ValueError, "must have an entry"),
        ({"embed": "cpu", "layer.0": "cpu"}, ValueError, r"unknown: \['layer.0'\]"),
        (
            {"embed": "cpu", "layers.0": "cpu"},
            ValueError,
            r"\['layers.1.weight', 'layers.1.bias'\]",
        ),
        ({"": "nonsense"}, ValueError, "nonsense"),
    ],
)
def test_wrong_maps(device_map, error, message):
    with pytest.raises(error, match=message):
        checked_map(device_map, Model())


def test_a_buffer_that_no_state_dict_has_needs_no_name():
    model = Model()
    found = checked_map({"embed": "cpu", "layers": "cpu"}, model)
    place(model, found)
    assert model.table.device == CPU


def test_modules_are_moved_and_stay_shared():
    model = Model()
    place(model, {"embed": CPU, "again": CPU, "layers.0": CPU, "layers.1": META})
    assert model.again.weight is model.embed.weight
    assert model.layers[0].weight.device == CPU
    assert model.layers[1].weight.device == META


def test_shared_tensors_are_at_home_where_the_longest_name_leads():
    model = Model()
    place(model, {"embed": CPU, "layers": CPU, "again": META})
    assert model.again.weight is model.embed.weight
    assert model.embed.weight.device == CPU
    model.layers[1].weight = model.embed.weight
    place(model, {"": CPU, "layers.1": META})
    assert model.embed.weight.device == META
    assert model.embed.bias.device == CPU
    assert model.embed.weight is model.layers[1].weight


def test_places_of_what_modules_on_several_devices_have():
    model = Model()
    model.layers[1].weight = model.embed.weight
    device_map = {"embed": META, "layers": CPU, "layers.1": CPU}
    place(model, device_map)
    found = {x.name: x.lent for x in mapped_modules(model, device_map)}
    assert found["layers.0"] is None
    assert found["embed"] == [(model.embed._parameters, "weight")]
    assert found["layers.1"] == [(model.layers[1]._parameters, "weight")]
