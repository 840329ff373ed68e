"""Whether greedy replies depend on company: each request alone, then all of them at once.

On the cpu in float32 the replies must be the same. On a GPU a batch runs other kernels than a
single sequence, which round elsewhere, so a reply may leave its twin where two tokens are nearly as
likely. For each reply that does, the logits at the first difference say whether it was such a
near-tie: the two tokens within `TIE_ULPS` units in the last place, of bfloat16, of the largest
logit. What comes after the first difference answers another text and is not compared.

Prints a table and, last, JSON. Exits with 1 if a reply differs beyond near-ties.
"""

import argparse
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilert
from grout import EngineConfig, GroutError, SamplingParams, create_engine
from grout.engine import Engine
from grout.streams import BlockingStream
from models.errors import ModelError
from scripts.reference import BF16_ULP, our_logits

TIE_ULPS = 4
"""Two runs each round the logits that they compare, in every layer."""

Ids = NDArray[np.int32]


def together(engine: Engine, prompts: list[Ids], new: int) -> list[Ids]:
    """Greedy replies of `new` tokens to all prompts, which run side by side."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    streams = [BlockingStream() for _ in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        engine.add(prompt, params, stream)
    replies = []
    for stream in streams:
        ids: list[int] = []
        while len(ids) < new:
            ids += stream.get().token_ids
        replies.append(np.array(ids, np.int32))
    return replies


def gap(engine: Engine, prompt: Ids, alone: Ids, other: Ids) -> tuple[int, float]:
    """The first place where two replies differ, and how far their tokens' logits lie apart there,
    in bfloat16 units in the last place of the largest."""
    at = int(np.flatnonzero(alone != other)[0])
    logits = our_logits(engine.runner.transformer, prompt, alone[: at + 1])[at]
    ulp = BF16_ULP * 2.0 ** np.floor(np.log2(max(np.abs(logits).max(), 1e-30)))
    return at, float(abs(logits[alone[at]] - logits[other[at]]) / ulp)


def measure(engine: Engine, requests: int, new: int, longest: int, seed: int) -> dict[str, Any]:
    """Run everything; the report."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, requests)
    top = min(engine.vocab_size, 100_000)
    prompts = [rng.integers(0, top, n).astype(np.int32) for n in lengths]
    alone: list[Ids] = []
    for number, prompt in enumerate(prompts):
        print(f"\ralone: {number + 1} of {requests}", end="", file=sys.stderr, flush=True)
        alone += together(engine, [prompt], new)
    print("\ntogether", file=sys.stderr)
    others = together(engine, prompts, new)
    differences = []
    for number, (one, other) in enumerate(zip(alone, others, strict=True)):
        if not np.array_equal(one, other):
            at, ulps = gap(engine, prompts[number], one, other)
            differences.append({"request": number, "token": at, "gap_ulps": round(ulps, 3)})
    ties = sum(d["gap_ulps"] <= TIE_ULPS for d in differences)
    return {
        "model": engine.model_id,
        "device": engine.runner.transformer.device.info().get("name", "cpu"),
        "dtype": engine.config.dtype,
        "requests": requests,
        "new": new,
        "equal": requests - len(differences),
        "near_ties": ties,
        "wrong": len(differences) - ties,
        "tie_ulps": TIE_ULPS,
        "differences": differences,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder, .gguf, Hub id, or a preset with dummy")
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument("--dtype", default="auto", help="(%(default)s)")
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), help="(%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each (%(default)s)")
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts and of dummy weights (%(default)s)"
    )
    args = parser.parse_args(argv)
    if min(args.requests, args.new, args.longest) < 1:
        parser.error("needs --requests, --new and --longest of at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the check; 0 if nothing differs beyond near-ties, 1 if so, 2 on bad arguments."""
    args = parse(argv)
    try:
        config = EngineConfig(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            load_format=args.load_format,
            max_num_seqs=args.requests,
            max_model_len=-(-(args.longest + args.new + 1) // 64) * 64,
            gpu_memory_utilization=0.5,
            # A prompt found in the cache would not be run again.
            prefix_caching=False,
            seed=args.seed,
        )
        engine = create_engine(config, lambda line: print(line, file=sys.stderr))
    except (GroutError, ModelError, tilert.TilertError) as error:
        print(f"check_company: error: {error}", file=sys.stderr)
        return 2
    with engine:
        result = measure(engine, args.requests, args.new, args.longest, args.seed)
    for name in ("model", "device", "dtype", "requests", "equal", "near_ties", "wrong"):
        print(f"{name:12s}{result[name]}")
    for difference in result["differences"]:
        print("request {request}: token {token}, {gap_ulps} ulps apart".format(**difference))
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
