"""Capture a pipeline step of two stages in a CUDA graph, replay it, and compare.

Nothing like it has run: no GPU was at hand. See docs/decisions/one_launch.rst for what it needs::

    python tools/capture.py
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch
from torch import Tensor, nn

from torchgpipe import GPipe, ScheduledLoss

WIDTH, ROWS, CHUNKS, STEPS = 512, 64, 8, 50


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return ((output - target) ** 2).mean()


def main() -> int:
    """Capture, replay, compare; print the host's time of both."""
    if not torch.cuda.is_available():
        print("there must be a GPU that CUDA knows")
        return 2
    torch.manual_seed(0)
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", k % count) for k in range(2)]
    layers = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
    )
    model = GPipe(layers, [1, 1], devices=devices, chunks=CHUNKS, checkpoint="never")
    training = ScheduledLoss(model, squares, "1f1b", stages="graph")
    input = torch.rand(ROWS, WIDTH, device=devices[0])
    target = torch.rand(ROWS, WIDTH, device=devices[1])

    def step() -> None:
        training(input, target).backward()

    side = torch.cuda.Stream(devices[0])
    side.wait_stream(torch.cuda.current_stream(devices[0]))
    with torch.cuda.stream(side):
        # Traces, and fills what is made once.
        for _ in range(3):
            model.zero_grad()
            step()
    torch.cuda.synchronize()
    expected = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    model.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    model.zero_grad(set_to_none=False)
    graph.replay()
    torch.cuda.synchronize()
    found = [x.grad for x in model.parameters() if x.grad is not None]
    same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, found))
    print("gradients", "are equal" if same else "differ")
    for name, run in (("issued", step), ("replayed", graph.replay)):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(STEPS):
            run()
        host = (perf_counter() - start) / STEPS
        torch.cuda.synchronize()
        whole = (perf_counter() - start) / STEPS
        print(f"{name}: host {host * 1e3:.3f} ms, step {whole * 1e3:.3f} ms")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
