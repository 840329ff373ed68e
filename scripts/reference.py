"""What transformers computes for the weights that one of our models holds, in float32 or bfloat16.

One layer at a time has its weights in the reference's type, so that a model that fills half of a
GPU's memory has a float32 reference on the same GPU. Needs torch and transformers, which are
oracles here and never part of the product.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilert
from models.config import ModelConfig
from models.parameters import LayerParameters, Parameters
from models.prompt import PromptChunk
from models.slot import Slot
from models.transformer import Transformer

__all__ = ["BF16_ULP", "LIMIT", "compare", "greedy", "logits_error", "our_logits",
           "reference_logits"]  # fmt: skip

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

BF16_ULP = 2.0**-7
"""Distance between neighbouring bf16 numbers, relative to the power of two below them."""
LIMIT = 2e-2
"""Of the relative error (2-norm) of a position's logits."""


# -- the reference -------------------------------------------------------------------------------


def hf_model(config: ModelConfig) -> Any:
    """An empty transformers model of the same shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds: dict[str, tuple[Any, Any]] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    make_config, make_model = kinds[config.architecture]
    if config.rope.type != "default":
        raise ValueError(f"the reference covers plain RoPE, not {config.rope.type}")
    with torch.device("meta"):
        model = make_model(
            make_config(
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                intermediate_size=config.intermediate_size,
                vocab_size=config.vocab_size,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                max_position_embeddings=config.max_position_embeddings,
                tie_word_embeddings=False,
            )
        )
    return model.eval().requires_grad_(False)


def hf_layer(config: ModelConfig, layer: LayerParameters, dtype: Any) -> dict[str, Any]:
    """Our weights of a layer as the state dictionary of transformers' layer, where ours are."""
    import torch

    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def tensor(array: tilert.Array) -> Any:
        return torch.from_dlpack(array).to(dtype)

    qkv, gate_up = tensor(layer.qkv), tensor(layer.gate_up)
    state = {
        "input_layernorm.weight": tensor(layer.input_norm),
        "post_attention_layernorm.weight": tensor(layer.post_norm),
        "self_attn.q_proj.weight": qkv[:queries],
        "self_attn.k_proj.weight": qkv[queries : queries + keys],
        "self_attn.v_proj.weight": qkv[queries + keys :],
        "self_attn.o_proj.weight": tensor(layer.o),
        "mlp.gate_proj.weight": gate_up[0],
        "mlp.up_proj.weight": gate_up[1],
        "mlp.down_proj.weight": tensor(layer.down),
    }
    if config.qk_norm:
        state["self_attn.q_norm.weight"] = tensor(layer.q_norm).reshape(-1)
        state["self_attn.k_norm.weight"] = tensor(layer.k_norm).reshape(-1)
    return state


def reference_logits(
    parameters: Parameters, tokens: Ids, last: int, dtype: str = "float32"
) -> Floats:
    """Logits [last, V] that transformers computes for the last tokens of a sequence, no tf32.

    Args:
        dtype: torch's name of the type in which it computes.
    """
    import torch

    device = "cuda" if parameters.device.kind == "cuda" else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = getattr(torch, dtype)
    model = hf_model(parameters.config)
    # Meta tensors that are no parameters (RoPE frequencies) are made again on the device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    for part, layer in zip(model.model.layers, parameters.layers, strict=True):
        _lend(part, lambda layer=layer: hf_layer(parameters.config, layer, wanted))
    for part, array in (
        (model.model.embed_tokens, parameters.embed),
        (model.model.norm, parameters.norm),
        (model.lm_head, parameters.head),
    ):
        _lend(part, lambda array=array: {"weight": torch.from_dlpack(array).to(wanted)})
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)[None]
        out = model(input_ids=ids, logits_to_keep=last, use_cache=False).logits[0]
        logits: Floats = out.float().cpu().numpy()
    del model, out
    if device == "cuda":
        torch.cuda.empty_cache()
    return logits


def _lend(part: Any, weights: Any) -> None:
    """Have a module take its weights when it is called, and give them back after that."""

    def take(module: Any, _: Any) -> None:
        module.load_state_dict(weights(), assign=True)

    def give(module: Any, _: Any, __: Any) -> None:
        module.to("meta")

    part.register_forward_pre_hook(take)
    part.register_forward_hook(give)


# -- ours ----------------------------------------------------------------------------------------


def greedy(model: Transformer, prompt: Ids, recorded: bool) -> Iterator[tuple[int, Floats]]:
    """Token after token of a greedy reply without end, each with the logits [V] it was chosen from.

    Args:
        recorded: whether decode steps are replays of a graph, or run op by op.
    """
    pages = -(-model.max_len // model.page_size)
    cache = model.new_cache(pages, 1)
    cache.set_pages(0, list(range(pages)))
    batch = model.new_batch(cache, 1)
    batch.set([Slot(row=0, token=0, position=0)])
    model.prefill(cache, batch, [PromptChunk(prompt, 0)])

    def step() -> None:
        model.decode(cache, batch)

    graph = tilert.capture(model.device, step) if recorded else None
    try:
        while True:
            yield int(batch.ids.numpy()[0]), batch.logits.numpy()[0].astype(np.float32)
            if graph is None:
                step()
            else:
                graph.replay()
    finally:
        if graph is not None:
            graph.close()


def our_logits(model: Transformer, prompt: Ids, reply: Ids) -> Floats:
    """Our logits [len(reply), V] where each token of a greedy reply was chosen, op by op.

    Raises:
        RuntimeError: where another token is chosen.
    """
    rows = []
    for token, logits in itertools.islice(greedy(model, prompt, recorded=False), len(reply)):
        rows.append(logits)
        if len(rows) < len(reply) and token != reply[len(rows) - 1]:
            raise RuntimeError(
                f"token {len(rows) - 1} is {reply[len(rows) - 1]} in the reply, {token} op by op"
            )
    return np.stack(rows)


# -- beside each other ---------------------------------------------------------------------------


def logits_error(ours: Floats, reference: Floats) -> Floats:
    """Relative error (2-norm) of each position's logits [T, V]."""
    error: Floats = np.linalg.norm(ours - reference, axis=1) / np.linalg.norm(reference, axis=1)
    return error


def compare(ours: Floats, reply: Ids, reference: Floats, name: str) -> dict[str, Any]:
    """How a greedy reply and its logits [T, V] stand to a reference's logits at the same places.

    reference: who computed it. positions: tokens compared. equal: where both choose one token.
    ties: where ours is within 1 bf16 ulp of the reference's best. wrong: everything else.
    logits_error: largest relative error (2-norm) of a position's logits.
    """
    rows = np.arange(len(reply))
    best = reference.argmax(axis=1)
    top, chosen = reference[rows, best], reference[rows, reply]
    ulp = BF16_ULP * 2.0 ** np.floor(np.log2(np.maximum(np.abs(top), 1e-30)))
    equal = best == reply
    tie = ~equal & (top - chosen <= ulp)
    return {
        "reference": name,
        "positions": len(reply),
        "equal": int(equal.sum()),
        "ties": int(tie.sum()),
        "wrong": int((~equal & ~tie).sum()),
        "logits_error": float(logits_error(ours, reference).max()),
    }
