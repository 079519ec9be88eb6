"""The process of a rival: it imports the rival's library, and answers requests of the parent.

:mod:`benchmarks.rivals.processes` starts
``python -m benchmarks.rivals.library FOLDER DEVICE COUNT THREADS``. Requests and answers are
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


def load(folder: Path, device: str, count: int) -> Library:
    """Import torchgpipe from a folder.

    Virtual accelerators are those of this checkout, for every rival. Where ``torchgpipe.stream``
    names CUDA streams, as that of 0.0.7 does, :mod:`benchmarks.rivals.streams` replaces it.

    Raises:
        RuntimeError: Python imported torchgpipe from elsewhere.
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
    if device == "virtual":
        source = folder / "torchgpipe" / "stream.py"
        if source.exists() and "torch.cuda" in source.read_text(encoding="utf-8"):
            sys.modules["torchgpipe.stream"] = streams
    module = importlib.import_module("torchgpipe")
    if not Path(module.__file__ or "").resolve().is_relative_to(folder.resolve()):
        raise RuntimeError(f"another one was imported (folder: {folder}, module: {module})")
    return Library(module.GPipe, devices, testing)


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
    folder, device, count, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    try:
        library = load(Path(folder), device, int(count))
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
    else:
        print(json.dumps({"value": None}), file=answers, flush=True)
        gc.collect()
        gc.freeze()
        serve(library, sys.stdin, answers)


if __name__ == "__main__":
    main()
