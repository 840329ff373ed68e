"""Make tests/fixtures: tiny random checkpoints, and what transformers computes from them.

    python scripts/make_fixtures.py [FOLDER]        needs the oracle extra; default tests/fixtures

Each fixture is a Hugging Face checkpoint folder with two files more:

expected.npz   prompt_{i} int32 [T], logits_{i} float32 [T, vocabulary], for prompts of 3 lengths;
               greedy_prompt int32 [T], greedy_tokens int32 [64], past any end of sequence;
               rope_cos, rope_sin float32 [ROPE_LENGTH, head_dim / 2], attention scaling included.
expected.json  "encode": texts and their ids; "chat": template arguments and the rendered text.

Weights come from NumPy's generator by a seed a fixture, so every run makes the same checkpoints.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import tokenizers
    import torch
    import transformers
except ImportError as error:
    # Whoever imports this chose to; whoever runs it is to be told what to install.
    if __name__ != "__main__":
        raise
    print(
        f"make_fixtures: error: {error}; install what computes the expectations with "
        "`pip install torch transformers`",
        file=sys.stderr,
    )
    sys.exit(2)

PROMPT_LENGTHS = (1, 17, 70)
GREEDY_PROMPT_LENGTH = 17
GREEDY_TOKENS = 64
ROPE_LENGTH = 80
# A greedy continuation is a fair test only where rounding (about 2e-5 here) cannot change it: the
# best logit leads by this much at each step, and the text is not one token over and over.
GREEDY_MARGIN = 5e-4
GREEDY_DISTINCT = 12

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# In byte-level spelling "Ġ" is a space; "ä½ł" and "å¥½" are the bytes of two Chinese characters.
MERGES = (
    "t h,th e,Ġ the,i n,e r,a n,r e,o n,an d,Ġ and,Ġ a,in g,l l,o u,h e,Ġ w,o r,Ġ o,s t,e s,"
    "i s,Ġ is,Ċ Ċ,ä ½,ä½ ł,å ¥,å¥ ½,Ġ Ġ,1 2"
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = (
    "",
    "the other and the other",
    "Hello, world! It's 12:34.",
    "你好, 世界 🙂 naïve",
    "<|im_start|>user\nIs this the thing?<|im_end|>\n",
    "  two  spaces\n\n\tand a tab \r\n",
)

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role ' + message.role) }}
{%- endif %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < last.user and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

BOS_CHAT = """\
{{ bos_token }}
{%- for message in messages if message.content %}
    {%- if loop.first and message.role == 'system' %}
