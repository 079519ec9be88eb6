"""Metadata of torchgpipe; how it is built stands in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "torchgpipe/__init__.py").read_text())
assert version is not None

benchmarks = ["pillow", "scikit-learn", "tqdm"]
demo = ["scikit-learn", "tqdm"]
examples = ["accelerate", "lightning", "safetensors", "transformers"]
# Not among all: it needs torchvision, which has to be made for the very build of torch.
timm = ["timm"]
test = ["expecttest", "hypothesis", "peft", "pytest"]
test += [f'{name}; python_version >= "3.11"' for name in ("datasets", "trl")]
check = ["mypy", "pre-commit", "ruff"]
# Not among all either: only `make coverage` and `make dist` use them.
coverage = ["coverage[toml]"]
dist = ["build", "twine"]
# Neither are those of `make docs`.
transformers = ["accelerate", "transformers"]
# The versions with which TRL's trainers were tried.
trl = [*transformers, "datasets>=5.2", "peft>=0.21", "trl>=1.16"]
# The documentation of torchgpipe.transformers is read from the module, which needs them.
docs = [*transformers, *benchmarks, "furo", "myst-parser", "sphinx"]

setup(
    name="torchgpipe",
    version=version[1],
    description="Pipeline parallelism with micro-batches and checkpointing (GPipe) for PyTorch",
    long_description=(here / "README.rst").read_text(encoding="utf-8"),
    long_description_content_type="text/x-rst",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    keywords="pytorch pipeline-parallelism gpipe checkpointing micro-batches",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["torchgpipe", "torchgpipe.*"]),
    package_data={"torchgpipe": ["py.typed", "testing/csrc/*"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11"],
    extras_require={
        "benchmarks": benchmarks,
        "demo": demo,
        "examples": examples,
        "timm": timm,
        "test": test,
        "check": check,
        "coverage": coverage,
        "dist": dist,
        "docs": docs,
        "transformers": transformers,
        "trl": trl,
        "all": benchmarks + demo + examples + test + check,
    },
)
