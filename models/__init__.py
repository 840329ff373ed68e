"""Models: configuration, weights, tokenizer and chat template of Qwen3 and llama checkpoints."""

from models.chat_template import ChatTemplate, flatten_content
from models.config import ModelConfig, RopeConfig
from models.errors import ChatTemplateError, ConfigError, LoadError, ModelError, TokenizerError
from models.presets import PRESETS
from models.rope import rope_tables
from models.source import ModelSource, open_checkpoint, resolve
from models.tokenizer import Tokenizer
from models.weights import Checkpoint, expected_shapes, parameter_count

__all__ = [
    "PRESETS",
    "ChatTemplate",
    "ChatTemplateError",
    "Checkpoint",
    "ConfigError",
    "LoadError",
    "ModelConfig",
    "ModelError",
    "ModelSource",
    "RopeConfig",
    "Tokenizer",
    "TokenizerError",
    "expected_shapes",
    "flatten_content",
    "open_checkpoint",
    "parameter_count",
    "resolve",
    "rope_tables",
]
