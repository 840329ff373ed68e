"""Errors of the decode engine. Every message says what was wrong, where, and what to do."""


class GroutError(Exception):
    """Base of every error raised by `grout`."""


class ConfigError(GroutError, ValueError):
    """An `EngineConfig` field has a value the engine cannot use."""


class RequestError(GroutError, ValueError):
    """A request was refused, before any work was done for it unless a subclass says otherwise."""


class InvalidSamplingParams(RequestError):
    """A sampling parameter is out of range.

    `param` is the name of the offending `SamplingParams` field.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class GrammarError(RequestError):
    """A grammar cannot be used, or leads a reply to where nothing may follow; the message names the
    place."""


class QueueFull(RequestError):
    """As many requests are waiting as `max_queue` allows; later there may be room.

    `waiting` and `limit` are numbers of requests.
    """

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests are waiting and the queue holds {limit} (max_queue)")
        self.waiting = waiting
        self.limit = limit


class InvalidPrompt(RequestError):
    """The prompt is empty or holds token ids outside the vocabulary."""


class PromptTooLong(RequestError):
    """The prompt leaves no room for a single generated token.

    `prompt_tokens` and `max_model_len` are both in tokens.
    """

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens but this server's context is "
            f"{max_model_len} tokens, of which at least one must be left for the reply; "
            f"shorten the prompt to at most {max_model_len - 1} tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class OutOfMemory(GroutError):
    """The model or its KV cache does not fit in the device's memory.

    `needed` and `available` are bytes.
    """

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class PageError(GroutError):
    """A KV page was freed twice, is unknown, or is not there to be allocated."""


class EngineClosed(GroutError):
    """The engine was closed before the request finished, or before it was made."""


class RequestAborted(GroutError):
    """The request was aborted by its caller."""


class RequestTimeout(GroutError):
    """The request took longer than `EngineConfig.request_timeout`, `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request was not finished within {seconds:g} s (request_timeout)")
        self.seconds = seconds


class BadLogits(GroutError):
    """The model gave NaN for this request: no token can be chosen."""


class StepFailed(GroutError):
    """A step of the model failed while this request was running; `__cause__` is the failure."""


class EngineDead(GroutError):
    """The engine hit a failure it cannot recover from; `__cause__` is that failure."""


class EngineHung(GroutError):
    """The step under way has run for `seconds`, longer than `EngineConfig.step_timeout`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the step under way has not ended for {seconds:.0f} s (step_timeout); if it does not "
            "end, restart the server"
        )
        self.seconds = seconds
