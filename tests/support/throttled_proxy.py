"""A proxy on loopback: a link of so many bytes per second, shared by all connections, and of so much delay, each way.

It runs in a process of its own, so that what is measured behind it does not share an interpreter with it. Requests go
to the server as they come, ``Host`` included, so signatures hold. Connections begin at full speed, which TCP over a
long way does not. Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

_PIECE_BYTES = 64 * 1024
_BURST_S = 0.01
"""How far behind its rate the link may catch up at once: sleeps are never exact."""


@dataclass(frozen=True, slots=True)
class ThrottledProxy:
    """A running proxy; requests go to ``port`` on loopback."""

    port: int
    _process: subprocess.Popen[str]

    def carried_bytes(self) -> tuple[int, int]:
        """Return the bytes of answers and of requests so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        down, up = self._process.stdout.readline().split()
        return int(down), int(up)


@contextlib.contextmanager
def throttled_proxy(
    server_port: int, bytes_per_s: float, upload_bytes_per_s: float = math.inf, *, delay_s: float = 0.0
) -> Iterator[ThrottledProxy]:
    """Run a proxy to a server on loopback in another process.

    Parameters
    ----------
    server_port
        Of the server.
    bytes_per_s, upload_bytes_per_s
        Of answers, and of requests.
    delay_s
        After which bytes arrive, each way: half of a round trip.
    """
    numbers = (server_port, bytes_per_s, upload_bytes_per_s, delay_s)
    command = [sys.executable, __file__, *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield ThrottledProxy(int(process.stdout.readline()), process)
        finally:
            process.terminate()


class _Link:
    """One way of the link."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self.delay_s = delay_s
        self.carried = 0
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            self.carried += size_bytes
            now = time.monotonic()
            self._free_at = max(now - _BURST_S, self._free_at) + size_bytes / self._bytes_per_s
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


_Arriving = queue.SimpleQueue[tuple[float, bytes] | None]


def _pump(source: socket.socket, target: socket.socket, link: _Link) -> None:
    """Pass on what comes, in order; what is on its way arrives at another thread, if the link has a delay."""
    arriving: _Arriving = queue.SimpleQueue()
    arrival = threading.Thread(target=_arrive, args=(arriving, target), daemon=True)
    if link.delay_s:
        arrival.start()
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            link.take(len(piece))
            if link.delay_s:
                arriving.put((time.monotonic() + link.delay_s, piece))
            else:
                target.sendall(piece)
    if link.delay_s:
        arriving.put(None)
        arrival.join()
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _arrive(arriving: _Arriving, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while (one := arriving.get()) is not None:
            due_s, piece = one
            time.sleep(max(0.0, due_s - time.monotonic()))
            target.sendall(piece)


def _tell(down: _Link, up: _Link) -> None:
    for _ in sys.stdin:
        sys.stdout.write(f"{down.carried} {up.carried}\n")
        sys.stdout.flush()


def _serve(server_port: int, bytes_per_s: float, upload_bytes_per_s: float, delay_s: float) -> None:
    down, up = _Link(bytes_per_s, delay_s), _Link(upload_bytes_per_s, delay_s)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        threading.Thread(target=_tell, args=(down, up), daemon=True).start()
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", server_port))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for arguments in ((client, server, up), (server, client, down)):
                threading.Thread(target=_pump, args=arguments, daemon=True).start()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), *map(float, sys.argv[2:5]))
