"""The cells of AmoebaNet-D combine the right tensors of the tuples that layers pass on."""

import pytest
import torch

from benchmarks.models import amoebanetd
from benchmarks.models.genotype import NORMAL, REDUCTION, FactorizedReduction
from tests.benchmarks.models import children, make


def normal(left, right, s0, s1):
    s2 = left[1](s1) + right[1](s1)
    s3 = left[2](s1) + right[2](s0)
    s4 = left[3](s0) + right[3](s0)
    s5 = left[4](s2) + right[4](s2)
    s6 = left[5](s1) + right[5](s5)
    return torch.cat([s0, s3, s4, s6], dim=1)


def reduction(left, right, s0, s1):
    s2 = left[1](s0) + right[1](s0)
    s3 = left[2](s2) + right[2](s1)
    s4 = left[3](s2) + right[3](s2)
    s5 = left[4](s3) + right[4](s1)
    s6 = left[5](s2) + right[5](s3)
    return torch.cat([s4, s5, s6], dim=1)


def test_values():
    model, input = make("amoebanetd")
    layers = children(model)
    names = [name.removesuffix("_join") for name in layers if name.endswith("_join")]
    assert names == ["stem1", "stem2", "normal1", "reduction1", "normal2", "reduction2", "normal3"]
    before = current = layers["norm"](layers["conv"](input))
    for name in names:
        s0 = layers[f"{name}_current"](current)
        s1 = layers[f"{name}_previous"].squeeze(before)
        sides = [
            {k: layers[f"{name}_{side}{k}"].operation for k in range(1, 6)}
            for side in ("left", "right")
        ]
        cell = normal if name.startswith("normal") else reduction
        before, current = current, cell(*sides, s0, s1)
    output = layers["classify"](current.relu().mean(dim=(2, 3)))
    torch.testing.assert_close(model(input), output)


def test_operations_are_those_of_the_search():
    def text(genotype):
        return " ".join(f"{make.__name__}({state})" for state, make in genotype.operations)

    assert text(NORMAL) == (
        "conv_1x1(1) max_pool_3x3(1) none(1) conv_1x7_7x1(0) conv_1x1(0) conv_1x7_7x1(0) "
        "max_pool_3x3(2) none(2) avg_pool_3x3(1) conv_1x1(5)"
    )
    assert text(REDUCTION) == (
        "max_pool_2x2(0) max_pool_3x3(0) none(2) conv_3x3(1) conv_1x7_7x1(2) max_pool_3x3(2) "
        "none(3) max_pool_2x2(1) avg_pool_3x3(2) conv_1x1(3)"
    )


@pytest.mark.parametrize("size", [(1, 1), (6, 6), (7, 4)])
def test_reductions_agree_about_the_size(size):
    x = torch.rand(2, 8, *size)
    half = tuple((x + 1) // 2 for x in size)
    assert FactorizedReduction(8, 6)(x).shape == (2, 6, *half)
    made = {make for state, make in REDUCTION.operations if state < 2}
    for make_operation in made:
        assert make_operation(8, 2)(x).shape == (2, 8, *half)


def test_factorized_reduction_sees_all_rows_and_columns():
    x = torch.rand(1, 2, 5, 4, requires_grad=True)
    layer = FactorizedReduction(2, 4).eval()
    layer(x).sum().backward()
    # Of four in a square, two.
    seen = torch.tensor([[x % 2 == y % 2 for x in range(4)] for y in range(5)])
    assert torch.equal(x.grad[0, 0] != 0, seen)


@pytest.mark.parametrize(("layers", "stages"), [(3, [1, 1, 1]), (4, [1, 1, 2]), (8, [2, 3, 3])])
def test_layers_in_each_third(layers, stages):
    with torch.device("meta"):
        names = [*children(amoebanetd(10, layers, 8))]
    cells = [name.removesuffix("_join") for name in names if name.endswith("_join")]
    found = " ".join(cells[2:]).replace("reduction1", "|").replace("reduction2", "|").split("|")
    assert [len(third.split()) for third in found] == stages
    assert len(cells) == 4 + layers


def test_errors():
    with pytest.raises(ValueError, match=r"each third \(num_layers: 2\)"):
        amoebanetd(10, 2, 8)
    for wrong in (4, 10):
        with pytest.raises(ValueError, match=rf"above 1 \(num_filters: {wrong}\)"):
            amoebanetd(10, 3, wrong)
