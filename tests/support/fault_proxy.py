"""A proxy on loopback between a client and an object server, with the faults of a network.

It understands just enough of HTTP/1.1 to see one request at a time, so that a fault can aim at the commit records. A
request reaches the server with the bytes the client sent, its ``Host`` included: both servers verify signatures of
what they receive. Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import unquote, urlsplit

_LONGEST_WAIT_S = 60.0
_LINE_BYTES = 64 * 1024


class NetworkFault(Enum):
    """What may happen to one request."""

    LATE = "late"
    """It arrives after `Aim.delay_s`, and all is well."""
    REFUSED = "refused"
    """The connection is closed before anything reaches the server."""
    CUT_REQUEST = "cut request"
    """The connection breaks with half of the request on its way to the server."""
    CUT_RESPONSE = "cut response"
    """The request does its work; the connection breaks in the middle of the answer."""
    LOST_REPLY = "lost reply"
    """The request does its work; the connection is closed without an answer."""
    STRAGGLER = "straggler"
    """The connection is closed at once, and the request arrives all the same, `Aim.delay_s` later."""


@dataclass(frozen=True, slots=True)
class Request:
    """The first line of a request: method, and path without query, percent-decoded."""

    method: str
    path: str


@dataclass(slots=True)
class Aim:
    """Which requests a fault hits: after ``skip`` that match, the next ``count`` that match.

    Attributes
    ----------
    method, part
        The method, and a part of the path; the empty string matches every one.
    hits
        How many were hit.
    """

    fault: NetworkFault
    method: str = ""
    part: str = ""
    skip: int = 0
    count: int = 1
    delay_s: float = 0.05
    hits: int = 0

    def take(self, request: Request) -> bool:
        """Whether this request is hit; counts it."""
        if self.method not in ("", request.method) or self.part not in request.path or self.hits == self.count:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += 1
        return True


@dataclass(slots=True)
class FaultProxy:
    """A running proxy: requests to ``port`` go to ``server_port``, both on loopback.

    Attributes
    ----------
    requests, faults
        How many requests came, by method, and how many of them were hit, by fault.
    dropped_headers
        Names, in lower case, of headers that do not reach the server: as one that knows nothing of them.
    """

    server_port: int
    port: int = 0
    dropped_headers: tuple[str, ...] = ()
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    _aims: list[Aim] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _late: list[threading.Thread] = field(default_factory=list)

    @contextlib.contextmanager
    def aimed(self, *aims: Aim) -> Iterator[None]:
        """Hit what these aims match until the block ends; stragglers may arrive behind it (see `settle`)."""
        with self._lock:
            self._aims.extend(aims)
        try:
            yield
        finally:
            with self._lock:
                self._aims[:] = [aim for aim in self._aims if all(aim is not one for one in aims)]

    def settle(self) -> None:
        """Wait until every straggler has arrived."""
        with self._lock:
            late, self._late = self._late, []
        for thread in late:
            thread.join()

    def drawn(self, request: Request) -> Aim | None:
        """The aim that hits this request, if any."""
        with self._lock:
            self.requests[request.method] += 1
            for aim in self._aims:
                if aim.take(request):
                    self.faults[aim.fault.value] += 1
                    return aim
        return None

    def send_later(self, send: Callable[[], Any], delay_s: float) -> None:
        """Send a request whose client has been told nothing."""

        def work() -> None:
            time.sleep(delay_s)
            with contextlib.suppress(OSError, ValueError):
                send()

        thread = threading.Thread(target=work, daemon=True)
        with self._lock:
            self._late.append(thread)
        thread.start()


@contextlib.contextmanager
def fault_proxy(server_port: int, *, dropped_headers: tuple[str, ...] = ()) -> Iterator[FaultProxy]:
    """Run a proxy to a server on loopback; stopped, with its connections, at the end of the block."""
    proxy = FaultProxy(server_port, dropped_headers=dropped_headers)
    with _Server(proxy) as server:
        proxy.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.settle()
            server.shutdown()
            thread.join()
            server.close_connections()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: FaultProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.proxy = proxy
        self.connections: set[socket.socket] = set()

    def close_connections(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that went away is what this proxy is about."""


