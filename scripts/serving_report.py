"""What a run of a serving benchmark measured, in the names of `vllm bench serve`, and its table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.serving_client import Reply

Run = dict[str, Any]
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def summarise(replies: Sequence[Reply], seconds: float, wanted: int | None) -> Run:
    """The figures of one run.

    seconds: from the first request sent to the last answer's end. wanted: tokens that every answer
    must have, or None. Latencies are milliseconds over the answers without a problem; tpot_ms
    leaves out the first token, itl_ms is the time between chunks. Throughput counts those answers
    alone; every other request is in `failed` and `errors`.
    """
    problems = [reply.problem(wanted) for reply in replies]
    good = [reply for reply, problem in zip(replies, problems, strict=True) if problem is None]
    output = sum(reply.completion_tokens for reply in good)
    prompt = sum(reply.prompt_tokens for reply in good)
    chunks = sum(len(reply.arrivals) for reply in good)
    run: Run = {
        "completed": len(good),
        "failed": len(replies) - len(good),
        "errors": dict(Counter(problem for problem in problems if problem is not None)),
        "duration": round(seconds, 4),
        "total_input_tokens": prompt,
        "mean_input_tokens": _rounded(prompt / len(good)) if good else None,
        "total_output_tokens": output,
        "cached_input_tokens": sum(reply.cached_tokens for reply in good),
        "request_throughput": _rounded(len(good) / seconds),
        "output_throughput": _rounded(output / seconds),
        "total_token_throughput": _rounded((prompt + output) / seconds),
        "tokens_per_chunk": _rounded(output / chunks) if chunks else None,
    }
    for name, seconds_each in _latencies(good).items():
        run |= _statistics(name, 1e3 * np.array(seconds_each))
    return run


def _latencies(replies: Sequence[Reply]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for reply in replies:
        first = reply.arrivals[0] if reply.arrivals else reply.end
        out["ttft_ms"].append(first - reply.start)
        out["e2el_ms"].append(reply.end - reply.start)
        out["itl_ms"] += np.diff(reply.arrivals).tolist()
        if reply.completion_tokens > 1:
            out["tpot_ms"].append((reply.end - first) / (reply.completion_tokens - 1))
    return out


def _statistics(name: str, values: "np.ndarray[Any, np.dtype[np.float64]]") -> Run:
    if not len(values):
        return {f"{kind}_{name}": None for kind in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}": _rounded(values.mean()),
        f"median_{name}": _rounded(np.median(values)),
        f"std_{name}": _rounded(values.std()),
        f"p99_{name}": _rounded(np.percentile(values, 99)),
    }


def _rounded(value: float) -> float:
    return round(float(value), 3)


COLUMNS = (
    ("at once", "max_concurrency", "d"),
    ("endpoint", "endpoint", "s"),
    ("ok", "completed", "d"),
    ("failed", "failed", "d"),
    ("req/s", "request_throughput", ".2f"),
    ("out tok/s", "output_throughput", ".1f"),
    ("TTFT mean", "mean_ttft_ms", ".1f"),
    ("p50", "median_ttft_ms", ".1f"),
    ("p99", "p99_ttft_ms", ".1f"),
    ("TPOT mean", "mean_tpot_ms", ".2f"),
    ("p50", "median_tpot_ms", ".2f"),
    ("p99", "p99_tpot_ms", ".2f"),
    ("ITL mean", "mean_itl_ms", ".2f"),
    ("p50", "median_itl_ms", ".2f"),
    ("p99", "p99_itl_ms", ".2f"),
    ("E2EL mean", "mean_e2el_ms", ".0f"),
    ("p50", "median_e2el_ms", ".0f"),
    ("p99", "p99_e2el_ms", ".0f"),
    ("device idle", "device_idle", ".1%"),
)


def table(runs: Sequence[Run]) -> str:
    """Runs side by side as Markdown, a level after another; times are milliseconds.

    With several endpoints a last column has the output throughput as a share of the first one's at
    the same level.
    """
    names = list(dict.fromkeys(run["endpoint"] for run in runs))
    ordered = sorted(runs, key=lambda run: (_level(run), names.index(run["endpoint"])))
    headings = [heading for heading, _, _ in COLUMNS]
    if len(names) > 1:
        headings.append(f"of {names[0]}")
    lines = [headings, ["---" if name == "endpoint" else "---:" for name in headings]]
    base = {_level(run): run["output_throughput"] for run in runs if run["endpoint"] == names[0]}
    for run in ordered:
        cells = [_cell(run.get(key), form) for _, key, form in COLUMNS]
        if len(names) > 1:
            first = base.get(_level(run))
            cells.append(f"{100 * run['output_throughput'] / first:.0f} %" if first else "-")
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def title(settings: Mapping[str, Any]) -> str:
    """What was sent, in a few words."""
    prompts = settings.get("prompts_file") or f"{settings.get('prompt')} prompt tokens"
    return f"{prompts}, {settings.get('new')} new, {settings.get('route')}"


SENT = ("route", "prompt", "prompts_file", "new", "temperature", "ignore_eos", "extra_body")
"""Settings that figures have to have in common to be compared."""


def differences(measured: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What keeps results from being compared with the first, for people."""
    first, settings = measured[0]
    return [
        f"{name} has {key} {other.get(key)}, {first} {settings.get(key)}"
        for name, other in measured[1:]
        for key in SENT
        if other.get(key) != settings.get(key)
    ]


def warnings(runs: Sequence[Run]) -> list[str]:
    """What a reader of the figures must know, for people."""
    out = []
    for run in runs:
        where = f"{run['endpoint']} at {_cell(run['max_concurrency'], 'd')}"
        mean, wanted = run.get("mean_input_tokens"), run.get("wanted_input_tokens")
        if mean and wanted and abs(mean - wanted) > 2:
            out.append(f"{where}: prompts had {mean:.1f} tokens on average, not {wanted}")
        out += [f"{where}: {count} failed: {error}" for error, count in run["errors"].items()]
        if run["cached_input_tokens"]:
            out.append(f"{where}: {run['cached_input_tokens']} prompt tokens came from a cache")
        if (run["tokens_per_chunk"] or 1) > 1.25:
            out.append(f"{where}: {run['tokens_per_chunk']:.1f} tokens a chunk, ITL is a chunk's")
        if run.get("client_cpu", 0) > 0.8:
            out.append(f"{where}: this client used {run['client_cpu']:.2f} of a core: it may limit")
    return out


def _level(run: Run) -> float:
    return float(run["max_concurrency"] or "inf")


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "no limit" if form == "d" else "-"
    return format(value, form)
