"""Modules that PyTorch looks for on an accelerator: ``torch.virtual``, fused LSTM and GRU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


# The module ``torch.virtual``: functions that PyTorch looks for in the module of a device type.
#
# Users call :mod:`torch.accelerator`. Of its functions, only those that PyTorch itself calls in
# this module are here, too.


#: A device, its name, its index, or None for the current device.
DeviceLike = torch.device | int | str | None

_ops: Any = torch.ops.virtual_accelerator

#: ``torch.utils.checkpoint`` restores the device's generator only if this is true.
_initialized = True

#: The default generator of each device. PyTorch looks for a variable of this name.
default_generators: tuple[torch.Generator, ...] = ()


def is_available() -> bool:
    """Whether there are virtual devices: always, since this module comes with them."""
    return True


def is_initialized() -> bool:
    """Whether the devices are initialised: always, since nothing waits for their first use."""
    return True


def device_count() -> int:
    """The number of virtual devices."""
    count: int = _ops.device_count()
    return count


def current_device() -> int:
    """The index of this thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: DeviceLike) -> None:
    """Make a device this thread's current one."""
    torch.accelerator.set_device_index(_index(device))


class device:
    """Make a device the current one within a ``with`` block."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.previous = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.previous)


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all work that a device was given."""
    torch.accelerator.synchronize(_index(device))


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """This thread's current stream of a device; ``torch.distributed.checkpoint`` asks here."""
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    """Make a stream the current one within a ``with`` block, as the stream itself does."""
    return stream


def get_rng_state(device: DeviceLike = None) -> Tensor:
    """The state of a device's default generator."""
    return _generator(_index(device)).get_state()


def set_rng_state(new_state: Tensor, device: DeviceLike = None) -> None:
    """Set the state of a device's default generator."""
    _generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices' default generators."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Set the states of all devices' default generators."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator."""
    _generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices' default generators, which ``torch.manual_seed`` does by this function."""
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    """Seed the current device's default generator with a random number, and return that number."""
    return _generator(current_device()).seed()


def initial_seed() -> int:
    """The seed of the current device's default generator."""
    return _generator(current_device()).initial_seed()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast`` may cast to."""
    return [torch.float16, torch.bfloat16]


def can_use_flash_attention(params: Any) -> bool:
    """Whether there is FlashAttention's operator: in a dry run for half precision, as on GPUs."""
    takes = params.dropout == 0 and (params.query.element_size() == 2 or not _ops.is_hollow())
    return takes and torch.backends.cuda.flash_sdp_enabled()


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def _generator(index: int) -> torch.Generator:
    generator: torch.Generator = _ops.generator(index)
    return generator


def _index(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# Kernels for the cells of LSTM and GRU, which PyTorch computes by fused operators on accelerators.
#
# In the formulas below a gate is σ or tanh of its columns of ``input_gates + hidden_gates``, with
# biases. Both tensors are ``(N, 4 H)`` in an LSTM and ``(N, 3 H)`` in a GRU, and states ``(N, H)``.


#: The kernels below as registered with PyTorch, which forgets them when nothing refers to this.
_library: list[torch.library.Library] = []


def register() -> None:
    """Register the kernels of the virtual devices."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "lstm_cell": lstm_cell,
        "lstm_cell_backward_impl": lstm_cell_backward,
        "gru_cell": gru_cell,
        "gru_cell_backward": gru_cell_backward,
    }
    for name, kernel in kernels.items():
        library.impl(f"_thnn_fused_{name}", kernel, "PrivateUse1")
    _library.append(library)


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``c' = f c + i g`` and ``h' = o tanh(c')``; the gates are kept for backward."""
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of the gates and of ``c``, and that of the biases, which both biases have."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_h * o * (1 - tanh * tanh)
    if grad_cy is not None:
        grad_c = grad_c + grad_cy
    grad_gates = torch.cat(
        [
            grad_c * g * i * (1 - i),
            grad_c * cx * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_h * tanh * o * (1 - o),
        ],
        1,
    )
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``h' = n + z (h - n)`` with ``n = tanh(n_i + r n_h)``; the gates are kept for backward."""
    if input_bias is not None and hidden_bias is not None:
        input_gates = input_gates + input_bias
        hidden_gates = hidden_gates + hidden_bias
    r_i, z_i, n_i = input_gates.chunk(3, 1)
    r_h, z_h, n_h = hidden_gates.chunk(3, 1)
    r, z = (r_i + r_h).sigmoid(), (z_i + z_h).sigmoid()
    n = (n_i + r * n_h).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, n_h], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of the input gates and hidden gates, of ``h``, and of both biases."""
    r, z, n, hx, n_h = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_r = grad_n * n_h * r * (1 - r)
    grad_input = torch.cat([grad_r, grad_z, grad_n], 1)
    grad_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * z, *biases
