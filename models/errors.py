"""Errors of the models package. Every message says what was wrong, where, and what to do."""


class ModelError(Exception):
    """Base of every error this package raises on purpose."""


class LoadError(ModelError):
    """A model cannot be found or loaded; the message names the file, tensor or Hub id."""


class ConfigError(LoadError):
    """A model configuration is incomplete, inconsistent or asks for something unsupported."""


class TokenizerError(LoadError):
    """A tokenizer is unreadable or of a kind that is not supported."""


class ChatTemplateError(ModelError):
    """A chat template does not compile, or refuses or fails on the given messages."""
