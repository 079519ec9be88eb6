"""Virtual time: costs of work, and waits between streams."""

import json
import queue
import threading

import pytest
import torch

from tests.virtual.programs import new_streams, one, place, read
from torchgpipe.testing import Busy, Stream, Transfers, Wait, observe

DEFAULT = Stream(0, 0)


def run_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def times(seen):
    return [(span.name, span.start, span.end) for span in seen.spans]


def test_nothing_takes_time_by_itself(devices):
    x = one(devices[0])
    with observe() as seen:
        x.add_(1).to(devices[1]).cpu()
    assert seen.makespan == 0
    assert seen.spans == seen.waits == seen.critical_path == []
    assert seen.busy == seen.idle == {}


def test_costs(devices):
    x = one(devices[0])
    with observe(costs={"addmm": 2.0, "aten::fill_": 0.5, "copy_": 0.25, "neg": 0}) as seen:
        torch.nn.functional.linear(
            torch.ones(2, 4, device=devices[0]), one(devices[0], 12).view(3, 4), x[:3]
        )
        x.fill_(1)
        x.neg()
    assert [(span.name, span.end - span.start) for span in seen.spans if span.name != "fill_"] == [
        ("addmm", 2.0)
    ]
    assert times(seen)[-1] == ("fill_", seen.makespan - 0.5, seen.makespan)


def test_busy_layer(devices):
    layer = Busy(1.0, 2.0, 4.0, features=4, name="7").to(devices[0])
    x = one(devices[0])
    with observe() as seen:
        layer(x.detach().requires_grad_()).sum().backward()
    assert times(seen) == [("F7", 0, 1), ("I7", 1, 3), ("W7", 3, 7)]
    with observe() as seen:
        layer(x).sum().backward()
    assert times(seen) == [("F7", 0, 1), ("W7", 1, 5)]
    with observe() as seen:
        y = layer.requires_grad_(False)(x.requires_grad_())
        assert seen.makespan == 1
        y.sum().backward()
    assert times(seen) == [("F7", 0, 1), ("I7", 1, 3)]
    with observe() as seen, torch.no_grad():
        layer(x)
    assert times(seen) == [("F7", 0, 1)]


@pytest.mark.parametrize("where", ["cpu", "virtual:2"])
def test_busy_layer_computes(devices, where):
    layer = Busy(features=3).to(where)
    x = torch.rand(2, 3, device=where, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, x * layer.weight)
    assert torch.equal(x.grad, layer.weight.expand(2, 3))
    assert torch.equal(layer.weight.grad, x.sum(0))
    # Not on the host: it is no stream.
    with observe() as seen:
        layer(x)
    assert seen.makespan == (0 if where == "cpu" else 1)


def test_copies(devices):
    x = one(devices[0], 100)
    links = {(0, 1): 400, (1, 0): 100, (1, "cpu"): 200, ("cpu", 2): 50}
    with observe(bandwidth=links, costs={"copy_": 9.0}) as seen:
        y = x.to(devices[1])
        y.cpu().to(devices[2])[:50].to(devices[3])
    assert times(seen) == [
        ("copy to virtual:1", 0, 1),
        ("copy to cpu", 1, 3),
        ("copy to virtual:2", 3, 11),
        # This link is not named: as other operators.
        ("copy_", 11, 20),
    ]
    # On the source's streams, where it is a device.
    assert [span.stream.device for span in seen.spans] == [0, 1, 2, 2]
    assert seen.transfers == {
        (0, 1): Transfers(1, 400),
        (1, "cpu"): Transfers(1, 400),
        ("cpu", 2): Transfers(1, 400),
        (2, 3): Transfers(1, 200),
    }


def test_devices_share_a_link(devices):
    """The copy that was issued later takes the time that the other one leaves."""
    pinned = torch.empty(3, 100, pin_memory=True)
    streams = [torch.Stream(device) for device in devices[:3]]
    data = [one(device, 100) for device in devices[:3]]
    with observe(bandwidth={((0, 1), "cpu"): 400, (2, "cpu"): 400}) as seen:
        for k, start in ((0, 1.0), (1, 0.5), (2, 0.5)):
            with streams[k]:
                read(data[k], "a", start)
                pinned[k].copy_(data[k], non_blocking=True)
        with streams[0]:
            pinned[0].copy_(data[0], non_blocking=True)
    copies = [(x.stream.device, x.start, x.end) for x in seen.spans if x.name == "copy to cpu"]
    # Half of it goes before the copy of device 0.
    assert copies == [(0, 1, 2), (1, 0.5, 2.5), (2, 0.5, 1.5), (0, 2.5, 3.5)]


def test_wait(devices):
    x = one(devices[0])
    s, t = new_streams(devices[0], 2)
    with observe() as seen:
        with s:
            read(x, "a", 3)
        with t:
            read(x, "b", 1)
            t.wait_stream(s)
            read(x, "c", 2)
        # Nobody waits for work that an earlier wait has ordered.
        s.wait_stream(t)
        t.wait_stream(s)
        with t:
            read(x, "d", 1)
    assert times(seen) == [("a", 0, 3), ("b", 0, 1), ("c", 3, 5), ("d", 5, 6)]
    assert seen.waits == [Wait(place(t), start=1, end=3, span=2, cause=0)]
    assert [span.name for span in seen.critical_path] == ["a", "c", "d"]
    assert seen.idle == {place(s): 3, place(t): 2}


