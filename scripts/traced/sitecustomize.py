"""Python loads this at its start where the folder is on PYTHONPATH: see `scripts/load_heap.py`.

It traces the Python heap and tells, on a socket in the folder named by LOAD_TEST_HEAP, how large it
is and where it has grown. It must not import anything of the program it looks into.
"""

import gc
import json
import os
import socket
import sys
import threading
import tracemalloc


def _serve(listener: socket.socket) -> None:
    before: tracemalloc.Snapshot | None = None
    while True:
        connection, _ = listener.accept()
        with connection:
            word = connection.recv(16)
            reply: dict[str, object] = {"bytes": tracemalloc.get_traced_memory()[0]}
            if word == b"begin":
                gc.collect()
                before = _snapshot()
            elif word == b"end" and before is not None:
                gc.collect()
                grown = _snapshot().compare_to(before, "lineno")[:12]
                reply["grown"] = [
                    f"{one.size_diff / 1024:.1f} KB, {one.count_diff:+d}: {one.traceback}"
                    for one in grown
                    if one.size_diff > 0
                ]
            connection.sendall(json.dumps(reply).encode())


def _snapshot() -> tracemalloc.Snapshot:
    own = tracemalloc.Filter(False, tracemalloc.__file__)
    return tracemalloc.take_snapshot().filter_traces([own, tracemalloc.Filter(False, __file__)])


def _start(folder: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.path.join(folder, str(os.getpid())))
        listener.listen()
    except OSError as error:
        print(f"load_test: cannot trace {sys.argv[:1]}: {error}", file=sys.stderr)
        return
    tracemalloc.start()
    threading.Thread(target=_serve, args=(listener,), name="load-test", daemon=True).start()


if _folder := os.environ.get("LOAD_TEST_HEAP"):
    _start(_folder)
