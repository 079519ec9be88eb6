"""What runs in the process of a rival: its library, and the requests of the parent.

``python -m benchmarks.rivals.library NAME FOLDER DEVICE COUNT THREADS`` is started by
:mod:`benchmarks.rivals.processes`. Requests and answers are lines of JSON on stdin
and stdout; what a library prints goes to stderr.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from benchmarks.rivals import streams


@dataclass(frozen=True)
class Library:
    """A pipeline library in this process, and the devices that it may use.

    Args:
        wrap: ``wrap(layers, balance, devices=, chunks=, checkpoint=)`` makes the pipeline.
        devices: one for each partition that there can be.
        testing: what made the devices, if they are virtual.
    """

    wrap: Callable[..., nn.Module]
    devices: list[torch.device]
    testing: Any = None


#: Each name with the module and the class of the pipeline, and its module of streams.
PIPELINES = {
    "torchgpipe": ("torchgpipe", "GPipe", "torchgpipe.devices.streams"),
    "fairscale": ("fairscale.nn", "Pipe", "fairscale.nn.pipe.stream"),
}


def load(name: str, folder: Path, device: str, count: int) -> Library:
    """Imports a library from a folder.

    On virtual devices, the accelerators are those of this checkout for every rival. A library that
    names streams of CUDA gets ours (:mod:`benchmarks.rivals.streams`) instead.

    Raises:
        RuntimeError: it was imported from elsewhere.
    """
    devices = [torch.device("cpu")] * count
    testing: Any = None
    if device == "virtual":
        from torchgpipe import testing

        devices = testing.load(count)
        for loaded in [x for x in sys.modules if x.partition(".")[0] == "torchgpipe"]:
            KEPT.append(sys.modules.pop(loaded))
    elif device == "cuda":
        available = torch.cuda.device_count()
        devices = [torch.device("cuda", i % available) for i in range(count)]
    sys.path.insert(0, str(folder))
    package, wrapper, stream = PIPELINES[name]
    if device == "virtual":
        source = folder.joinpath(*stream.split(".")).with_suffix(".py")
        if "torch.cuda" in source.read_text(encoding="utf-8"):
            sys.modules[stream] = streams
    module = importlib.import_module(package)
    if not Path(module.__file__ or "").resolve().is_relative_to(folder.resolve()):
        raise RuntimeError(f"another {package} was imported (folder: {folder}, module: {module})")
    return Library(getattr(module, wrapper), devices, testing)


#: Modules that made the virtual accelerators, which live as long as the process.
KEPT: list[Any] = []


def serve(library: Library, requests: TextIO, answers: TextIO) -> None:
    """Answers requests until there are no more.

    ``{"make": "module:Class", "arguments": {…}}`` makes the object that ``{"call": "method",
    "arguments": {…}}`` then calls; it is given the library first. ``{"drop": true}`` lets go of it,
    and of its memory. An answer is ``{"value": …}`` or ``{"error": traceback}``.
    """
    subject: Any = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any] = {"value": None}
        try:
            if "drop" in request:
                subject = None
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
            elif "make" in request:
                subject = None
                gc.collect()
                module, _, name = request["make"].partition(":")
                subject = getattr(importlib.import_module(module), name)(
                    library, **request["arguments"]
                )
            else:
                answer["value"] = getattr(subject, request["call"])(**request["arguments"])
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Loads the library, says so in the first answer, and serves."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, folder, device, count, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    try:
        library = load(name, Path(folder), device, int(count))
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
    else:
        print(json.dumps({"value": None}), file=answers, flush=True)
        gc.collect()
        gc.freeze()
        serve(library, sys.stdin, answers)
    # Without the usual end of Python, in which threads of fairscale's Pipe are waited for in vain.
    os._exit(0)


if __name__ == "__main__":
    main()
