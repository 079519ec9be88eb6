"""The cells of LSTM and GRU, for which PyTorch has fused operators on accelerators alone.

In the formulas gates are σ or tanh of ``input_gates + hidden_gates``, biases included; shapes are
``(N, 4 H)`` for an LSTM, ``(N, 3 H)`` for a GRU, and ``(N, H)`` for states.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__: list[str] = []

#: The registrations of kernels. They last as long as this list refers to them.
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
    """The gradients of the gates, of ``c`` and of the biases, which is the same for both."""
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
