"""Layers with state of the mini-batch, and models of them."""

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import OncePerMiniBatch


class Centre(OncePerMiniBatch):
    """A running mean of the rows, as DINO has one."""

    def __init__(self, size=4):
        super().__init__()
        self.register_buffer("centre", torch.zeros(size))

    def forward(self, x):
        self.give(x)
        return (x - self.centre).tanh()

    def after_mini_batch(self, given):
        self.centre.lerp_(given.mean(0), 0.5)


class Contrast(OncePerMiniBatch):
    """A queue of keys and a momentum encoder, as MoCo has them.

    Args:
        length: the length of the queue.
    """

    def __init__(self, length=16):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.linspace(-1, 1, 4 * length).view(length, 4))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def before_mini_batch(self):
        self.key.weight.lerp_(self.query.weight, 0.1)

    def forward(self, x):
        query, key = self.query(x), self.key(x).detach()
        self.give({"keys": (key,)})
        # A clone, since plain PyTorch refuses to save what is changed before backward.
        logits = torch.cat(
            [(query * key).sum(1, keepdim=True), query @ self.queue[:7].clone().T], 1
        )
        return logits[:, :4].sin()

    def after_mini_batch(self, given):
        (keys,) = given["keys"]
        rows = (self.at + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[rows] = keys
        self.at.add_(len(keys)).remainder_(len(self.queue))


class Dino(OncePerMiniBatch):
    """A model whose own code, after its last module, has the state."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 5), nn.Linear(4, 5)
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(5))

    def before_mini_batch(self):
        # A device map may have them on two devices.
        new = self.student.weight.to(self.teacher.weight.device)
        self.teacher.weight.lerp_(new, 0.1)

    def forward(self, x):
        student = self.student(x)
        teacher = self.teacher(x)
        self.give(teacher)
        aim = F.softmax((teacher.detach() - self.centre[None]) / 0.1, -1)
        return -(aim * F.log_softmax(student, -1)).sum(1)

    def after_mini_batch(self, given):
        self.centre.lerp_(given.mean(0).to(self.centre.device), 0.5)


class Swapped(Dino):
    """The same, whose last module has a gradient, so that the code after it is computed again."""

    def forward(self, x):
        teacher = self.teacher(x)
        self.give(teacher)
        student = self.student(x)
        return F.log_softmax(student - self.centre[None], -1).square().sum(1)
