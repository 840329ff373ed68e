"""What the scripted model replies, by the marker in the prompt."""

import json
from typing import Any

from tests.server.scripted import END, LOOP, OTHER_END, Cutter, Script, marker

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
EMOJI = "repeat 😀👩\u200d🚀 三次"
MARKS = (
    "👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪 1️⃣ 👍🏽 e\u0301 n\u0303\u0323 각 각 ก็ "
    "\u05e9\u05dc\u05d5\u05dd\r\n\ttab \u2028 \ufeff 𝔘𠮷 z\u200d"
)
THOUGHT, ANSWER = "Let me see: 2 < 3 and </b>", "It is 東京.\n"
ARGUMENTS = (
    '{"city": "東京", "注": {"深": [{"層": ["a\\"b", "\\u4e09</tool_call>", 2.50, null]}, {}], '
    '"😀": "👩\u200d🚀"}}'
)
CALL_BODY = f'\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n'
OTHER_CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC+8"}}\n</tool_call>'
THIRD_CALL = '<tool_call>{"arguments":{},"name":"ping"}</tool_call>'
BAD_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call> sorry'
CUT_CALL = '\n{"name": "get_weather", "arguments": {"town": "横'
BROKEN = b"\xff ok \xf0\x9f|\xe4\xb8\xe4\xb8\x89 \x80 fine"

assert json.loads(ARGUMENTS)["注"]["深"][0]["層"][1] == "三</tool_call>"


def _scripts() -> dict[str, Script]:
    new = Cutter()
    take, cut = new.take, new.cut
    alphabet = take("A", "BC", "D", "EFG", "HIJK", "LM", "NOPQRSTUVWXYZ")
    empty = take("\n\n", "\n\n\n", "Plain 三.")
    return {
        "alphabet": [*alphabet, END],
        "emoji": [*cut(EMOJI), OTHER_END],
        "marks": [*cut(MARKS, 1), END],
        # Each byte that is no character for itself, a character cut short, and text after it.
        "broken": [*take(b"\xff", b" ok \xf0", b"\x9f|\xe4", b"\xb8\xe4\xb8", b"\x89 \x80"),
                   *take(b" fine"), END],
        "thought": ["<think>", *cut(f"\n{THOUGHT}\n"), "</think>", *cut(f"\n\n{ANSWER}"), END],
        "opened thought": [*cut("We see: 又\n"), "</think>", *cut("\n\nSeen."), END],
        "endless thought": ["<think>", *cut("\nand so on 又"), LOOP],
        "unfinished thought": ["<think>", *cut("\nThen 三\n"), END],
        "no thought": ["<think>", empty[0], "</think>", *empty[1:], END],
        "split thought": [*take("<thi", "nk>sp", "lit</", "think>\n", "\nand said"), END],
        "late thought": [*cut("First <think>no</think> markup"), END],
        "call": ["<tool_call>", *cut(CALL_BODY, 1), "</tool_call>", END],
        "calls": ["<think>", *cut("\nTwo.\n"), "</think>", *cut("\n\nBoth: 三\n"),
                  *cut(f"{OTHER_CALL}\n{THIRD_CALL}", 4), END],
        "cut call": ["<tool_call>", *cut(CUT_CALL), END],
        "bad call": [*cut(BAD_CALL, 3), END],
        "thought call": ["<think>", *cut("<tool_call>{}</tool_call> was a thought", 5), "</think>",
                         *cut("no call"), END],
        "hi": [*cut("Hello, how are you?"), END],
        "loop": [*cut("over 再 and "), LOOP],
        # The last, which counts in a conversation that has others.
        "done": [*cut("It is sunny: 22 °C."), END],
    }  # fmt: skip


SCRIPTS = _scripts()


def asking(name: str, **more: Any) -> dict[str, Any]:
    """A chat request that the model answers with the script."""
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": f"Go on with {marker(name)}, please"}],
        **more,
    }


def script_text(name: str) -> str:
    """A script's reply, its markup included."""
    pieces = [p.encode() if isinstance(p, str) else p for p in SCRIPTS[name][:-1]]
    return b"".join(pieces).decode(errors="replace")