[{{ message.content | trim }}]
    {%- else %}
 {{ message.role }}: {{ message.content }}{{ eos_token }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
 assistant:
{%- endif %}
"""

CONVERSATION = (
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": 'What is 1 < 2 & "so"? 你好'},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTrue."},
    {"role": "user", "content": "And now?"},
)
CALLING = (
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
            }
        ],
    },
    {"role": "tool", "content": '{"sky": "<clear>"}'},
)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tomorrow's weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)


@dataclass(frozen=True)
class Fixture:
    """A tiny model. `settings` are arguments of the transformers configuration class."""

    name: str
    family: str
    seed: int
    stored: torch.dtype
    settings: dict[str, Any]
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    # Spell the configuration as before transformers 5: rope_theta and rope_scaling, and for llama
    # no head_dim where it is hidden_size / num_attention_heads.
    old_keys: bool = False
    # Put a beginning of sequence before each text, and use the template that shows it.
    bos: bool = False


QWEN3 = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 288,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 288,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}

FIXTURES = (
    Fixture(
        "qwen3-tied",
        "qwen3",
        1,
        torch.float32,
        QWEN3
        | {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "intermediate_size": 80,
            "tie_word_embeddings": True,
        },
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    # The vocabulary is padded past the tokenizer's, as Qwen3's is.
    Fixture("qwen3-untied", "qwen3", 2, torch.bfloat16, QWEN3 | {"vocab_size": 300}),
    Fixture(
        "qwen3-yarn",
        "qwen3",
        3,
        torch.bfloat16,
        QWEN3 | {"max_position_embeddings": 32},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        old_keys=True,
    ),
    Fixture("llama", "llama", 4, torch.bfloat16, LLAMA, old_keys=True, bos=True),
    Fixture(
        "llama3-rope",
        "llama",
        5,
        torch.float16,
        LLAMA | {"hidden_size": 48, "head_dim": 16, "tie_word_embeddings": False},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bos=True,
    ),
)


def write_checkpoint(fixture: Fixture, folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    model = random_model(fixture)
    model.to(fixture.stored).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    if fixture.old_keys:
        use_old_keys(folder / "config.json")
    write_tokenizer(fixture, folder)


def use_old_keys(path: Path) -> None:
    """Rewrite a config.json as releases of transformers before 5 wrote it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    derived = config["hidden_size"] / config["num_attention_heads"]
    if config["model_type"] == "llama" and config["head_dim"] == derived:
        del config["head_dim"]
    write_json(path, config)


def random_model(fixture: Fixture) -> Any:
    """The transformers model, float32, with weights that `fixture.stored` holds exactly.

    Projections keep the size of what passes through them and norm weights are far from 1, so that
    a wrong weight or a missing step shows in the logits.
    """
    classes = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    config_class, model_class = classes[fixture.family]
    endoftext, _, im_end = (special_id(name) for name in SPECIAL_TOKENS)
    config = config_class(
        **fixture.settings,
        rope_parameters={"rope_theta": 1e4} | fixture.rope,
        bos_token_id=endoftext,
        eos_token_id=im_end,
    )
    model = model_class(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=endoftext,
        eos_token_id=[im_end, endoftext],
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
    )
    generator = np.random.default_rng(fixture.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = generator.standard_normal(parameter.shape)
            if parameter.ndim == 1:
                values = 1.0 + 0.3 * values
            elif "embed" in name:
                values = 0.25 * values
            else:
                values = values * 1.4 / np.sqrt(parameter.shape[1])
            parameter.copy_(torch.from_numpy(values).to(fixture.stored).float())
    return model


def special_id(token: str) -> int:
    """Id of a special token: they follow the bytes and the merges."""
    return 256 + len(MERGES.split(",")) + SPECIAL_TOKENS.index(token)


def write_tokenizer(fixture: Fixture, folder: Path) -> None:
    """Write a byte-level BPE tokenizer of 288 entries and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = (pair.split(" ") for pair in MERGES.split(","))
    merges = [(left, right) for left, right in pairs]
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={text: number for number, text in enumerate(vocabulary)}, merges=merges
        )
    )
    if fixture.bos:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.normalizer = tokenizers.normalizers.NFC()
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), "isolated"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    endoftext, _, im_end = SPECIAL_TOKENS
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": im_end,
        "pad_token": endoftext,
        "clean_up_tokenization_spaces": False,
    }
    if fixture.bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{endoftext} $A", special_tokens=[(endoftext, special_id(endoftext))]
        )
        settings |= {"bos_token": endoftext, "chat_template": BOS_CHAT}
    else:
        (folder / "chat_template.jinja").write_text(CHATML)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)


class Reference:
    """What transformers computes from a checkpoint folder, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.vocabulary = int(self.model.config.vocab_size)

    def logits(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits after each token: float32 [T, vocabulary]."""
        with torch.no_grad():
            output = self.model(torch.from_numpy(tokens.astype(np.int64))[None])
        logits: NDArray[np.float32] = output.logits[0].float().numpy()
        return logits

    def greedy(
        self, prompt: NDArray[np.int32], count: int, margin: float
    ) -> NDArray[np.int32] | None:
        """The `count` most likely next tokens, or None if a best logit leads by under `margin`."""
        tokens = list(prompt)
        for _ in range(count):
            last = self.logits(np.array(tokens, np.int32))[-1]
            second, best = np.sort(last)[-2:]
            if best - second < margin:
                return None
            tokens.append(np.int32(last.argmax()))
        return np.array(tokens[len(prompt) :], np.int32)

    def decided_prompt(self, generator: np.random.Generator) -> dict[str, NDArray[np.int32]]:
        """A random prompt whose greedy continuation rounding cannot change."""
        for _ in range(200):
            prompt = self.prompt(generator, GREEDY_PROMPT_LENGTH)
            tokens = self.greedy(prompt, GREEDY_TOKENS, GREEDY_MARGIN)
            if tokens is not None and len(np.unique(tokens)) >= GREEDY_DISTINCT:
                return {"greedy_prompt": prompt, "greedy_tokens": tokens}
        raise SystemExit("no prompt has a clear greedy continuation: change the weights' scale")

    def prompt(self, generator: np.random.Generator, length: int) -> NDArray[np.int32]:
        """Random ids of the whole vocabulary: int32 [length]."""
        return generator.integers(0, self.vocabulary, length, dtype=np.int32)

    def rope(self, length: int) -> dict[str, NDArray[np.float32]]:
        """The cos and sin tables of positions 0..length-1, each float32 [length, head_dim / 2]."""
        positions = torch.arange(length)[None]
        tables = self.model.model.rotary_emb(torch.zeros(1), positions)
        cos, sin = (table[0, :, : table.shape[-1] // 2].float().numpy() for table in tables)
        return {"rope_cos": cos, "rope_sin": sin}

    def chat(self, bos: bool) -> list[dict[str, Any]]:
        """Renderings of the chat template, with the arguments that gave them."""
        cases: list[dict[str, Any]] = [
            {"messages": CONVERSATION, "kwargs": {"add_generation_prompt": True}},
            {"messages": CONVERSATION[:2], "kwargs": {"add_generation_prompt": False}},
        ]
        if not bos:
            thinking = {"add_generation_prompt": True, "enable_thinking": False}
            cases.append({"messages": CONVERSATION, "kwargs": thinking})
            cases.append({"messages": CALLING, "kwargs": {"tools": TOOLS}})
        for case in cases:
            case["text"] = self.tokenizer.apply_chat_template(
                case["messages"], tokenize=False, **case["kwargs"]
            )
        return cases

    def encodings(self) -> list[dict[str, Any]]:
        """Ids of TEXTS, with and without the tokenizer's own special tokens."""
        return [
            {
                "text": text,
                "ids": self.tokenizer.encode(text, add_special_tokens=False),
                "ids_with_special_tokens": self.tokenizer.encode(text),
            }
            for text in TEXTS
        ]


def expected_arrays(reference: Reference, seed: int) -> dict[str, Any]:
    """Contents of expected.npz."""
    generator = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for number, length in enumerate(PROMPT_LENGTHS):
        prompt = reference.prompt(generator, length)
        arrays[f"prompt_{number}"] = prompt
        arrays[f"logits_{number}"] = reference.logits(prompt)
    return arrays | reference.decided_prompt(generator) | reference.rope(ROPE_LENGTH)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write every fixture under `folder`."""
    for fixture in FIXTURES:
        target = folder / fixture.name
        write_checkpoint(fixture, target)
        reference = Reference(target)
        arrays = expected_arrays(reference, fixture.seed)
        np.savez_compressed(target / "expected.npz", **arrays)
        cases = {"encode": reference.encodings(), "chat": reference.chat(fixture.bos)}
        write_json(target / "expected.json", cases)
        size = sum(path.stat().st_size for path in target.iterdir())
        spread, tokens = arrays["logits_2"].std(), arrays["greedy_tokens"]
        print(
            f"{target}: {size // 1024} KiB, logits' deviation {spread:.2f}, "
            f"{len(np.unique(tokens))} distinct greedy tokens"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/fixtures"))
