"""The arithmetic of `bench_kernels`: rates, shares and errors, as a table and as a plot."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from scripts.kernel_cases import PEERS, Case, case_of
from scripts.serving_plot import COLORS, legend, nice_limit

__all__ = ["Row", "plot", "rows", "summary", "table"]

Result = dict[str, Any]
"""Of one step: "case", "variant", and "times" in seconds with "error", or "failed"."""

COMPUTE = ("gemm", "prefill")
"""Groups that arithmetic bounds: their rate is in flops, the others' in bytes."""
ERROR_LIMIT = 1.5
"""Of our error over the peer's."""


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        rates: flops or bytes a second by variant, for those that ran.
        errors: largest error over the largest value wanted, by variant.
        failed: what went wrong, by variant.
    """

    case: Case
    rates: dict[str, float]
    errors: dict[str, float]
    failed: dict[str, str]

    @property
    def best(self) -> str | None:
        """Our fastest variant whose error is no larger than it may be."""
        ours = [v for v in self.rates if v not in PEERS and self.exact(v)]
        return max(ours, key=self.rates.__getitem__, default=None)

    @property
    def peer(self) -> str | None:
        """The fastest peer."""
        return max(set(PEERS) & self.rates.keys(), key=self.rates.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """Our best rate over the fastest peer's."""
        if self.best is None or self.peer is None:
            return None
        return self.rates[self.best] / self.rates[self.peer]

    def exact(self, variant: str) -> bool:
        """Whether the error is at most that of the fastest peer times `ERROR_LIMIT`; without a
        peer, 2 %."""
        limit = self.errors[self.peer] * ERROR_LIMIT if self.peer is not None else 2e-2
        return self.errors[variant] <= limit


def rows(results: Sequence[Result]) -> list[Row]:
    """One row a case, in the order in which the cases came."""
    found: dict[Case, Row] = {}
    for result in results:
        case = case_of(result["case"])
        row = found.setdefault(case, Row(case, {}, {}, {}))
        name = result["variant"]["name"]
        if "failed" in result:
            row.failed[name] = result["failed"]
            continue
        work = case.flops if case.group in COMPUTE else case.nbytes
        row.rates[name] = work / statistics.median(result["times"])
        row.errors[name] = result["error"]
    return list(found.values())


def ceilings(found: Sequence[Row], read_bandwidth: float | None) -> dict[str, float | None]:
    """The most that a group could reach in this run, in its unit.

    Of what arithmetic bounds: the best rate of a peer at any of the group's cases; of what streams:
    the best of anybody's copies; of the others: the read bandwidth.
    """
    out: dict[str, float | None] = {}
    for group in {row.case.group for row in found}:
        mine = [row for row in found if row.case.group == group]
        peers = [row.rates[row.peer] for row in mine if row.peer is not None]
        copies = [rate for row in mine if row.case.name == "copy" for rate in row.rates.values()]
        out[group] = max(peers if group in COMPUTE else copies, default=None)
        if group not in COMPUTE and not copies:
            out[group] = read_bandwidth
    return out


def summary(found: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By group: cases, how many could be compared, least and geometric mean of the ratios."""
    out: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(row.case.group for row in found):
        mine = [row for row in found if row.case.group == group]
        ratios = [row.ratio for row in mine if row.ratio is not None]
        out[group] = {
            "cases": len(mine),
            "compared": len(ratios),
            "failed": sum(bool(row.failed) for row in mine),
            "least_ratio": round(min(ratios), 4) if ratios else None,
            "mean_ratio": round(statistics.geometric_mean(ratios), 4) if ratios else None,
        }
    return out


def table(found: Sequence[Row], read_bandwidth: float | None) -> str:
    """A Markdown table a group."""
    tops = ceilings(found, read_bandwidth)
    out: list[str] = []
    for group in dict.fromkeys(row.case.group for row in found):
        mine = [row for row in found if row.case.group == group]
        names = list(dict.fromkeys(v for row in mine for v in (*row.rates, *row.failed)))
        out += [
            f"## {group}, {'TFLOP/s' if group in COMPUTE else 'TB/s'}",
            "",
            f"| case | {' | '.join(names)} | ours / peer | of the ceiling | error / peer's |",
            f"|---|{'---|' * (len(names) + 3)}",
            *(_line(row, names, tops[group]) for row in mine),
            "",
        ]
    return "\n".join(out)


def _line(row: Row, names: Sequence[str], ceiling: float | None) -> str:
    cells = [_rate(row, name) for name in names]
    best = row.best
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    share = "" if best is None or ceiling is None else f"{row.rates[best] / ceiling:.1%}"
    error = ""
    if best is not None and row.peer is not None and row.errors[row.peer]:
        error = f"{row.errors[best] / row.errors[row.peer]:.2f}"
    return f"| {row.case.label} | {' | '.join(cells)} | {ratio} | {share} | {error} |"


def _rate(row: Row, name: str) -> str:
    if name in row.failed:
        return "failed"
    if name not in row.rates:
        return ""
    wrong = "" if name in PEERS or row.exact(name) else " (wrong)"
    return f"{row.rates[name] / 1e12:.4g}{wrong}"


# -- the plot ------------------------------------------------------------------------------------

_BAR, _GAP, _LEFT, _RIGHT, _PLOT = 9, 12, 190, 60, 420


def plot(found: Sequence[Row], title: str) -> str:
    """An SVG document: bars of the rates of every case, a colour a variant."""
    names = list(dict.fromkeys(name for row in found for name in row.rates))
    top = {
        group: nice_limit(max(rate for row in found if row.case.group == group
                              for rate in row.rates.values()))
        for group in {row.case.group for row in found if row.rates}
    }  # fmt: skip
    y, body = 56.0, ""
    for row in found:
        if not row.rates:
            continue
        height = _BAR * len(row.rates)
        body += (
            f'<text x="{_LEFT - 8}" y="{y + height / 2 + 4:.1f}" text-anchor="end">'
            f"{escape(f'{row.case.group} {row.case.label}')}</text>\n"
        )
        for i, (name, rate) in enumerate(row.rates.items()):
            width = _PLOT * rate / top[row.case.group]
            color = COLORS[names.index(name) % len(COLORS)]
            at = y + i * _BAR
            body += (
                f'<rect x="{_LEFT}" y="{at:.1f}" width="{width:.1f}" height="{_BAR - 1}" '
                f'fill="{color}"/><text x="{_LEFT + width + 4:.1f}" y="{at + 8:.1f}" '
                f'font-size="9">{rate / 1e12:.4g}</text>\n'
            )
        y += height + _GAP
    width, height = _LEFT + _PLOT + _RIGHT, math.ceil(y) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="16" y="20" font-size="14" font-weight="bold">{escape(title)}</text>\n'
        f"{legend(names, 40)}{body}</svg>\n"
    )
