"""GBNF grammars: told from Lark, converted, and refused with the place."""

import pytest

from grout.errors import GrammarError
from grout.gbnf import is_gbnf, to_lark
from grout.grammar import Grammar
from tests.grout.test_grammar import accepts

JSON = r"""
# llama.cpp's own, shortened
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (JSON, ['{"a": [1, -2.5e3, "é\\n"],\n "b":{}}', "{}"], ["[1]", '{"a"}', "{1}"]),
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno"]),
        ('root ::= item+\nitem ::= "- " [^\\r\\n]+ "\\n"', ["- a\n- é\n"], ["- a", "-a\n"]),
        ('root ::= [0-9]{1,3} ("," [0-9]{3}){0,2}', ["1", "12,345,678"], ["1234", "1,23"]),
        ('root ::= "(" root ")" | firstName\nfirstName ::= [a-z]*', ["((ab))", ""], ["(a"]),
        ('root ::= a-b # one\na-b ::= (\n  "x" |\n  "y"\n)', ["x", "y"], ["", "z"]),
        (
            r'root ::= "\u0041\x22\x5c" [\u3040-\u30ff]+ "\U0001F600" [^\u0000-\u001F]',
            ['A"\\あい😀!'],
            ['A"\\あい😀\n', 'A"\\a😀!', "AAAあ😀!"],
        ),
        (r"root ::= [\x5d\x2d&&~~]+ [/[]", ["]-&~/", "&["], ["a/", "\\["]),
        # Not the number that is an escape's, but a backslash and text.
        (r'root ::= "\\x41"', ["\\x41"], ["A", "\\A"]),
        ("  \t root::=[.]?", [".", ""], ["x"]),
        ('root ::= "x" . "y"', ["x\ny", "xéy"], ["xy"]),
        (r"root ::= [+--]+ [^!--] [a-]", ["+,-xa", "-/-"], [".xa", "+#a", "+,-x^"]),
        ('root ::= ([0-9]+)? ("a"{2}){2} "x"{0}', ["12aaaa", "aaaa"], ["aa", "aaaax"]),
        ('root ::= "\\[\t\\]\n" 1a\n1a ::= "é"', ["[\t]\né"], ["["]),
        (
            'root ::= start a-b a_b é\nstart ::= "s"\na-b ::= "x"\na_b ::= "y"\né ::= "z"',
            ["sxyz"],
            ["sxxz"],
        ),
        (r"root ::= [\x5e\x2da] [^]", ["^\n", "-a"], ["b"]),
    ],
)
def test_what_it_accepts(text: str, good: list[str], bad: list[str]) -> None:
    assert is_gbnf(text)
    grammar = Grammar.lark(to_lark(text))
    for each in good:
        assert accepts(grammar, each), each
    for each in bad:
        assert not accepts(grammar, each), each


@pytest.mark.parametrize(
    "text",
    [
        'start: "a"',
        '// root ::= "a"\nstart: "::="',
        'start: x\nx: /root ::= y/\n?y: "a"\nZ: "b"',
        "%llguidance {}\nstart: /a/",
    ],
)
def test_lark_is_something_else(text: str) -> None:
    assert not is_gbnf(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('root ::= "a"\nx ::= "b"\nroot ::= "c"', "'root' at line 3 is already at line 1"),
        ('x ::= "a"', "no rule 'root'"),
        ('root ::= "a"\nx ::= [z-a]', "'z' to 'a' is no range"),
        ("root ::= []", r"\[\] is no character"),
        ('root ::= "a" (\n  (x | food) "b")\nfoo ::= "c"', "no rule 'x', which is used at line 2"),
        ('root ::= a\na ::= "b"\n | "c"', r"Expected name at line 3, .* \^ '\| \"c\"'"),
        ('root ::= "abc', r"Unexpected end of input at line 1, 'root ::= \"abc' \^ ''"),
        ("root ::= [abc", "Unexpected end of input at line 1"),
        ('root ::= "a" ("b"', r"Expected '\)' at line 1"),
        ('root ::= "a"\nx ::= "b" <c>', r"Expected name at line 2, .* \^ '<c>'"),
        (r'root ::= "\q"', r"Invalid escape sequence \\q at line 1"),
        ('root ::= "a"{2,x}', "Expected '}' at line 1"),
        ('root ::= "a\\', "ends inside an escape"),
        ('root ::= "a"\nx ::= "\\uD800"', r"\\uD800 at line 2 is no character"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    assert is_gbnf(text)
    with pytest.raises(GrammarError, match=says):
        to_lark(text)