class _Connection(socketserver.StreamRequestHandler):
    """One connection of a client: request after request until either side ends it."""

    server: _Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.server.connections.add(self.connection)
        try:
            while self._serve_one():
                pass
        finally:
            self.server.connections.discard(self.connection)

    def _serve_one(self) -> bool:
        """Pass one request on; whether the connection goes on."""
        head = _read_head(self.rfile)
        if not head:
            return False
        method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        headers = _headers(head)
        if headers.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = _without(head, b"expect")
        for name in self.server.proxy.dropped_headers:
            head = _without(head, name.encode())
        data = head + _read_body(self.rfile, headers)
        aim = self.server.proxy.drawn(Request(method, unquote(urlsplit(target).path)))
        return self._pass_on(method, data, None if aim is None else aim.fault, 0.0 if aim is None else aim.delay_s)

    def _pass_on(self, method: str, data: bytes, fault: NetworkFault | None, delay_s: float) -> bool:
        proxy = self.server.proxy
        if fault is NetworkFault.REFUSED:
            return False
        if fault is NetworkFault.CUT_REQUEST:
            with _connected(proxy.server_port) as server:
                server.sendall(data[: len(data) // 2])
            return False
        if fault is NetworkFault.STRAGGLER:
            proxy.send_later(lambda: _exchange(proxy.server_port, method, data), delay_s)
            return False
        if fault is NetworkFault.LATE:
            time.sleep(delay_s)
        answer = _exchange(proxy.server_port, method, data)
        if fault is NetworkFault.LOST_REPLY:
            return False
        if fault is NetworkFault.CUT_RESPONSE:
            self.wfile.write(answer[: len(answer) // 2])
            return False
        self.wfile.write(answer)
        return True


def _exchange(port: int, method: str, data: bytes) -> bytes:
    """Send a whole request on a connection of its own and return the whole answer."""
    with _connected(port) as server:
        server.sendall(data)
        with server.makefile("rb") as stream:
            while True:
                head = _read_head(stream)
                if not head:
                    raise ConnectionResetError("the server ended the connection without an answer")
                status = int(head.split(b" ", 2)[1])
                if status >= 200:
                    break
            if method == "HEAD" or status in (204, 304):
                return head
            headers = _headers(head)
            if "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "").lower():
                raise ConnectionResetError("the answer has no length, so it would end with the connection")
            return head + _read_body(stream, headers)


def _connected(port: int) -> socket.socket:
    server = socket.create_connection(("127.0.0.1", port), timeout=_LONGEST_WAIT_S)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return server


def _read_head(stream: Any) -> bytes:
    """Everything up to the empty line, it included; nothing at the end of the connection."""
    lines: list[bytes] = []
    while True:
        line = stream.readline(_LINE_BYTES)
        if not line:
            return b""
        if line == b"\r\n" and not lines:
            continue
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)


def _headers(head: bytes) -> dict[str, str]:
    fields = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in fields}


def _without(head: bytes, name: bytes) -> bytes:
    return b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(name + b":"))


def _read_body(stream: Any, headers: dict[str, str]) -> bytes:
    """The body as it was sent, with the frames of a chunked one."""
    if "chunked" not in headers.get("transfer-encoding", "").lower():
        return _read_exactly(stream, int(headers.get("content-length", "0")))
    pieces: list[bytes] = []
    while True:
        line = stream.readline(_LINE_BYTES)
        size = int(line.split(b";")[0], 16)
        pieces.append(line + (_read_exactly(stream, size + 2) if size else _read_trailer(stream)))
        if not size:
            return b"".join(pieces)


def _read_trailer(stream: Any) -> bytes:
    lines: list[bytes] = []
    while True:
        line = stream.readline(_LINE_BYTES)
        lines.append(line)
        if line in (b"\r\n", b""):
            return b"".join(lines)


def _read_exactly(stream: Any, size: int) -> bytes:
    data = stream.read(size) if size else b""
    if len(data) != size:
        raise ConnectionResetError(f"the connection ended after {len(data)} of {size} bytes")
    return data
