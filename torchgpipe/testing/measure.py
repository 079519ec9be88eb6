"""The speed of this machine's accelerator and its host, measured in a minute, for dry runs.

The command is ``python -m torchgpipe.testing.measure --output mine.json``; a dry run takes the file
by its name, ``--device mine.json``. Operators of several sizes run on the first accelerator, and
the best of them gives the rate, so no data sheet is needed. The others give the share of the rate
by their size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchgpipe.testing.dry_run import watched, without_values
from torchgpipe.testing.hardware import NAMED, Hardware
from torchgpipe.testing.loading import loaded

__all__: list[str] = []

#: An operator's time is the median of ``ROUNDS`` measurements, each of ``TIMES`` runs in a row.
TIMES, ROUNDS = 20, 5

#: The sides of the square matrices whose product is measured.
SIDES = (256, 512, 1024, 2048, 4096, 8192)
#: The lengths of the sequences for which attention is measured.
LENGTHS = (512, 1024, 2048, 4096)
#: The numbers of channels with which a convolution is measured.
CHANNELS = (32, 64, 128, 256, 512)
#: The numbers of elements of the tensors whose sum is measured.
NUMBERS = tuple(2**k for k in range(18, 29, 2))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MeasuredDevice:
    """The accelerator, and a matrix whose product keeps it busy while the host issues others.

    Without that, small operators would be measured at the rate of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.busy = self.rand(8192, 8192)

    def rand(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device).fill_(0.5)

    def seconds(self, operator: Callable[[], object]) -> float:
        """The seconds of an operator on the device: the median of some rounds."""
        operator()
        rounds = []
        for _ in range(ROUNDS):
            start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            self.busy @ self.busy
            start.record()
            for _ in range(TIMES):
                operator()
            end.record()
            end.synchronize()
            rounds.append(start.elapsed_time(end) / TIMES / 1e3)
        return median(rounds)


def rates(sizes_and_seconds: Sequence[tuple[float, float]], launch: float) -> dict[float, float]:
    """Rates by size, of operators that take longer than two launches."""
    return {size: size / (t - launch) for size, t in sizes_and_seconds if t > 2 * launch}


def shares(by_size: dict[float, float], rate: float) -> dict[float, float]:
    """The shares of a rate, by size."""
    return {size: round(x / rate, 4) for size, x in by_size.items()}


def measured(device: torch.device, name: str, memory: int) -> Hardware:
    """Measure the device and its host.

    Raises:
        RuntimeError: no operator takes longer than its launch, so this is no accelerator.
    """
    on = MeasuredDevice(device)
    one = on.rand(1)
    launch = on.seconds(lambda: torch.add(one, one, out=one))

    def products(dtype: torch.dtype) -> dict[float, float]:
        pairs = []
        for n in SIDES:
            x = on.rand(n, n, dtype=dtype)
            pairs.append((2.0 * n**3, on.seconds(partial(torch.mm, x, x))))
        return rates(pairs, launch)

    of_products = {dtype: speeds for dtype in DTYPES if (speeds := products(dtype))}
    added = []
    for n in NUMBERS:
        a, b = on.rand(n), on.rand(n)
        added.append((12.0 * n, on.seconds(partial(torch.add, a, b, out=b))))
    of_bytes = rates(added, launch)
    if not of_products or not of_bytes:
        raise RuntimeError(
            "an operator takes longer than its launch on an accelerator "
            f"(device: {device}); measure one that is free"
        )
    best = {dtype: max(speeds.values()) for dtype, speeds in of_products.items()}
    half = torch.bfloat16 if torch.bfloat16 in best else torch.float32
    attended = []
    for length in LENGTHS:
        q = on.rand(1, 16, length, 128, dtype=half)
        attend = partial(F.scaled_dot_product_attention, q, q, q)
        attended.append((4.0 * 16 * length**2 * 128, on.seconds(attend)))
    convolved = []
    for channels in CHANNELS:
        x, w = on.rand(16, channels, 56, 56), on.rand(channels, channels, 3, 3)
        seconds = on.seconds(partial(F.conv2d, x, w, padding=1))
        convolved.append((2.0 * 16 * 56**2 * channels**2 * 9, seconds))
    bandwidth = max(of_bytes.values())
    host, host_backward = of_host(on)
    link = of_links(on)
    return Hardware(
        memory=memory,
        rates=best,
        bandwidth=bandwidth,
        **link,
        launch=launch,
        efficiency={
            "matmul": shares(of_products[half], best[half]),
            "attention": shares(rates(attended, launch), best[half]),
            "convolution": shares(rates(convolved, launch), best[torch.float32]),
            "other": shares(of_bytes, bandwidth),
        },
        host=host,
        host_backward=host_backward,
        name=name,
        baseline=f"measured, torch {torch.__version__}",
    )