def test_wait_of_one_thread_delays_no_other(devices):
    x = one(devices[0])
    s, t, u = new_streams(devices[0], 3)

    def work():
        with s:
            read(x, "a", 3)
        s.synchronize()
        with t:
            read(x, "b", 1)

    with observe() as seen:
        run_threads(work)
        with u:
            read(x, "c", 1)
    assert times(seen) == [("a", 0, 3), ("b", 3, 4), ("c", 0, 1)]


def test_wait_of_the_observer_delays_the_work_it_gives_to_others(devices):
    x, y = one(devices[0]), one(devices[1])
    with observe() as seen:
        read(x, "a", 3)
        torch.accelerator.synchronize(devices[0])
        run_threads(lambda: read(y, "b", 1))
    assert times(seen) == [("a", 0, 3), ("b", 3, 4)]
    assert seen.waits == [Wait(Stream(1, 0), 0, 3, 1, 0)]


def test_events_tell_the_time(devices):
    x = one(devices[0])
    start, end = (torch.Event(enable_timing=True, device=devices[0]) for _ in range(2))
    with observe():
        read(x, "a", 1.5)
        start.record()
        read(x, "b", 2.25)
        end.record()
        assert start.elapsed_time(end) == 2.25
        assert start.query()


def test_observation_begins_at_zero(devices):
    x, s = one(devices[0]), torch.Stream(device=devices[0])
    with observe():
        read(x, "a", 5)
        event = torch.accelerator.current_stream(devices[0]).record_event()
        event.synchronize()
    read(x, "between", 7)
    with observe() as seen:
        # An event of before is no news.
        s.wait_event(event)
        with s:
            read(x, "b", 1)
        event.synchronize()
        read(x, "c", 2)
    assert times(seen) == [("b", 0, 1), ("c", 0, 2)]
    assert seen.makespan == 2
    assert seen.waits == []


def test_trace(devices, tmp_path):
    x = one(devices[1])
    s = torch.Stream(device=devices[1])
    with observe(bandwidth={(0, 1): 8}) as seen:
        one(devices[0]).to(devices[1])
        s.wait_stream(torch.accelerator.current_stream(devices[0]))
        with s:
            read(x, 'a "quoted" name', 1.5)
    seen.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of = {ph: [event for event in events if event["ph"] == ph] for ph in "MXsf"}
    assert len(events) == sum(map(len, of.values()))
    names = [(event["name"], event["pid"], event["args"]["name"]) for event in of["M"]]
    assert names == [
        ("process_name", 0, "virtual:0"),
        ("process_name", 1, "virtual:1"),
        ("thread_name", 0, "stream 0"),
        ("thread_name", 1, f"stream {s.stream_id}"),
    ]
    copy, work = of["X"]
    assert (copy["name"], copy["ts"], copy["dur"]) == ("copy to virtual:1", 0, 2000)
    assert (work["name"], work["ts"], work["dur"]) == ('a "quoted" name', 2000, 1500)
    assert (work["pid"], work["tid"]) == (1, s.stream_id)
    (tail,), (head,) = of["s"], of["f"]
    assert tail["id"] == head["id"]
    assert (tail["pid"], tail["tid"], head["pid"], head["tid"]) == (0, 0, 1, s.stream_id)
    # Within the slices that it connects.
    assert copy["ts"] < tail["ts"] < copy["ts"] + copy["dur"]
    assert head["ts"] == work["ts"]
    assert head["bp"] == "e"


def test_jitter_changes_nothing_that_is_fixed(devices):
    x, y = one(devices[0]), one(devices[1])

    def run(jitter):
        x.fill_(1)
        y.fill_(1)
        events = queue.SimpleQueue()
        with observe(jitter=jitter) as seen:

            def first():
                for _ in range(10):
                    read(x, "a", 2)
                    x.mul_(2)
                    events.put(torch.accelerator.current_stream(devices[0]).record_event())

            def second():
                for _ in range(10):
                    torch.accelerator.current_stream(devices[1]).wait_event(events.get())
                    read(y, "b", 3)
                    y.mul_(2).add_(1)

            run_threads(first, second)
        return seen.makespan, seen.busy, len(seen.waits), len(seen.races), x.tolist(), y.tolist()

    expected = 32, {DEFAULT: 20, Stream(1, 0): 30}, 1, 0, [2.0**10] * 4, [2.0**11 - 1] * 4
    assert [run(seed) for seed in (None, 0, 1, 2)] == [expected] * 4


def test_jitter_shows_what_is_not_fixed(devices):
    x = one(devices[0])

    def order(seed):
        with observe(jitter=seed) as seen:
            run_threads(*(lambda name=name: [read(x, name, 1) for _ in range(30)] for name in "ab"))
        return "".join(span.name for span in seen.spans)

    orders = {order(seed) for seed in range(8)}
    assert len(orders) > 1
    assert all(order.count("a") == order.count("b") == 30 for order in orders)


@pytest.mark.parametrize("cost", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["forward", "input", "weight"])
def test_wrong_costs_of_a_busy_layer(name, cost):
    with pytest.raises(ValueError, match=f"times in milliseconds .*{name}: {cost}"):
        Busy(**{name: cost})


def test_in_place_or_not_an_operator_has_one_cost(devices):
    x = torch.ones(3, device=devices[0])
    with observe(costs={"add": 1.0, "mul_": 2.0, "fill": 4.0, "aten::copy_": 8.0}) as seen:
        x += 1
        x + 1
        x.mul_(2)
        x * 2
        x.fill_(0)
        x.clone()
    assert [span.end - span.start for span in seen.spans] == [1, 1, 2, 2, 4, 8]
