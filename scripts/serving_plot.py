"""The plot of a serving benchmark, as SVG: throughput and inter-token latency over concurrency."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 48
COLORS = ("#0b6e99", "#d1495b", "#3a7d44", "#8e5ea2", "#b07d12", "#555555")
TICKS = 5

Run = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of a panel: a value a level, None where there is none."""

    values: list[float | None]
    color: str
    dashed: bool = False


def plot(runs: Sequence[Run], title: str) -> str:
    """An SVG document with two panels, a colour an endpoint; ITL has its p99 dashed."""
    names = list(dict.fromkeys(run["endpoint"] for run in runs))
    levels = sorted({run["max_concurrency"] or math.inf for run in runs})
    at = {(run["endpoint"], run["max_concurrency"] or math.inf): run for run in runs}

    def lines(key: str, *, dashed: bool = False) -> list[Line]:
        return [
            Line(
                [at.get((name, level), {}).get(key) for level in levels],
                COLORS[i % len(COLORS)],
                dashed,
            )
            for i, name in enumerate(names)
        ]

    labels = ["no limit" if level == math.inf else str(level) for level in levels]
    throughput = _panel("output tokens/s", labels, lines("output_throughput"))
    latency = _panel(
        "inter-token latency, ms (median; p99 dashed)",
        labels,
        lines("median_itl_ms") + lines("p99_itl_ms", dashed=True),
    )
    width, height = 2 * WIDTH, HEIGHT + 56
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>\n'
        f'<g transform="translate(0 24)">\n{throughput}</g>\n'
        f'<g transform="translate({WIDTH} 24)">\n{latency}</g>\n'
        f"{legend(names, HEIGHT + 44)}</svg>\n"
    )


def _panel(heading: str, labels: Sequence[str], lines: Sequence[Line]) -> str:
    top = nice_limit(max([value for line in lines for value in line.values if value], default=1.0))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(i: int) -> float:
        return LEFT + inner_width * (i + 0.5) / len(labels)

    def y(value: float) -> float:
        return TOP + inner_height * (1 - value / top)

    out = [f'<text x="{LEFT}" y="{TOP - 12}">{escape(heading)}</text>']
    for i in range(TICKS + 1):
        value = top * i / TICKS
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for i, label in enumerate(labels):
        out.append(
            f'<text x="{x(i):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    out.append(
        f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        "requests at once</text>"
    )
    out += [_drawn(line, x, y) for line in lines]
    return "\n".join(out) + "\n"


def _drawn(line: Line, x: Callable[[int], float], y: Callable[[float], float]) -> str:
    points = [(x(i), y(value)) for i, value in enumerate(line.values) if value is not None]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{line.color}"/>' for a, b in points
    )
    return f'<polyline points="{path}" fill="none" stroke="{line.color}"{dash}/>{dots}'


def legend(names: Sequence[str], y: int) -> str:
    """A coloured square and a name for each line, in a row whose text stands on `y`."""
    out, x = "", LEFT
    for i, name in enumerate(names):
        color = COLORS[i % len(COLORS)]
        out += (
            f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{color}"/>'
            f'<text x="{x + 15}" y="{y}">{escape(name)}</text>\n'
        )
        x += 32 + 7 * len(name)
    return out


def nice_limit(value: float) -> float:
    """The least of 1, 2, 2.5, 5, 10 times a power of ten that is at least `value` > 0."""
    power = float(10 ** math.floor(math.log10(value)))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * (1 - 1e-9))
