"""What transformers computes in float32 for the weights that one of our models holds.

Needs torch and transformers, which are oracles here and never part of the product.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.batch import Slot
from models.config import ModelConfig
from models.parameters import Parameters
from models.prompt import PromptChunk
from models.transformer import Transformer

__all__ = ["Agreement", "compare", "our_logits", "reference_logits"]

BF16_ULP = 2.0**-7
"""Distance between neighbouring bf16 numbers, relative to the power of two below them."""


class Agreement(dict[str, Any]):
    """How a greedy stream stands to the reference; made for JSON.

    reference: who computed it. positions: tokens compared. equal: where both choose one token.
    ties: where ours is within 1 bf16 ulp of the reference's best. wrong: everything else.
    logits_error: largest relative error (2-norm) of a position's logits.
    """

    @property
    def ok(self) -> bool:
        """Whether every token is the reference's or ties with it, and logits agree to 2e-2."""
        return bool(self["wrong"] == 0 and self["logits_error"] < 2e-2)


def hf_model(config: ModelConfig) -> Any:
    """An empty transformers model of the same shape, float32."""
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
                tie_word_embeddings=config.tie_word_embeddings,
            )
        )
    return model.eval()


def hf_state(parameters: Parameters, device: str) -> dict[str, Any]:
    """Our weights as transformers' state dictionary, float32 on a torch device."""
    import torch

    config = parameters.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def tensor(array: Any) -> Any:
        host = array.numpy()
        if host.dtype.itemsize == 2 and host.dtype != np.float16:
            bits = torch.from_numpy(host.view(np.int16)).to(device)
            return bits.view(torch.bfloat16).float()
        return torch.from_numpy(host).to(device).float()

    state = {"model.embed_tokens.weight": tensor(parameters.embed)}
    state["model.norm.weight"] = tensor(parameters.norm)
    tied = config.tie_word_embeddings
    head = state["model.embed_tokens.weight"] if tied else tensor(parameters.head)
    state["lm_head.weight"] = head
    for i, layer in enumerate(parameters.layers):
        at = f"model.layers.{i}."
        qkv, gate_up = tensor(layer.qkv), tensor(layer.gate_up)
        state |= {
            at + "input_layernorm.weight": tensor(layer.input_norm),
            at + "post_attention_layernorm.weight": tensor(layer.post_norm),
            at + "self_attn.q_proj.weight": qkv[:queries],
            at + "self_attn.k_proj.weight": qkv[queries : queries + keys],
            at + "self_attn.v_proj.weight": qkv[queries + keys :],
            at + "self_attn.o_proj.weight": tensor(layer.o),
            at + "mlp.gate_proj.weight": gate_up[0],
            at + "mlp.up_proj.weight": gate_up[1],
            at + "mlp.down_proj.weight": tensor(layer.down),
        }
        if config.qk_norm:
            state[at + "self_attn.q_norm.weight"] = tensor(layer.q_norm).reshape(-1)
            state[at + "self_attn.k_norm.weight"] = tensor(layer.k_norm).reshape(-1)
    return state


def reference_logits(parameters: Parameters, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """float32 logits [T, V] of transformers for a whole sequence, no tf32."""
    import torch

    device = "cuda" if parameters.device.kind == "cuda" else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = hf_model(parameters.config)
    model.load_state_dict(hf_state(parameters, device), assign=True)
    # Meta tensors that are no parameters (RoPE frequencies) are made again on the device.
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config).to(device)
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)[None]
        logits: NDArray[np.float32] = model(input_ids=ids).logits[0].float().cpu().numpy()
    del model
    return logits


def our_logits(
    model: Transformer, prompt: NDArray[np.int32], reply: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Our logits [len(reply), V] where each token of a reply was chosen, decoded step by step."""
    length = len(prompt) + len(reply)
    cache = model.new_cache(-(-length // model.page_size), 1)
    cache.set_pages(0, list(range(-(-length // model.page_size))))
    batch = model.new_batch(cache, 1)

    def place(token: int, position: int) -> None:
        batch.set([Slot(row=0, token=token, position=position)])

    place(0, 0)
    model.prefill(cache, batch, [PromptChunk(prompt, 0)])
    rows = [batch.logits.numpy()[0]]
    for at, token in enumerate(reply[:-1]):
        place(int(token), len(prompt) + at)
        model.decode(cache, batch)
        rows.append(batch.logits.numpy()[0])
    return np.stack(rows).astype(np.float32)


def compare(
    ours: NDArray[np.float32],
    reply: NDArray[np.int32],
    reference: NDArray[np.float32],
    name: str,
) -> Agreement:
    """Hold a greedy reply and its logits against the reference's logits at the same places."""
    rows = np.arange(len(reply))
    best = reference.argmax(axis=1)
    top, chosen = reference[rows, best], reference[rows, reply]
    ulp = BF16_ULP * 2.0 ** np.floor(np.log2(np.maximum(np.abs(top), 1e-30)))
    equal = best == reply
    tie = ~equal & (top - chosen <= ulp)
    error = np.linalg.norm(ours - reference, axis=1) / np.linalg.norm(reference, axis=1)
    return Agreement(
        reference=name,
        positions=len(reply),
        equal=int(equal.sum()),
        ties=int(tie.sum()),
        wrong=int((~equal & ~tie).sum()),
        logits_error=float(error.max()),
    )
