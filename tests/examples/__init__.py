"""The examples, at tiny size."""

#: What a package raises that is missing, or does not load: timm, Lightning and Transformers import
#: torchvision if it is there, which raises RuntimeError if it was built for another torch.
BROKEN = (ImportError, RuntimeError)
