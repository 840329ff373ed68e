"""The port: held from before a model is loaded until the server has ended, and then free again."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from server.exceptions import CommandError
from server.serve import bind, listen

LOOPBACK = "127.0.0.1"


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with bind(LOOPBACK, 0) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@pytest.mark.parametrize("host", [LOOPBACK, "localhost", "0.0.0.0"])
@pytest.mark.parametrize("listening", [False, True])
def test_a_second_server_is_refused_at_once(
    held: socket.socket, listening: bool, host: str
) -> None:
    """Also while the first still loads its model and does not listen."""
    if listening:
        listen(held)
    if host == "localhost" and socket.getaddrinfo(host, 0)[0][0] != socket.AF_INET:
        pytest.skip("localhost is ::1 here")
    port = port_of(held)
    with pytest.raises(CommandError, match=f"cannot listen on {host}:{port}: .*; stop what uses"):
        bind(host, port).close()


def test_all_addresses_cannot_be_had_twice() -> None:
    with bind("0.0.0.0", 0) as held, pytest.raises(CommandError, match="cannot listen on"):
        bind(LOOPBACK, port_of(held)).close()


def test_nobody_connects_before_the_server_listens(held: socket.socket) -> None:
    address = LOOPBACK, port_of(held)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    listen(held)
    socket.create_connection(address).close()


def test_connections_that_linger_do_not_keep_the_next_server_away(held: socket.socket) -> None:
    listener = held
    for _ in range(3):
        port = port_of(listener)
        listen(listener)
        with socket.create_connection((LOOPBACK, port)) as client:
            # Who closes first is left with a connection that lingers.
            listener.accept()[0].close()
            assert client.recv(1) == b""
        listener.close()
        listener = bind(LOOPBACK, port)
        with pytest.raises(CommandError):
            bind(LOOPBACK, port).close()
    listener.close()


def test_free_ports_are_different_ones(held: socket.socket) -> None:
    with bind(LOOPBACK, 0) as other:
        assert port_of(other) != port_of(held) > 0


def test_a_server_that_listens_first_all_the_same_is_told_in_one_line(held: socket.socket) -> None:
    """As where a system asks for less than Linux does now."""
    if os.name != "posix":
        pytest.skip("makes two sockets share an address")
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.closing(socket.socket()) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            first.bind((LOOPBACK, port_of(held)))
        except OSError:
            pytest.skip("they cannot share one here")
        first.listen()
        with pytest.raises(CommandError, match=f"cannot listen on {LOOPBACK}:{port_of(held)}: "):
            listen(held)
