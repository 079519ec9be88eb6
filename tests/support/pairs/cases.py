"""Computations of two processes together.

``run()`` has one pair do all of it, since torch takes long to import. A case is a function of the
process's rank, which raises if something is not as it should be.
"""

import datetime
import os
import tempfile
import traceback
from functools import partial
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from tests.support.fresh import METHOD, preload
from tests.support.helpers import MODES
from tests.support.pairs.models import (
    RANKS,
    plain,
    skips,
    tied,
    unused,
)
from tests.support.pairs.parallel import (
    SETTINGS,
    batch_norm,
    communicating,
    failing,
    parallel,
    random_numbers,
    uneven_shards,
    unused_by_default,
)
from tests.support.pairs.shards import sharded, tensor_parallel
from tests.support.size import rotated, some

# DistributedDataParallel imports the compiler.
preload("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")


def _named(function, **how):
    words = [x.__name__ if callable(x) else str(x) for x in how.values()]
    return " ".join([function.__name__, *words]), partial(function, **how)


CASES = dict(
    [
        *[
            _named(parallel, make=make, mode=mode, setting=setting)
            for make, mode, setting in [
                *rotated([plain], MODES, SETTINGS),
                *rotated([skips], MODES, ["default", "find unused", "static graph"]),
                *rotated([unused, tied], ["never", "always"], ["default", "static graph"]),
            ]
        ],
        *[
            _named(parallel, make=plain, mode=mode, setting="default", cap=25)
            for mode in some(MODES, MODES[:1])
        ],
        *[
            _named(function, mode=mode)
            for function, mode in rotated(
                [
                    random_numbers,
                    unused_by_default,
                    communicating,
                    uneven_shards,
                ],
                MODES,
            )
        ],
        *[
            _named(batch_norm, mode=mode, deferred=deferred)
            for mode, deferred in rotated(MODES, [False, True])
        ],
        _named(failing, mode="always"),
        _named(tensor_parallel, mode="always"),
        _named(sharded, mode="always", what="all"),
        *[
            _named(sharded, mode=mode, what=what, reshard_after_forward=reshard)
            for mode, (what, reshard) in rotated(
                # Whole parameters of the model have to stay until backward is over.
                MODES,
                [("layers", True), ("partitions and all", None), ("parent", None)],
            )
        ],
    ]
)


def work(rank, names, folder):
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/outcomes", RANKS)
    outcomes = {}
    failed = 0
    for k, name in enumerate(names):
        if k == 0 or failed:
            if k:
                distributed.destroy_process_group()
            distributed.init_process_group(
                "gloo",
                store=distributed.PrefixStore(str(k), store),
                rank=rank,
                world_size=RANKS,
                timeout=datetime.timedelta(seconds=20),
            )
        torch.manual_seed(0)
        outcome = ""
        try:
            CASES[name](rank)
        except BaseException:
            outcome = traceback.format_exc()
        outcomes[name] = outcome
        # Also where a process has left a case before the other one.
        store.set(f"{k} {rank}", outcome)
        found = [store.get(f"{k} {other}") for other in range(RANKS)]
        failed = any(found)
    torch.save(outcomes, f"{folder}/{rank}.pt")
    # Without waiting for threads of a group that failed.
    os._exit(0)


def run(names):
    """Run all cases; return the tracebacks of both processes, empty if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(work, (names, folder), RANKS, start_method=METHOD)
        both = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]
    return {name: [outcomes[name] for outcomes in both] for name in names}
