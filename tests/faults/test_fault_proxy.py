"""The proxy does to a request what its fault says, to the requests it is aimed at, and nothing to the others."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.fault_proxy import Aim, FaultProxy, NetworkFault, fault_proxy

BODY = b"x" * 100_000


@dataclass
class Server:
    """What arrived whole, as ``METHOD path host``."""

    port: int = 0
    arrived: list[str] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if body == BODY:
                found.arrived.append(f"PUT {self.path} {self.headers['Host']}")
                with suppress(OSError):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(BODY)))
                    self.end_headers()
                    self.wfile.write(BODY)

        def log_message(self, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), Handler) as running:
        found.port = running.server_address[1]
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield found
        running.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as running:
        yield running


def put(proxy: FaultProxy, path: str, connection: http.client.HTTPConnection | None = None) -> bool:
    """Send a request; whether its whole answer came."""
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10) if connection is None else connection
    try:
        client.request("PUT", path, BODY)
        return client.getresponse().read() == BODY
    except (http.client.HTTPException, OSError):
        return False
    finally:
        if connection is None:
            client.close()


def test_without_a_fault_requests_pass_with_their_host_on_one_connection(server: Server, proxy: FaultProxy) -> None:
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)

    assert put(proxy, "/a", client)
    assert put(proxy, "/b", client)

    client.close()
    assert server.arrived == [f"PUT /a 127.0.0.1:{proxy.port}", f"PUT /b 127.0.0.1:{proxy.port}"]


@pytest.mark.parametrize(
    ("fault", "is_answered", "arrives"),
    [
        (NetworkFault.LATE, True, True),
        (NetworkFault.REFUSED, False, False),
        (NetworkFault.CUT_REQUEST, False, False),
        (NetworkFault.CUT_RESPONSE, False, True),
        (NetworkFault.LOST_REPLY, False, True),
        (NetworkFault.STRAGGLER, False, True),
    ],
)
def test_a_fault_hits_the_requests_it_is_aimed_at(
    server: Server, proxy: FaultProxy, fault: NetworkFault, is_answered: bool, arrives: bool
) -> None:
    aim = Aim(fault, "PUT", "/commits/", skip=1)

    with proxy.aimed(aim):
        answers = [put(proxy, path) for path in ("/data/1", "/commits/1", "/commits/2", "/commits/3")]
    proxy.settle()

    assert answers == [True, True, is_answered, True]
    assert aim.hits == proxy.faults[fault.value] == 1
    assert proxy.requests["PUT"] == 4
    paths = sorted(line.split(" ")[1] for line in server.arrived)
    assert paths == ["/commits/1", *(["/commits/2"] if arrives else []), "/commits/3", "/data/1"]
