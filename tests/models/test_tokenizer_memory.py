"""What a tokenizer keeps of the texts it has seen."""

import ctypes

import pytest

from models import Tokenizer


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    """Of the C heap, over all threads."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("only glibc says what is in use")
    mallinfo.restype = Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def test_long_words_do_not_pile_up() -> None:
    """Without a limit 10,000 of them take 60 MB, and as much again in every thread."""
    tokenizer = Tokenizer.byte_level()
    tokenizer.encode("x")
    before = bytes_in_use()
    for number in range(6000):
        assert len(tokenizer.encode(f"{number:x}".rjust(200, "x"))) == 200
    assert bytes_in_use() - before < 15e6
