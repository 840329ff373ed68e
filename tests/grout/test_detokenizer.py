import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grout.detokenizer import Detokenizer, StopScanner, begun_character

pieces = st.lists(st.binary(max_size=6), max_size=30)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    out, at = [], 0
    for size in sizes:
        out.append(data[at : at + size])
        at += size
    return [*out, data[at:]]


def run(parts: list[bytes], stops: tuple[str, ...] = ()) -> list[str]:
    """Deltas for tokens that stand for `parts`, up to a stop."""
    detokenizer = Detokenizer(parts.__getitem__, (), stops)
    deltas = []
    for token in range(len(parts)):
        deltas.append(detokenizer.push(token))
        if detokenizer.stopped:
            return deltas
    return [*deltas, detokenizer.flush()]


def whole_text(parts: list[bytes]) -> str:
    """The text of all parts together, without a character that only begins at their end."""
    return codecs.utf_8_decode(b"".join(parts), "replace", False)[0]


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """What is left of `text`, found character by character."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)]
    return text


@given(pieces)
def test_deltas_join_to_the_whole_decode(parts: list[bytes]) -> None:
    assert "".join(run(parts)) == whole_text(parts)


@given(st.text(max_size=30), st.lists(st.integers(1, 3), max_size=40))
def test_valid_text_never_shows_half_a_character(text: str, sizes: list[int]) -> None:
    deltas = run(cut(text.encode("utf-8", "replace"), sizes))
    whole = text.encode("utf-8", "replace").decode()
    shown = ""
    for delta in deltas:
        shown += delta
        assert whole.startswith(shown)
    assert shown == whole


alphabet = "abé\ufffd🙂"


@given(
    st.text(alphabet, max_size=40),
    st.lists(st.text(alphabet, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_text_ends_exactly_before_the_first_stop(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    deltas = run(cut(text.encode(), sizes), tuple(stops))
    assert "".join(deltas) == cut_at_stop(text, tuple(stops))


@given(pieces, st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_random_bytes_with_stops_match_the_whole(parts: list[bytes], stops: list[str]) -> None:
    assert "".join(run(parts, tuple(stops))) == cut_at_stop(whole_text(parts), tuple(stops))


@pytest.mark.parametrize(
    ("parts", "stops", "deltas"),
    [
        ([b"Hel", b"lo \xf0\x9f", b"\x99\x82!"], (), ["Hel", "lo ", "🙂!", ""]),
        ([b"\xf0\x9f"], (), ["", ""]),
        ([b"a\xf0\x9f\x99"], (), ["a", ""]),
        ([b"\xe4\xbd\xe4"], (), ["\ufffd", ""]),
        ([b"\xf0\x80", b"\xff"], (), ["\ufffd\ufffd", "\ufffd", ""]),
        ([b"one E\xe4"], ("END",), ["one ", "E"]),
        ([b"\xe4", b"x"], ("\ufffd",), ["", ""]),
        ([b"\xe4"], ("\ufffd",), ["", ""]),
        ([b"\xf0\x9f", b"A"], (), ["", "\ufffdA", ""]),
        ([b"one EN", b"D two"], ("END",), ["one ", ""]),
        ([b"one EN", b"TER"], ("END",), ["one ", "ENTER", ""]),
        ([b"one EN"], ("END",), ["one ", "EN"]),
        ([b"aab"], ("ab",), ["a"]),
        ([b"aa", b"ab", b"x"], ("aab",), ["", "a"]),
        ([b"x\n", b"\n", b"y"], ("\n\n", "\n"), ["x"]),
        ([b"abcd"], ("bc", "abcd"), ["a"]),
        ([b"xabc"], ("bc", "abc"), ["x"]),
    ],
)
def test_deltas(parts: list[bytes], stops: tuple[str, ...], deltas: list[str]) -> None:
    assert run(parts, stops) == deltas


def test_special_tokens_have_no_text_and_split_no_character() -> None:
    parts = [b"\xe4\xbd", b"<|special|>", b"\xa0"]
    detokenizer = Detokenizer(parts.__getitem__, {1})
    assert [detokenizer.push(token) for token in range(3)] == ["", "", "\u4f60"]


@given(st.text("a\x80éא你🙂", max_size=6), st.data())
def test_a_prompt_and_its_reply_are_one_text(text: str, data: st.DataObject) -> None:
    """Cut anywhere: the reply begins with the whole of a character that the prompt has part of."""
    raw = text.encode()
    at = data.draw(st.integers(0, len(raw)))
    prompt = [bytes([byte]) for byte in raw[:at]]
    begun = begun_character(prompt.__getitem__, (), range(len(prompt)))
    front = whole_text(prompt)
    assert front.encode() + begun == raw[:at]
    reply = Detokenizer(lambda token: raw[at + token : at + token + 1], begun=begun)
    assert front + reply.whole(range(len(raw) - at)) == text


@pytest.mark.parametrize(
    ("parts", "begun"),
    [
        ([], b""),
        ([b"ab"], b""),
        ([b"a\xf0"], b"\xf0"),
        ([b"\xf0\x9f", b"", b"\x99"], b"\xf0\x9f\x99"),
        ([b"x\xf0\x9f", b"\x99\x82"], b""),
        ([b"\xe0", b"\x80"], b""),
        ([b"\xf0", b"\x9f", b"\xe4"], b"\xe4"),
        ([b"\xf0\x9f", b"<special>", b"\x99"], b""),
        ([b"\xf0\x9f", b"<special>"], b""),
        ([b"<special>", b"\xe4"], b"\xe4"),
    ],
)
def test_the_character_that_a_prompt_begins(parts: list[bytes], begun: bytes) -> None:
    hidden = {at for at, part in enumerate(parts) if part == b"<special>"}
    assert begun_character(parts.__getitem__, hidden, range(len(parts))) == begun


def test_a_begun_character_that_goes_wrong_is_marked() -> None:
    parts = [b"A", b"\x99"]
    assert Detokenizer(parts.__getitem__, begun=b"\xf0\x9f").push(0) == "\ufffdA"
    assert Detokenizer(parts.__getitem__, begun=b"\xe4").whole([1]) == ""
    assert Detokenizer(parts.__getitem__, stops=["\ufffdA"], begun=b"\xe4").push(0) == ""


def test_nothing_comes_after_a_stop() -> None:
    scanner = StopScanner(("x",))
    assert scanner.push("ax") == "a"
    assert scanner.stopped
    assert (scanner.push("more"), scanner.flush()) == ("", "")


def test_a_long_stop_is_held_back_until_it_cannot_match() -> None:
    scanner = StopScanner(("a" * 200 + "b",))
    assert scanner.push("a" * 500) == "a" * 300
    assert scanner.push("c") == "a" * 200 + "c"


@given(
    st.text("ab€", max_size=12),
    st.lists(st.integers(1, 3), max_size=12),
    st.lists(st.text("ab€", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 12),
)
@example("abx", [1, 1, 1], ["ab", "abcd"], 2)
@example("aaa", [1, 1, 1], ["aa"], 2)
def test_the_first_tokens_complete_no_stop(
    text: str, sizes: list[int], stops: list[str], held: int
) -> None:
    parts = cut(text.encode(), sizes)
    detokenizer = Detokenizer(parts.__getitem__, (), stops)
    shown = ""
    for token in range(len(parts)):
        shown += detokenizer.push(token, stops=token >= held)
        if detokenizer.stopped:
            break
    shown += detokenizer.flush()
    passed = len(whole_text(parts[:held]))
    ends = [end for end in range(passed + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert shown == text[: ends[0] - longest]
    else:
        assert shown == text
    assert detokenizer.stopped == bool(ends)
