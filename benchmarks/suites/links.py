"""Links between the workers of a pipeline: what they carry, and how fast they have to be, on paper.

A decoder-only Transformer grows with its workers: each worker has the same layers. The formulae are
those of ``benchmarks/simulate/links.py``. The simulator of schedules tells how long a step takes if
copies take the time of their bytes over a link. The simulator lets a link carry any number of
copies at once. So the suite also simulates links that send one message after another, and these are
the figures of the tables.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.command import at_least, output, parser
from benchmarks.progress import progress
from benchmarks.report.files import Result, head, publish
from benchmarks.report.summary import Summary, Table
from benchmarks.simulate.links import Decoder, highest, makespans, messages
from torchgpipe.schedule import named

#: Bytes a second, in one direction.
LINKS = {
    "NVLink": 300e9,
    "400 Gb/s": 50e9,
    "100 Gb/s": 12.5e9,
    "25 Gb/s": 3.125e9,
    "10 Gb/s": 1.25e9,
    "1 Gb/s": 0.125e9,
}
SCHEDULES = (
    "fill_drain",
    "1f1b",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
)

#: Workers, and micro-batches of a step; with 512 workers, more of them would take too long.
SETTINGS = ("8x32", "64x256", "64x128", "512x1024")

#: Times of a copy, in forwards, at which the simulator looks for the limit.
SEARCHED = tuple(0.03 * 1.5**k for k in range(10))

#: Share of a step that copies may cost.
LOSS = 0.05

Row = dict[str, Any]


def main(argv: Sequence[str]) -> None:
    """Simulate and publish."""
    options = parsed(argv)
    decoder = Decoder(options.width, options.layers, options.length, options.rows)
    result = head("links", argv, decoder=asdict(decoder), links=LINKS, loss=LOSS)
    settings = [(*sizes, name) for sizes in options.settings for name in options.schedules]
    rows = [measure(decoder, *x) for x in progress(settings, "links", "schedule")]
    publish(output(options, "links"), result, rows, summarise)


def parsed(argv: Sequence[str]) -> Namespace:
    """Parse the options."""
    options = parser("links", __doc__)
    options.add_argument("--settings", type=sizes, nargs="+", default=[*map(sizes, SETTINGS)])
    options.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    for name, value in asdict(Decoder()).items():
        if name in ("width", "layers", "length", "rows"):
            options.add_argument(f"--{name}", type=at_least(1), default=value)
    return options.parse_args(argv)


def sizes(text: str) -> tuple[int, int]:
    """Parse workers and micro-batches, such as ``8x32``."""
    workers, _, m = text.partition("x")
    return int(workers), int(m)


def measure(decoder: Decoder, workers: int, m: int, name: str) -> Row:
    """Simulate a schedule with free copies and over each link, and find the slowest link."""
    schedule = named(name, workers, m)
    copies = sorted({0.0, *map(decoder.copy, LINKS.values()), *SEARCHED})
    simulated, queued = makespans(schedule, copies)
    free = queued[0]
    places = {link: copies.index(decoder.copy(x)) for link, x in LINKS.items()}
    return {
        "workers": workers,
        "m": m,
        "schedule": name,
        "sent": messages(schedule),
        "free": free,
        "over": {link: queued[k] / free for link, k in places.items()},
        "simulated": {link: simulated[k] / free for link, k in places.items()},
        "enough": decoder.link(highest(copies, queued, free * (1 + LOSS))),
    }


def gigabits(link: float) -> str:
    """Write bytes a second as gigabits a second."""
    return f"{float(f'{8 * link / 1e9:.3g}'):g}"


def percent(ratio: float) -> str:
    """Write by how much a ratio exceeds 1."""
    share = 100 * (ratio - 1)
    return f"+{share:.1f}%" if share < 99.95 else f"x{ratio:.1f}"


def summarise(result: Result) -> Summary:
    """Tables of links, of steps, of data parallelism, and of the simulator's time."""
    rows, links, loss = result["rows"], result["links"], result["loss"]
    decoder = Decoder(**result["decoder"])
    return Summary(
        "Links between the workers of a pipeline, on paper",
        [
            carried(decoder, links),
            steps(rows, links, loss),
        ],
        f"**On paper**: nothing was measured. A worker has "
        f"{decoder.layers} layers of width {decoder.width}, and a micro-batch is {decoder.rows} x "
        f"{decoder.length} tokens of {decoder.size} bytes a number. A device does "
        f"{decoder.peak / 1e12:.0f} Tflop/s at its peak (an H100 in bfloat16), of which training "
        f"reaches {decoder.used:.0%} (assumed). The time until the first byte arrives is left out. "
        "A worker has one link of the given speed, which sends and receives at once, and sends one "
        "message after another. The simulator itself lets copies share a link without delay; a `*` "
        "marks where that makes its step more than 1% shorter. Efficiency: the share of a step in "
        "which a worker computes. The last column: the slowest link over which copies make a step "
        f"less than {loss:.0%} longer. Interleaved 1F1B and ZB-V have two stages per worker.",
    )


def carried(decoder: Decoder, links: dict[str, float]) -> Table:
    """Time of one message over each link."""
    lines = [
        [name, gigabits(x), f"{1e3 * decoder.message / x:.3g}", f"{decoder.copy(x):.3g}"]
        for name, x in links.items()
    ]
    caption = (
        f"A message has {decoder.message / 2**20:.0f} MiB, a forward of a worker "
        f"({decoder.parameters / 1e9:.2f} billion parameters) takes {1e3 * decoder.forward:.1f} ms:"
    )
    return Table(["link", "Gb/s", "ms a copy", "copy / F"], lines, caption)


def steps(rows: Sequence[Row], links: dict[str, float], loss: float) -> Table:
    """Time of a step over each link, over the step with free copies."""
    lines = []
    for row in rows:
        star = {x: "*" if row["over"][x] > 1.01 * row["simulated"][x] else "" for x in links}
        lines.append(
            [
                *(row["workers"], row["m"], row["schedule"], row["sent"] // row["m"]),
                f"{3 * row['m'] / row['free']:.1%}",
                *[percent(row["over"][x]) + star[x] for x in links],
                gigabits(row["enough"]),
            ]
        )
    columns = ["workers", "m", "schedule", "sends", "efficiency", *links, f"Gb/s for {loss:.0%}"]
    caption = (
        "`sends`: messages of a worker for each micro-batch. Efficiency with free copies; then how "
        "much longer a step takes over each link (x: how many times as long):"
    )
    return Table(columns, lines, caption)
