"""GBNF, llama.cpp's form of grammars, which vLLM takes too: told from Lark, and made into it.

llguidance's converter reads it. The Lark is written here: what the converter writes means something
else in places (`.` is no line break, `--` in a class takes characters away), or is no Lark.
"""

import json
import re
from collections.abc import Iterator, Mapping

from llguidance import gbnf_to_lark as gbnf

from grout.errors import GrammarError

_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|.)|[^\\]", re.DOTALL)
_NUMBERED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_LATIN = 0x100
_ANY = "/(.|\\n)/"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF rather than Lark: `name ::=` begins a rule in no Lark."""
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """The same grammar in Lark. Raises `GrammarError` naming line and place.

    Rules that use no others, or only such, become terminals. Those take as much text as they can:
    space that a rule allows at its end is never left for what follows.
    """
    _check_rules(text)
    try:
        rules = gbnf.GrammarParser().parse(_NUMBERED.sub(_character, text))
        write = _Writer(_names(rules), text)
        lines = [f"{write.names[name]}: {write(r.alternatives)}" for name, r in rules.items()]
    except gbnf.GbnfToLarkError as error:
        raise GrammarError(f"the GBNF grammar: {error}") from None
    except RecursionError:
        raise GrammarError("the GBNF grammar is nested too deeply") from None
    except IndexError:
        raise GrammarError("the GBNF grammar: it ends inside an escape") from None
    return "\n".join(lines)


def _names(rules: Mapping[str, gbnf.RuleNode]) -> dict[str, str]:
    """What rules are called in Lark: in capitals if they are terminals."""
    uses = {name: set(_used(rule)) for name, rule in rules.items()}
    terminals: set[str] = set()
    while found := {n for n, used in uses.items() if used <= terminals} - terminals - {"root"}:
        terminals |= found
    names = {"root": "start"}
    for at, name in enumerate(rules):
        called = f"r{at}_" + re.sub(r"[^a-zA-Z0-9]", "_", name).lower()
        names.setdefault(name, called.upper() if name in terminals else called)
    return names


def _used(node: gbnf.ASTNode) -> Iterator[str]:
    if isinstance(node, gbnf.RuleRefNode):
        yield node.name
    for child in node.children():
        yield from _used(child)


class _Writer:
    """Parts of rules in Lark. names: of the rules, as they are there."""

    def __init__(self, names: Mapping[str, str], text: str) -> None:
        self.names = names
        self._text = text

    def __call__(self, node: gbnf.ASTNode) -> str:
        match node:
            case gbnf.AlternativeNode(alternatives=nodes):
                return "(" + " | ".join(map(self, nodes)) + ")"
            case gbnf.SequenceNode(nodes=nodes):
                return " ".join(map(self, nodes)) or '""'
            case gbnf.LiteralNode(value=value):
                return json.dumps("".join(c for c, _ in _characters(value)), ensure_ascii=False)
            case gbnf.RegexNode(rx="."):
                return _ANY
            case gbnf.RegexNode(rx=rx):
                return self._class(rx)
            case gbnf.RepetitionNode(node=inner, min_times=least, max_times=most):
                if most == 0 and least == 0:
                    return '""'
                times = f"{least},{'' if most is None else most}"
                unbounded = {"0,": "*", "1,": "+"}
                return f"({self(inner)}){unbounded.get(times, f'{{{times}}}')}"
            case gbnf.RuleRefNode(name=name):
                if name not in self.names:
                    raise GrammarError(self._unknown(name))
                return self.names[name]
        raise TypeError(f"a grammar has no {type(node).__name__}")

    def _class(self, source: str) -> str:
        """A class of characters, `source` as the converter has it: "[...]", / and [ escaped."""
        chars = list(_characters(source[1:-1]))
        negated = chars[:1] == [("^", False)]
        del chars[: int(negated)]
        ranges = ""
        while chars:
            first = last = chars.pop(0)[0]
            if len(chars) > 1 and chars[0] == ("-", False):
                last = chars[1][0]
                del chars[:2]
            if last < first:
                raise GrammarError(f"the GBNF grammar: {first!r} to {last!r} is no range")
            ranges += f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}"
        if ranges:
            return f"/[{'^' * negated}{ranges}]/"
        if negated:
            return _ANY
        raise GrammarError("the GBNF grammar: [] is no character")

    def _unknown(self, name: str) -> str:
        found = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self._text)
        where = "" if found is None else f" at line {_line(self._text, found.start())}"
        return f"the GBNF grammar: there is no rule '{name}', which is used{where}"


def _characters(source: str) -> Iterator[tuple[str, bool]]:
    """Characters that a literal or a class is written as, and whether with a backslash."""
    for found in _ESCAPE.findall(source):
        if len(found) == 1:
            yield found, False
        elif len(found) > 2:
            yield chr(int(found[2:], 16)), True
        else:
            yield _CONTROL.get(found[1], found[1]), True


def _check_rules(text: str) -> None:
    lines: dict[str, int] = {}
    for found in _RULE.finditer(text):
        name, line = found[1], _line(text, found.start(1))
        if name in lines:
            raise GrammarError(
                f"the GBNF grammar: rule '{name}' at line {line} is already at line {lines[name]}"
            )
        lines[name] = line
    if "root" not in lines:
        raise GrammarError("the GBNF grammar has no rule 'root', from which it begins")


def _character(found: re.Match[str]) -> str:
    """An escape that the converter gets wrong, as what it stands for."""
    digits = found[1] or found[2]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        where = _line(found.string, found.start())
        raise GrammarError(f"the GBNF grammar: {found[0]} at line {where} is no character")
    return f"\\x{code:02x}" if code < _LATIN else chr(code)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


__all__ = ["is_gbnf", "to_lark"]
