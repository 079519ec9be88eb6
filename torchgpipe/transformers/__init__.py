"""Trainers and models of Hugging Face Transformers, trained by pipeline parallelism.

::

    from torchgpipe.transformers import pipelined

    trainer = pipelined(Trainer)(model=model, args=args, train_dataset=data, devices=4, chunks=8)
    trainer.train()

:func:`loss_of` gives the loss of a mini-batch in a loop of your own. :func:`layers_of` makes an
:class:`nn.Sequential` of a causal model, for the other wrappers.

Nothing else of the package imports this, but for a call of :meth:`MappedGPipe.verify`, since it
needs Transformers (in a clone of torchgpipe: ``pip install '.[transformers]'``; ``'.[trl]'`` brings
TRL, too).
"""

# Transformers is imported before the modules below need it, so that the error says what to install.
try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "torchgpipe.transformers needs Transformers (not installed: transformers); run in a clone: "
        "pip install '.[transformers]'"
    ) from error

from torchgpipe.transformers.idleness import PipelineCallback
from torchgpipe.transformers.model_call import loss_of
from torchgpipe.transformers.sequential import layers_of
from torchgpipe.transformers.trainer import pipelined

__all__ = ["PipelineCallback", "layers_of", "loss_of", "pipelined"]
