"""Decode throughput of one request at a time, for every model, prompt and length that is named.

The engine is the one that `grout serve` runs, without HTTP, one a model. decode tok/s is
(tokens - 1) / (end - first token), TTFT is from the request to its first token on the host; both
are medians over the repeats. The device's read bandwidth is measured in the same process, before
models load. Each figure is a line of JSON; so is the last line printed.

    python -m scripts.bench_decode qwen3-4b qwen3-8b --load-format dummy --prompt 18 2048
        --new 128 512 --check --profile --out results
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilert
from grout import EngineConfig, GroutError, SamplingParams, create_engine
from grout.engine import Engine
from grout.streams import BlockingStream
from models.errors import ModelError
from scripts.decode_profile import profile
from scripts.decode_report import figure, profile_table, profiles_svg, table
from scripts.read_bandwidth import read_bandwidth
from scripts.reference import LIMIT

POSITIONS = 257
"""Of a check: that of the prefill, and 256 decoded ones."""


def one_request(
    engine: Engine, prompt: NDArray[np.int32], new: int
) -> tuple[float, float, NDArray[np.int32]]:
    """(seconds to the first token, seconds from it to the last, ids) of one greedy request."""
    stream = BlockingStream()
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    engine.add(prompt, params, stream)
    ids: list[int] = []
    first = None
    while True:
        delta = stream.get()
        ids += delta.token_ids
        if first is None and ids:
            first = time.perf_counter()
        if delta.finish_reason is not None:
            break
    end = time.perf_counter()
    if first is None or len(ids) != new:
        raise RuntimeError(f"{len(ids)} tokens came back, {new} were asked for")
    return first - start, end - first, np.array(ids, np.int32)


def check(
    engine: Engine, prompt: NDArray[np.int32], reply: NDArray[np.int32], positions: int
) -> dict[str, Any]:
    """Hold the reply, and what would follow it, against transformers in float32.

    All of at least so many tokens are decoded once more by replays of a graph, whose logits count,
    and once op by op, whose tokens must be the same.
    """
    from scripts.reference import compare, greedy, logits_error, reference_logits

    start, model = time.perf_counter(), engine.runner.transformer
    count = max(len(reply), positions)
    steps = list(itertools.islice(greedy(model, prompt, recorded=True), count))
    ids = np.array([token for token, _ in steps], np.int32)
    ours = np.stack([logits for _, logits in steps])
    eager = [token for token, _ in itertools.islice(greedy(model, prompt, recorded=False), count)]
    if not np.array_equal(ids[: len(reply)], reply):
        raise RuntimeError("the engine and a graph of its step gave different tokens")
    whole = np.concatenate([prompt, ids[:-1]])
    exact = reference_logits(model.parameters, whole, count)
    result = compare(ours, ids, exact, "transformers float32")
    result |= {
        "mean_error": float(logits_error(ours, exact).mean()),
        "eager_equal": int((ids == eager).sum()),
        "peer": None,
    }
    if model.dtype is tilert.bf16:
        theirs = reference_logits(model.parameters, whole, count, "bfloat16")
        chosen = theirs.argmax(axis=1).astype(np.int32)
        peer = compare(theirs, chosen, exact, "transformers float32")
        result |= {
            "peer": "transformers bf16",
            "peer_error": peer["logits_error"],
            "peer_mean": float(logits_error(theirs, exact).mean()),
            "peer_wrong": peer["wrong"],
        }
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def measure(
    engine: Engine, prompt: NDArray[np.int32], new: int, args: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """One figure of the report."""
    model = engine.runner.transformer
    what = f"{engine.model_id} {len(prompt)}/{new}"
    for i in range(args.warmup):
        print(f"{what}: warm-up {i + 1} of {args.warmup}", file=sys.stderr)
        one_request(engine, prompt, new)
    runs = []
    for i in range(args.repeats):
        runs.append(one_request(engine, prompt, new))
        rate = (new - 1) / runs[-1][1]
        print(f"{what}: run {i + 1} of {args.repeats}: {rate:.1f} tok/s", file=sys.stderr)
    if any(not np.array_equal(r[2], runs[0][2]) for r in runs):
        raise RuntimeError("the same greedy request gave different tokens")
    seconds = statistics.median(r[1] for r in runs) / (new - 1)
    context = len(prompt) + (new - 1) / 2
    kv = model.page_bytes() / model.page_size * context
    nbytes = model.weight_bytes + kv
    result: dict[str, Any] = {
        "model": engine.model_id,
        "load_format": args.load_format,
        "device": model.device.info().get("name", model.device.name),
        "dtype": engine.config.dtype,
        "prompt": len(prompt),
        "new": new,
        "repeats": args.repeats,
        "tok_s": round(1 / seconds, 2),
        "ttft_ms": round(1e3 * statistics.median(r[0] for r in runs), 2),
        "ms_per_token": round(1e3 * seconds, 4),
        "bytes_per_token": int(nbytes),
        "read_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "bandwidth_share": round(nbytes / seconds / bandwidth, 4),
        "checked": None,
    }
    if args.check:
        print(f"{what}: checking against transformers in float32", file=sys.stderr)
        result["checked"] = check(engine, prompt, runs[0][2], args.positions)
    return result


def measure_model(name: str | None, args: argparse.Namespace, bandwidth: float) -> list[Any]:
    """The figures of one model, each printed as it comes."""
    longest = max(args.prompt) + max(*args.new, args.positions if args.check else 0) + 1
    config = EngineConfig(
        model=name,
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        max_num_seqs=1,
        max_model_len=-(-longest // 64) * 64,
        # The cache takes what one request needs; the check has the rest.
        gpu_memory_utilization=0.9,
        # The same prompt each time, and each time all of it.
        prefix_caching=False,
        seed=args.seed,
    )
    start = time.perf_counter()
    engine = create_engine(config, lambda line: print(line, file=sys.stderr))
    ready = time.perf_counter() - start
    results = []
    with engine:
        while engine.runner.left_to_record:
            time.sleep(0.02)
        for length in args.prompt:
            rng = np.random.default_rng(args.seed)
            prompt = rng.integers(0, min(engine.vocab_size, 100_000), length).astype(np.int32)
            found = None
            if args.profile:
                found = profile(engine.runner.transformer, prompt).json(bandwidth)
            for new in args.new:
                result = measure(engine, prompt, new, args, bandwidth) | {
                    "ready_s": round(ready, 2),
                    "python": platform.python_version(),
                }
                print(figure(result))
                if found is not None:
                    result["profile"] = found
                    print(profile_table(found))
                    found = None
                print(json.dumps(result), flush=True)
                results.append(result)
    return results


def write(folder: Path, results: Sequence[dict[str, Any]]) -> None:
    """The figures as JSON lines and as a table, the profiles as tables and as a plot."""
    profiled = [result for result in results if "profile" in result]
    (folder / "decode.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))
    parts = [f"# decode, one request\n\n{table(results)}\n"]
    for result in profiled:
        title = f"{result['model']}, context {result['profile']['context']}"
        parts.append(f"## {title}\n\n{profile_table(result['profile'])}\n")
    (folder / "decode.md").write_text("\n".join(parts))
    if profiled:
        (folder / "decode.svg").write_text(profiles_svg(profiled))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folder, .gguf, Hub id, or a preset with dummy (the model that the server serves)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of weights (%(default)s)")
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=("auto", "dummy"),
        help="dummy makes weights up (%(default)s)",
    )
    parser.add_argument(
        "--prompt", type=int, nargs="+", default=[18], help="prompt tokens, in turn (%(default)s)"
    )
    parser.add_argument(
        "--new", type=int, nargs="+", default=[128], help="new tokens, in turn (%(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=2, help="runs before (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompt and of dummy weights (%(default)s)"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with transformers (must be installed)"
    )
    parser.add_argument(
        "--positions",
        type=int,
        default=POSITIONS,
        help="least tokens that a check compares (%(default)s)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="time each kernel of a step (on a GPU)"
    )
    parser.add_argument("--out", type=Path, help="folder for decode.jsonl, decode.md, decode.svg")
    args = parser.parse_args(argv)
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if args.check and missing:
        parser.error(f"--check needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if min(*args.prompt, args.repeats) < 1 or min(args.new) < 2 or args.warmup < 0:
        parser.error("needs --prompt and --repeats of at least 1, --new of at least 2")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if what was checked is wrong, 2 where it cannot run."""
    args = parse(argv)
    results: list[dict[str, Any]] = []
    try:
        device = tilert.device(args.device)
        if args.profile and device.kind != "cuda":
            raise tilert.DeviceError(f"--profile times kernels on a GPU; {device.name} is none")
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
        bandwidth = read_bandwidth(device)
        for name in args.models or [None]:
            results += measure_model(name, args, bandwidth)
            if args.out is not None:
                write(args.out, results)
    except (GroutError, ModelError, tilert.TilertError, OSError) as error:
        print(f"bench_decode: error: {error}", file=sys.stderr)
        return 2
    if len(results) > 1:
        print(table(results))
        print(json.dumps({"figures": len(results), "ok": all(map(_ok, results))}))
    return 0 if all(map(_ok, results)) else 1


def _ok(result: dict[str, Any]) -> bool:
    """Whether logits are as exact as they are to be, and tokens what they are op by op.

    Tokens that neither are the reference's nor tie with it are no more than a peer has that
    computes in the same type: where logits lie close together, its rounding chooses, too.
    """
    found = result["checked"]
    return found is None or bool(
        found["logits_error"] < LIMIT
        and found["eager_equal"] == found["positions"]
        and found["wrong"] <= (found["peer_wrong"] if found["peer"] else 0)
    )


if __name__ == "__main__":
    sys.exit(main())
