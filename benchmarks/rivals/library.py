"""The process of a rival: it imports the rival's library, and answers requests of the parent.

:mod:`benchmarks.rivals.processes` starts
``python -m benchmarks.rivals.library NAME FOLDER DEVICE COUNT THREADS``. Requests and answers are
lines of JSON on stdin and stdout; the library's own output goes to stderr.
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
    """A pipeline library in this process, and its devices.

    Args:
        wrap: ``wrap(layers, balance, devices=, chunks=, checkpoint=)`` makes the pipeline.
        devices: one for each possible partition.
        testing: the module that made the devices, if they are virtual.
    """

    wrap: Callable[..., nn.Module]
    devices: list[torch.device]
    testing: Any = None


#: Module and class of each library's pipeline, and the module in which it names CUDA streams. Ours
#: names none, and this module of ours is for pickles of 0.0.7.
PIPELINES = {
    "torchgpipe": ("torchgpipe", "GPipe", "torchgpipe.stream"),
    "fairscale": ("fairscale.nn", "Pipe", "fairscale.nn.pipe.stream"),
}


def load(name: str, folder: Path, device: str, count: int) -> Library:
    """Import a library from a folder.

    Virtual accelerators are those of this checkout, for every rival. If a library names CUDA
    streams, :mod:`benchmarks.rivals.streams` replaces its module of streams.

    Raises:
        RuntimeError: Python imported the library from elsewhere.
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
        if source.exists() and "torch.cuda" in source.read_text(encoding="utf-8"):
            sys.modules[stream] = streams
    module = importlib.import_module(package)
    if not Path(module.__file__ or "").resolve().is_relative_to(folder.resolve()):
        raise RuntimeError(f"another {package} was imported (folder: {folder}, module: {module})")
    return Library(getattr(module, wrapper), devices, testing)


#: Modules of this checkout's package. The virtual accelerators need them until the process ends.
KEPT: list[Any] = []


def serve(library: Library, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more.

    ``{"make": "module:Class", "arguments": {…}}`` makes an object, with the library as its first
    argument; ``{"call": "method", "arguments": {…}}`` calls a method of the object, and
    ``{"drop": true}`` frees it and its memory. An answer is ``{"value": …}`` or
    ``{"error": traceback}``.
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
    """Load the library, confirm that in the first answer, and serve requests."""
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
    # Skip the usual end of Python, which would wait for threads of fairscale's Pipe in vain.
    os._exit(0)


if __name__ == "__main__":
    main()
