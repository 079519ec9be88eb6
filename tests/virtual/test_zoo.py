"""A zoo of the layers that users have gives the CPU's numbers on virtual devices."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map

from tests.virtual.compare import name_of, verify

SEQUENCE, IMAGE, VOLUME = (2, 4, 9), (2, 4, 9, 8), (2, 4, 5, 6, 7)
EIGHTS = (3, 5, 8)

torch.manual_seed(0)  # For the tensors of the tables.

#: The shape of the input, and layers for it.
LAYERS = {
    SEQUENCE: [
        nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.PReLU(4),
        nn.Sequential(nn.Conv1d(4, 4, 1), nn.SiLU(inplace=True), nn.Hardswish(inplace=True)),
        nn.Sequential(
            nn.BatchNorm1d(4), nn.LeakyReLU(inplace=True), nn.Flatten(), nn.Linear(36, 2)
        ),
    ],
    IMAGE: [
        nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, bias=False),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"),
        nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 6, 3)),
        nn.BatchNorm2d(4, momentum=None, affine=False).eval(),
        nn.MaxPool2d(3, 2, padding=1, return_indices=True),
        nn.PixelShuffle(2),
    ],
    VOLUME: [
        nn.ConvTranspose3d(4, 6, 3, stride=2, groups=2),
        nn.BatchNorm3d(4),
        nn.AdaptiveMaxPool3d(2),
    ],
    EIGHTS: [
        nn.LayerNorm((5, 8), elementwise_affine=False),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True, batch_first=True),
        nn.LSTM(8, 6, 2, proj_size=3),
        nn.GRU(8, 6, 2, bidirectional=True, batch_first=True),
    ],
    (3, 8): [nn.RNNCell(8, 6), nn.LSTMCell(8, 6, bias=False), nn.GRUCell(8, 6)],
}


@pytest.mark.parametrize(
    ("shape", "layer"),
    [(shape, layer) for shape, layers in LAYERS.items() for layer in layers],
    ids=name_of,
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_layer(shape, layer, devices):
    verify(devices[1], layer, torch.randn(shape))


@pytest.mark.parametrize("layer", [nn.LSTM(8, 6, 2), nn.GRU(8, 6, bidirectional=True)], ids=name_of)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_packed_sequences(layer, as_tensor, devices):
    lengths = torch.tensor([4, 5, 2]) if as_tensor else [4, 5, 2]

    def packed(layer, x):
        output, state = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
        return pad_packed_sequence(output)[0], state

    verify(devices[1], layer, torch.randn(5, 3, 8), call=packed)


IDS = torch.tensor([[1, 2, 0], [4, 2, 9]])


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Embedding(10, 4, padding_idx=0), [IDS]),
        (nn.Embedding(10, 4, max_norm=0.5, scale_grad_by_freq=True), [IDS]),
        *[(nn.EmbeddingBag(10, 4, mode=mode), [IDS]) for mode in ("sum", "mean", "max")],
        (nn.EmbeddingBag(10, 4), [IDS.flatten(), torch.tensor([0, 2, 2])]),
        (nn.LSTM(8, 6, 2), [torch.randn(5, 3, 8), (torch.randn(2, 3, 6), torch.randn(2, 3, 6))]),
        (nn.GRU(8, 6), [torch.randn(5, 3, 8), torch.randn(1, 3, 6)]),
        (nn.MaxUnpool1d(2), [torch.randn(1, 1, 2), torch.tensor([[[1, 2]]])]),
        (
            nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
            [torch.randn(3, 5, 8), torch.randn(3, 4, 8)],
        ),
    ],
    ids=name_of,
)
def test_layer_of_other_inputs(layer, inputs, devices):
    verify(devices[1], layer, *inputs)


CLASSES, GOAL = torch.tensor([1, 0, 3, 2, 1]), torch.rand(5, 4)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(torch.rand(4), ignore_index=1, label_smoothing=0.1), CLASSES),
        (nn.CrossEntropyLoss(), GOAL.softmax(1)),
        (nn.MultiMarginLoss(), CLASSES),
        (nn.HuberLoss(), GOAL),
        (nn.BCEWithLogitsLoss(pos_weight=torch.rand(4)), GOAL),
        (nn.KLDivLoss(reduction="batchmean"), GOAL),
    ],
    ids=name_of,
)
def test_loss(loss, target, devices):
    verify(devices[1], loss, torch.randn(5, 4), call=lambda loss, x: loss(x, target.to(x.device)))


def test_ctc_loss(devices):
    targets, lengths = torch.randint(1, 5, (3, 4)), torch.tensor([4, 3, 2])
    x = torch.randn(9, 3, 5).log_softmax(2)
    verify(devices[1], nn.CTCLoss(), x, targets, torch.tensor([9, 9, 8]), lengths)


@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "float"])
def test_multihead_attention(mask, weights, train, devices):
    def attend(layer, x):
        upper = torch.ones(4, 4, device=x.device).triu(1)
        masks = {
            "none": {},
            "causal": {"attn_mask": upper.bool()},
            "padding": {"key_padding_mask": upper[1:].bool()},
            "float": {"attn_mask": -upper},
        }
        return layer(x, x, x, need_weights=weights, **masks[mask])

    layer = nn.MultiheadAttention(8, 2, batch_first=True).train(train)
    verify(devices[1], layer, torch.randn(3, 4, 8), call=attend)


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.LSTM(8, 6, 2),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_layer_in_evaluation(layer, context, devices):
    layer, x = layer.eval(), torch.randn(3, 4, 8)
    with context():
        inputs = [x, x, x] if isinstance(layer, nn.MultiheadAttention) else [x]
        expected = layer(*inputs)
        mine = copy.deepcopy(layer).to(devices[1])(*[x.to(devices[1]) for x in inputs])
        mine = tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, mine)
    torch.testing.assert_close(mine, expected)
