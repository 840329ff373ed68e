"""Where in a request something is."""

__all__ = ["join_path"]


def join_path(path: tuple[str | int, ...]) -> str:
    """Return a path as OpenAI writes it: messages[0].content."""
    out = ""
    for step in path:
        if isinstance(step, int):
            out += f"[{step}]"
        else:
            out += f".{step}" if out else step
    return out