def of_host(on: MeasuredDevice) -> tuple[float, float]:
    """Seconds that the host takes to issue an operator in forward, and in backward."""
    count, forward, backward = 200, [], []
    for _ in range(ROUNDS):
        x = y = on.rand(1).requires_grad_()
        torch.accelerator.synchronize(on.device)
        begin = time.perf_counter()
        for _ in range(count):
            y = y.tanh()
        forward.append((time.perf_counter() - begin) / count)
        torch.accelerator.synchronize(on.device)
        begin = time.perf_counter()
        torch.autograd.grad(y, x)
        backward.append((time.perf_counter() - begin) / count)
    return median(forward), median(backward)


def of_links(on: MeasuredDevice) -> dict[str, float]:
    """Bytes a second from the host, and from one device to another, or again from the host."""
    size = 2**26
    target = on.rand(size)
    speeds = {}
    for name, pinned in (("host_link", True), ("pageable", False)):
        x = torch.empty(size, dtype=torch.float32, pin_memory=pinned)
        speeds[name] = x.nbytes / on.seconds(partial(target.copy_, x, non_blocking=True))
    if torch.accelerator.device_count() > 1:
        other = target.to(torch.device(on.device.type, 1))
        seconds = on.seconds(partial(target.copy_, other, non_blocking=True))
        return {**speeds, "link": other.nbytes / seconds}
    return {**speeds, "link": speeds["host_link"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write the file, and print what it has."""
    parser = argparse.ArgumentParser(
        "python -m torchgpipe.testing.measure",
        description="Measure this machine's accelerator and its host, for dry runs.",
    )
    parser.add_argument("--output", required=True, help="the file, which ends with .json")
    parser.add_argument("--name", help="of the hardware in reports (default: the device's)")
    parser.add_argument(
        "--virtual", action="store_true", help="measure a virtual accelerator, to try the command"
    )
    options = parser.parse_args(argv)
    if not options.output.endswith(".json"):
        parser.error(f"the file ends with .json (output: {options.output}); name another")
    with ExitStack() as stack:
        if options.virtual:
            described = NAMED["h100-80gb"]
            (device,) = loaded(1)
            stack.enter_context(without_values(described, None))
            stack.enter_context(watched(described))
            name, memory = options.name or "virtual", described.memory
        elif (gpu := torch.accelerator.current_accelerator(check_available=True)) is not None:
            device = torch.device(gpu.type, 0)
            module: Any = torch.get_device_module(gpu.type)
            name = options.name or module.get_device_name(0)
            memory = module.mem_get_info(0)[1]
        else:
            parser.error("there must be an accelerator; --virtual tries the command without one")
        hardware = measured(device, name, memory)
    hardware.save(options.output)
    print(f"{options.output}: {hardware.name}")
    for dtype, rate in hardware.rates.items():
        print(f"{str(dtype)[6:]}: {rate / 1e12:.4g} TFLOP/s at best")
    print(f"memory: {hardware.bandwidth / 1e12:.4g} TB/s; launch: {1e6 * hardware.launch:.3g} µs")
    forward, back = 1e6 * hardware.host, 1e6 * hardware.host_backward
    print(f"host: {forward:.3g} µs an operator, {back:.3g} in backward")
    for kind, share in hardware.efficiency.items():
        assert not isinstance(share, float)
        print(f"{kind}: " + ", ".join(f"{x:.2f} at {size:.1e}" for size, x in share.items()))


if __name__ == "__main__":
    main()
