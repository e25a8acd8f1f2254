"""A proxy on loopback that lets so many bytes per second through, shared by all connections; each way has its own.

It runs in a process of its own, so that what is measured behind it does not share an interpreter with it. Requests go
to the server as they come, ``Host`` included, so signatures hold. Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_PIECE_BYTES = 64 * 1024
_BURST_S = 0.01
"""How far behind its rate the link may catch up at once: sleeps are never exact."""


@contextlib.contextmanager
def throttled_proxy(server_port: int, bytes_per_s: float, upload_bytes_per_s: float = math.inf) -> Iterator[int]:
    """Run a proxy to a server on loopback in another process; yields its port.

    Parameters
    ----------
    server_port
        Of the server.
    bytes_per_s, upload_bytes_per_s
        Of answers, and of requests.
    """
    command = [sys.executable, __file__, str(server_port), str(bytes_per_s), str(upload_bytes_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


class _Link:
    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now - _BURST_S, self._free_at) + size_bytes / self._bytes_per_s
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


def _pump(source: socket.socket, target: socket.socket, link: _Link | None) -> None:
    memory = bytearray(_PIECE_BYTES)
    view = memoryview(memory)
    with contextlib.suppress(OSError):
        while size := source.recv_into(memory):
            if link is not None:
                link.take(size)
            target.sendall(view[:size])
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _serve(server_port: int, bytes_per_s: float, upload_bytes_per_s: float) -> None:
    down = _Link(bytes_per_s)
    up = None if math.isinf(upload_bytes_per_s) else _Link(upload_bytes_per_s)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", server_port))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for arguments in ((client, server, up), (server, client, down)):
                threading.Thread(target=_pump, args=arguments, daemon=True).start()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
