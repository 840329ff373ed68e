"""The plot of a load test, as SVG: memory and requests over time."""

from collections.abc import Sequence
from html import escape

from scripts.load_trend import Sample
from scripts.serving_plot import (
    BOTTOM,
    COLORS,
    HEIGHT,
    LEFT,
    RIGHT,
    TICKS,
    TOP,
    WIDTH,
    legend,
    nice_limit,
)

__all__ = ["plot"]

Line = list[tuple[float, float]]


def plot(samples: Sequence[Sample], title: str, warm_up: float) -> str:
    """An SVG document: memory in MB, requests in the batch and waiting; the warm-up is shaded."""
    memory = [
        [(s.seconds, s.memory / 1e6) for s in samples if s.memory is not None],
        [(s.seconds, s.heap / 1e6) for s in samples if s.heap is not None],
    ]
    counts = [
        [(s.seconds, s.state[name]) for s in samples if name in s.state]
        for name in ("running", "waiting")
    ]
    end = max([s.seconds for s in samples], default=1.0) or 1.0
    width, height = 2 * WIDTH, HEIGHT + 56
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>\n'
        f'<g transform="translate(0 24)">\n{_panel("MB", memory, end, warm_up)}'
        f"{legend(['server', 'its Python objects'], HEIGHT + 20)}</g>\n"
        f'<g transform="translate({WIDTH} 24)">\n{_panel("requests", counts, end, warm_up)}'
        f"{legend(['running', 'waiting'], HEIGHT + 20)}</g>\n</svg>\n"
    )


def _panel(heading: str, lines: Sequence[Line], end: float, warm_up: float) -> str:
    top = nice_limit(max([value for line in lines for _, value in line if value > 0], default=1.0))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + inner_width * seconds / end

    def y(value: float) -> float:
        return TOP + inner_height * (1 - value / top)

    out = [
        f'<rect x="{LEFT}" y="{TOP}" width="{x(min(warm_up, end)) - LEFT:.1f}" '
        f'height="{inner_height}" fill="#f0f0f0"/>',
        f'<text x="{LEFT}" y="{TOP - 12}">{escape(heading)}</text>',
    ]
    for i in range(TICKS + 1):
        value, at = top * i / TICKS, end * i / TICKS
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
            f'<text x="{x(at):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{at:.0f}</text>'
        )
    out.append(f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 10}">seconds</text>')
    for line, color in zip(lines, COLORS, strict=False):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
    return "\n".join(out) + "\n"
