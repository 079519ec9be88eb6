"""Trainers of Hugging Face Transformers, for models that are trained by pipeline parallelism.

::

    from torchgpipe import MappedGPipe
    from torchgpipe.transformers import pipelined

    pipe = MappedGPipe(model, device_map, chunks=8)
    trainer = pipelined(Trainer)(model=pipe, args=args, train_dataset=data)
    trainer.train()

Nothing else of the package imports this, since it needs Transformers (``pip install
torchgpipe[transformers]``).
"""

from torchgpipe.transformers.trainer import pipelined

__all__ = ["pipelined"]
