import pytest
from hypothesis import given
from hypothesis import strategies as st

from grout.detokenizer import Detokenizer, StopScanner

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


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """What is left of `text`, found character by character."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)]
    return text


@given(pieces)
def test_deltas_join_to_the_whole_decode(parts: list[bytes]) -> None:
    assert "".join(run(parts)) == b"".join(parts).decode(errors="replace")


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
    whole = b"".join(parts).decode(errors="replace")
    assert "".join(run(parts, tuple(stops))) == cut_at_stop(whole, tuple(stops))


@pytest.mark.parametrize(
    ("parts", "stops", "deltas"),
    [
        ([b"Hel", b"lo \xf0\x9f", b"\x99\x82!"], (), ["Hel", "lo ", "🙂!", ""]),
        ([b"\xf0\x9f"], (), ["", "\ufffd"]),
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


def test_nothing_comes_after_a_stop() -> None:
    scanner = StopScanner(("x",))
    assert scanner.push("ax") == "a"
    assert scanner.stopped
    assert (scanner.push("more"), scanner.flush()) == ("", "")


def test_a_long_stop_is_held_back_until_it_cannot_match() -> None:
    scanner = StopScanner(("a" * 200 + "b",))
    assert scanner.push("a" * 500) == "a" * 300
    assert scanner.push("c") == "a" * 200 + "c"
