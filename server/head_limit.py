"""A limit to the heads of requests for uvicorn's httptools protocol, which has none."""

from typing import Any

__all__ = ["HEAD_BYTES", "with_head_limit"]

HEAD_BYTES = 64 * 1024
"""As the protocol on h11 has it."""


def with_head_limit(protocol: Any) -> Any:
    """Return the protocol class, limited where it is made of httptools' callbacks."""
    if not hasattr(protocol, "on_headers_complete"):
        return protocol

    class Limited(protocol):  # type: ignore[misc]  # which class it is is known when it runs
        _head = 0

        def data_received(self, data: bytes) -> None:
            self._head += len(data)
            super().data_received(data)
            # What belongs to no head has set it back to 0 meanwhile.
            if self._head > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

        def on_headers_complete(self) -> None:
            self._head = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._head = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._head = 0
            super().on_message_complete()

    return Limited
