"""One file for the whole package: the code that a user copies from the README works."""

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import GPipe


def test_trains():
    torch.manual_seed(0)
    a, b, c, d = nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2)
    model = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    input = torch.rand(64, 2)
    target = (input[:, 0] > input[:, 1]).long()

    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        output = model(input.to(model.devices[0]))
        loss = F.cross_entropy(output, target.to(model.devices[-1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2

    model.eval()
    with torch.no_grad():
        accuracy = (model(input).argmax(1) == target).float().mean()
    assert accuracy > 0.9
