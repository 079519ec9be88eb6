"""The same layers, balance and schedule over several processes, each with a device of its own.

::

    dist.init_process_group()               # torchrun --nproc-per-node 4 train.py
    model = torchgpipe.distributed.Pipe(layers, balance, schedule="1f1b", chunks=8, loss=loss)
    optimizer = torch.optim.AdamW(model.parameters())
    value = model.step(input, target)
    optimizer.step()

The runtime that orders instructions and messages is PyTorch's (:mod:`torch.distributed.pipelining`,
of PyTorch 2.13 or newer). The cells are those of :class:`~torchgpipe.ScheduledLoss`.
"""

from torchgpipe.distributed.pipe import Pipe

__all__ = ["Pipe"]
