"""The models of the papers, each a flat nn.Sequential that GPipe can cut at any layer.

What a layer hands to a later one goes through :mod:`torchgpipe.skip`, and what it hands to the next
one is a tensor or a tuple of tensors. Nothing is used that torchgpipe 0.0.7 does not have, so the
same models can be wrapped by it, in a process where ``torchgpipe`` is 0.0.7.
"""

from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.gpt import gpt
from benchmarks.models.resnet import resnet, resnet101, usual_name
from benchmarks.models.unet import unet

__all__ = ["amoebanetd", "gpt", "resnet", "resnet101", "unet", "usual_name"]
