"""Servers that ignore the condition of a create: refused, unless the caller says that nobody else writes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest

from cnr_store import RetentionPolicy, Store, maintain, verify_store
from cnr_store.errors import UnsafeBackend
from cnr_store.relay import Relay
from cnr_store.storage import CreateOutcome, open_storage
from cnr_store.storage.remote import AzureStorage, S3Storage
from tests.support.fault_proxy import fault_proxy
from tests.support.memory import store_in_memory
from tests.support.servers import OPEN_BUCKET, AzureServer, Place, S3Server

pytestmark = pytest.mark.servers

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture(params=["s3", "azure"])
def unconditional(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An empty root on a real server behind a proxy that drops ``If-None-Match``; nothing signs the header."""
    if request.param == "s3":
        seaweed: S3Server = request.getfixturevalue("seaweed")
        client = seaweed.client()
        if OPEN_BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=OPEN_BUCKET)
        with fault_proxy(port_of(seaweed.endpoint_url), dropped_headers=("if-none-match",)) as proxy:
            options = {"anon": True, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
            yield Place(f"s3://{OPEN_BUCKET}/{uuid.uuid4().hex}", options)
    else:
        azurite: AzureServer = request.getfixturevalue("azurite")
        container: str = request.getfixturevalue("azure_container")
        server = urlsplit(azurite.url)
        with fault_proxy(port_of(azurite.url), dropped_headers=("if-none-match",)) as proxy:
            options = azurite.sas_options(f"http://127.0.0.1:{proxy.port}{server.path}")
            yield Place(f"abfs://{container}/{uuid.uuid4().hex}", options)


def save(store: Store, step: int) -> None:
    with store.writer() as writer:
        if store.head().record.chain:
            writer.restore()
        with writer.begin(step=step) as txn:
            if step == 0:
                txn.write_table("user", ROWS)
            else:
                txn.write_rows("user", np.asarray([1]), ROWS[:1] + step)


def test_a_server_without_conditional_writes_is_refused(unconditional: Place) -> None:
    with pytest.raises(UnsafeBackend, match="unsafe_single_writer=True") as refused:
        Store.create(unconditional.url, storage_options=unconditional.storage_options)

    assert refused.value.found == CreateOutcome.CREATED.value


def test_a_single_writer_may_use_it(unconditional: Place) -> None:
    """What the error says to pass changed nothing: create worked, and no writer did."""
    url, options = unconditional.url, unconditional.storage_options
    with Store.create(url, storage_options=options, unsafe_single_writer=True, threads=2) as store:
        assert isinstance(store.storage, S3Storage | AzureStorage)
        assert store.identity.exclusive_create == "unsafe_single_writer"
        save(store, 0)
    with Store.open(url, storage_options=options, unsafe_single_writer=True, threads=2) as store:
        save(store, 1)
        store.tag("good")
        assert maintain(store, retention=RetentionPolicy()).outcome == "done"
        assert verify_store(store, deep=True).problems == ()
        head = store.head()

    with Store.open(url, storage_options=options, threads=2) as reader:
        assert reader.head() == head
        assert reader.snapshot().step == 1
        for write in (reader.writer, lambda: reader.tag("other"), lambda: reader.rollback(2)):
            with pytest.raises(UnsafeBackend, match="unsafe_single_writer=True"):
                write()
        assert reader.head() == head


def test_a_relay_may_be_kept_on_it(unconditional: Place) -> None:
    url, options = unconditional.url, unconditional.storage_options
    with store_in_memory(threads=2) as store:
        save(store, 0)
        with pytest.raises(UnsafeBackend):
            Relay(store, url, storage_options=options).advance()

        report = Relay(store, url, storage_options=options, unsafe_single_writer=True).advance()

    assert report.problem is None
    with Store.open(url, storage_options=options, threads=2) as copy:
        assert copy.head() == store.head()


def test_a_create_looks_before_it_writes(unconditional: Place) -> None:
    storage = open_storage(unconditional.url, storage_options=unconditional.storage_options, unsafe_single_writer=True)

    assert storage.create("a", b"first") is CreateOutcome.CREATED
    assert storage.create("a", b"second") is CreateOutcome.EXISTS
    assert storage.read("a") == b"first"
