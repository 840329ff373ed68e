"""What `bench_decode` shows: a figure for people, a table of all of them, profiles as SVG."""

from collections.abc import Sequence
from html import escape
from typing import Any

from scripts.serving_plot import COLORS, legend, nice_limit

__all__ = ["figure", "profile_table", "profiles_svg", "table"]

Result = dict[str, Any]
"""One figure of `bench_decode`, as in its JSON."""

SHOWN_PARTS = 12


def figure(result: Result) -> str:
    """One figure as lines."""
    rows = [
        ("model", f"{result['model']} ({result['dtype']}, {result['load_format']} weights)"),
        ("device", result["device"]),
        ("prompt / new tokens", f"{result['prompt']} / {result['new']}"),
        ("decode", f"{result['tok_s']:.1f} tok/s"),
        ("time a token", f"{result['ms_per_token']:.3f} ms"),
        ("time to first token", f"{result['ttft_ms']:.1f} ms"),
        ("read a token", f"{result['bytes_per_token'] / 1e9:.3f} GB"),
        ("read bandwidth here", f"{result['read_bandwidth_gb_s']:.0f} GB/s"),
        ("share of it used", f"{100 * result['bandwidth_share']:.1f} %"),
        *_checked(result["checked"]),
    ]
    return "\n".join(f"{name:22s}{value}" for name, value in rows)


def _checked(checked: Result | None) -> list[tuple[str, str]]:
    if not checked:
        return [("tokens", "not checked")]
    counts = "{equal} equal, {ties} ties, {wrong} wrong of {positions}".format(**checked)
    rows = [
        ("tokens", f"{counts} ({checked['reference']})"),
        ("op by op", f"{checked['eager_equal']} of {checked['positions']} tokens the same"),
        ("error of the logits", _error(checked["logits_error"], checked["mean_error"])),
    ]
    if checked["peer"]:
        rows.append((f"of {checked['peer']}", _error(checked["peer_error"], checked["peer_mean"])))
    return rows


def _error(largest: float, mean: float) -> str:
    return f"{largest:.2e}, on average {mean:.2e}"


def table(results: Sequence[Result]) -> str:
    """A Markdown table, a line a figure."""
    lines = [
        "| model | prompt / new | tok/s | ms a token | TTFT ms | of the read bandwidth "
        "| equal / ties / wrong | op by op | logits error | error of transformers bf16 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        checked = result["checked"]
        cells = ["not checked", "", "", ""]
        if checked:
            peer = f"{checked['peer_error']:.2e}" if checked["peer"] else ""
            cells = [
                "{equal} / {ties} / {wrong}".format(**checked),
                f"{checked['eager_equal']} of {checked['positions']}",
                f"{checked['logits_error']:.2e}",
                peer,
            ]
        lines.append(
            f"| {result['model']} | {result['prompt']} / {result['new']} | {result['tok_s']:.1f} "
            f"| {result['ms_per_token']:.3f} | {result['ttft_ms']:.1f} "
            f"| {result['bandwidth_share']:.1%} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def profile_table(profile: Result) -> str:
    """A Markdown table of one profile: a line a kernel, the one that takes most of a step first."""
    lines = [
        "| kernel | a step | us | MB | us its bytes need | share | us a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in profile["parts"]:
        lines.append(
            f"| {part['kernel']} | {part['count']} | {part['us']:.2f} | {part['bytes'] / 1e6:.3f} "
            f"| {part['floor_us']:.2f} | {part['floor_us'] / part['us']:.0%} "
            f"| {part['step_us']:.1f} |"
        )
    floor = profile["floor_us"]
    for name, us in (("together", profile["sum_us"]), ("in one graph", profile["step_us"])):
        lines.append(f"| {name} | | | | {floor:.1f} | {floor / us:.0%} | {us:.1f} |")
    return "\n".join(lines)


# -- the plot ------------------------------------------------------------------------------------

_BAR, _ROW, _LEFT, _RIGHT, _PLOT = 14, 20, 290, 90, 420


def profiles_svg(results: Sequence[Result]) -> str:
    """An SVG document: for each profile bars of the time of a step that each kernel takes.

    The first part of a bar is what its bytes need at the bandwidth measured in the run.
    """
    names = ["its bytes at the read bandwidth", "the rest"]
    y, body = 64.0, ""
    for result in results:
        found = result["profile"]
        title = (
            f"{result['model']}, context {found['context']}: {found['step_us']:.0f} us a step, of "
            f"which its bytes need {found['floor_us']:.0f}"
        )
        body += f'<text x="16" y="{y:.0f}" font-weight="bold">{escape(title)}</text>\n'
        y += 10
        shown = found["parts"][:SHOWN_PARTS]
        top = nice_limit(max(part["step_us"] for part in shown))
        for part in shown:
            floor = min(part["step_us"], part["count"] * part["floor_us"])
            widths = [_PLOT * floor / top, _PLOT * (part["step_us"] - floor) / top]
            body += (
                f'<text x="{_LEFT - 8}" y="{y + _BAR - 3:.0f}" text-anchor="end">'
                f"{part['count']} x {escape(part['kernel'])}</text>\n"
            )
            x = float(_LEFT)
            for width, color in zip(widths, COLORS, strict=False):
                body += (
                    f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{_BAR}" '
                    f'fill="{color}"/>\n'
                )
                x += width
            body += (
                f'<text x="{x + 4:.1f}" y="{y + _BAR - 3:.0f}">{part["step_us"]:.0f} us</text>\n'
            )
            y += _ROW
        y += 24
    width, height = _LEFT + _PLOT + _RIGHT, round(y)
    device = escape(str(results[0]["device"])) if results else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="16" y="20" font-size="14" font-weight="bold">a decode step, {device}</text>\n'
        f"{legend(names, 40)}{body}</svg>\n"
    )
