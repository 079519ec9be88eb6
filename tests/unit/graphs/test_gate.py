"""A gate lets one thread trace, or any number compute."""

import threading
import time

from tests.support.graphs import is_computing
from torchgpipe.graphs.gate import Gate


def test_nobody_computes_while_somebody_traces():
    gate, now, seen = Gate(), set(), []
    lock = threading.Lock()

    def work(k):
        for _ in range(50):
            with gate.tracing() if k == 0 else gate:
                with lock:
                    now.add(k)
                    seen.append(frozenset(now))
                time.sleep(0)
                with lock:
                    now.discard(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(seen) == 150
    assert not any(0 in some and len(some) > 1 for some in seen)


def test_tracing_within_tracing():
    gate = Gate()
    with gate.tracing(), gate.tracing():
        pass
    with gate, gate:
        pass
    with gate.tracing(), gate, gate.tracing(), gate:
        pass


def test_threads_that_begin_to_trace_while_they_compute():
    gate, both = Gate(), threading.Barrier(2)
    traced = []

    def work():
        with gate:
            both.wait(10)
            with gate.tracing():
                traced.append(True)
            assert is_computing(gate)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(traced) == 2
    assert not is_computing(gate)
