"""Decode throughput of one request at a time.

The engine is the one that `grout serve` runs, without HTTP. decode tok/s is (tokens - 1) /
(end - first token), TTFT is from the request to its first token on the host; both are medians over
the repeats. The device's read bandwidth is measured in the same process, before the model loads.
The last line printed is JSON.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilert
from grout import EngineConfig, GroutError, SamplingParams, create_engine
from grout.engine import Engine
from grout.streams import BlockingStream
from models.errors import ModelError
from scripts.read_bandwidth import read_bandwidth


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


def check(engine: Engine, prompt: NDArray[np.int32], reply: NDArray[np.int32]) -> dict[str, Any]:
    """Hold the reply against transformers in float32."""
    from scripts.reference import compare, our_logits, reference_logits

    model = engine.runner.transformer
    ours = our_logits(model, prompt, reply)
    whole = reference_logits(model.parameters, np.concatenate([prompt, reply[:-1]]))
    return compare(ours, reply, whole[len(prompt) - 1 :], "transformers float32")


def measure(engine: Engine, args: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """One row of the report."""
    model = engine.runner.transformer
    rng = np.random.default_rng(args.seed)
    prompt = rng.integers(0, min(engine.vocab_size, 100_000), args.prompt).astype(np.int32)
    for i in range(args.warmup):
        print(f"warm-up {i + 1} of {args.warmup}", file=sys.stderr)
        one_request(engine, prompt, args.new)
    runs = []
    for i in range(args.repeats):
        runs.append(one_request(engine, prompt, args.new))
        rate = (args.new - 1) / runs[-1][1]
        print(f"run {i + 1} of {args.repeats}: {rate:.1f} tok/s", file=sys.stderr)
    if any(not np.array_equal(r[2], runs[0][2]) for r in runs):
        raise RuntimeError("the same greedy request gave different tokens")
    seconds = statistics.median(r[1] for r in runs) / (args.new - 1)
    context = args.prompt + (args.new - 1) / 2
    kv = model.page_bytes() / model.page_size * context
    nbytes = model.weight_bytes + kv
    result: dict[str, Any] = {
        "model": engine.model_id,
        "load_format": args.load_format,
        "device": model.device.info().get("name", model.device.name),
        "dtype": engine.config.dtype,
        "prompt": args.prompt,
        "new": args.new,
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
        print("checking against transformers in float32", file=sys.stderr)
        result["checked"] = check(engine, prompt, runs[0][2])
    return result


def show(result: dict[str, Any]) -> None:
    """The row as a table for people."""
    checked = result["checked"]
    agreed = "not checked"
    if checked:
        agreed = (
            f"{checked['equal']} equal, {checked['ties']} ties, {checked['wrong']} wrong of"
            f" {checked['positions']} ({checked['reference']}); logits error"
            f" {checked['logits_error']:.1e}"
        )
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
        ("tokens", agreed),
    ]
    for name, value in rows:
        print(f"{name:22s}{value}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "model",
        nargs="?",
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
    parser.add_argument("--prompt", type=int, default=18, help="prompt tokens (%(default)s)")
    parser.add_argument("--new", type=int, default=128, help="new tokens (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="runs before (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompt and of dummy weights (%(default)s)"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with transformers (must be installed)"
    )
    args = parser.parse_args(argv)
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if args.check and missing:
        parser.error(f"--check needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if min(args.prompt, args.repeats) < 1 or args.new < 2 or args.warmup < 0:
        parser.error("needs --prompt and --repeats of at least 1, --new of at least 2")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if the tokens were checked and are wrong, 2 on bad arguments."""
    args = parse(argv)
    try:
        device = tilert.device(args.device)
        bandwidth = read_bandwidth(device)
        config = EngineConfig(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            load_format=args.load_format,
            max_num_seqs=1,
            max_model_len=-(-(args.prompt + args.new + 1) // 64) * 64,
            gpu_memory_utilization=0.5,
            # The same prompt each time, and each time all of it.
            prefix_caching=False,
            seed=args.seed,
        )
        start = time.perf_counter()
        engine = create_engine(config, lambda line: print(line, file=sys.stderr))
    except (GroutError, ModelError, tilert.TilertError) as error:
        print(f"bench_decode: error: {error}", file=sys.stderr)
        return 2
    ready = time.perf_counter() - start
    with engine:
        result = measure(engine, args, bandwidth) | {
            "ready_s": round(ready, 2),
            "python": platform.python_version(),
        }
    show(result)
    print(json.dumps(result))
    return 0 if result["checked"] is None or result["checked"].ok else 1


if __name__ == "__main__":
    sys.exit(main())
