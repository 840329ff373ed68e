"""GBNF, llama.cpp's form of grammars, which vLLM takes too: told from Lark, and made into it.

llguidance converts it. What that takes wrongly or drops is put right or refused here.
"""

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from grout.errors import GrammarError

_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
# Characters by number; and what stands for more than itself among a regular expression's.
_SPECIAL = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|&(?=&)|~(?=~)", re.DOTALL
)
_LATIN = 0x100


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
        return gbnf_to_lark(_SPECIAL.sub(_plain, text))
    except GbnfToLarkError as error:
        raise GrammarError(f"the GBNF grammar: {error}") from None
    except RecursionError:
        raise GrammarError("the GBNF grammar is nested too deeply") from None
    except Exception as error:
        raise GrammarError(f"the GBNF grammar: {_located(text, str(error))}") from None


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
    if "start" in lines:
        raise GrammarError(
            f"the GBNF grammar: rule 'start' at line {lines['start']} has the name that 'root' "
            "gets in Lark; call it something else"
        )


def _plain(found: re.Match[str]) -> str:
    """The same in a form that says it in Lark as well."""
    digits = found[1] or found[2] or found[3]
    if digits is None:
        return f"\\x{ord(found[0]):02x}" if found[0] in "&~" else found[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        where = _line(found.string, found.start())
        raise GrammarError(f"the GBNF grammar: {found[0]} at line {where} is no character")
    return f"\\x{code:02x}" if code < _LATIN else chr(code)


def _located(text: str, problem: str) -> str:
    """A problem that the converter has with a rule, and the line where that is named first."""
    named = re.search(r"'([\w-]+)'", problem)
    if named is None:
        return "it ends inside an escape" if problem.startswith("string index") else problem
    name = named[1]
    if problem.endswith("already exists"):
        return f"two of its rules are '{name}' in Lark; call one of them something else"
    found = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
    where = "" if found is None else f" at line {_line(text, found.start())}"
    return f"there is no rule '{name}', which is used{where}"


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


__all__ = ["is_gbnf", "to_lark"]
