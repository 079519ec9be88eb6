"""Models, most of them of the papers, each a flat nn.Sequential that GPipe can cut at any layer.

A layer hands the next one a tensor or a tuple of tensors; for a later layer it stashes a skip, by
:mod:`torchgpipe.skip`. The models use only names that torchgpipe 0.0.7 has too, so that 0.0.7 can
wrap them in a process where it is ``torchgpipe``.
"""

from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.gpt import gpt
from benchmarks.models.resnet import resnet, resnet101, usual_name
from benchmarks.models.unet import unet

__all__ = ["amoebanetd", "gpt", "resnet", "resnet101", "unet", "usual_name"]
