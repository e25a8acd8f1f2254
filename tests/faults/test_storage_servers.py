"""What only a real server can show: refused credentials, missing buckets, requests per call, whole buckets."""

from __future__ import annotations

import base64
import traceback
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from cnr_store.errors import AccessDenied, StorageFailure
from cnr_store.storage import CreateOutcome, Storage, open_storage
from tests.support.servers import AzureServer, Place, S3Server

pytestmark = pytest.mark.servers

CALLS: dict[str, Callable[[Storage], Any]] = {
    "read": lambda storage: storage.read("a"),
    "put": lambda storage: storage.put("a", b"x"),
    "create": lambda storage: storage.create("a", b"x"),
    "list_objects": lambda storage: list(storage.list_objects("")),
    "list_folders": lambda storage: storage.list_folders("data"),
    "delete": lambda storage: storage.delete(["a"]),
    "probe": lambda storage: storage.probe(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_s3_refuses_a_wrong_secret(s3_place: Place, call: Callable[[Storage], Any]) -> None:
    wrong = f"wrong-{uuid.uuid4().hex}"
    storage = open_storage(s3_place.url, storage_options={**s3_place.storage_options, "secret": wrong})

    with pytest.raises(AccessDenied) as caught:
        call(storage)

    said = "".join(traceback.format_exception(caught.value))
    assert wrong not in said
    assert s3_place.storage_options["key"] not in said


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_azure_refuses_a_wrong_key(azure_place: Place, call: Callable[[Storage], Any]) -> None:
    wrong = base64.b64encode(uuid.uuid4().bytes * 4).decode()
    fields = azure_place.storage_options["connection_string"].split(";")
    changed = ";".join(f"AccountKey={wrong}" if field.startswith("AccountKey") else field for field in fields)
    storage = open_storage(azure_place.url, storage_options={"connection_string": changed})

    with pytest.raises(AccessDenied) as caught:
        call(storage)

    assert wrong not in "".join(traceback.format_exception(caught.value))


def test_a_missing_s3_bucket_is_no_absent_object(seaweed: S3Server) -> None:
    storage = open_storage(f"s3://no-{uuid.uuid4().hex[:8]}/root", storage_options=seaweed.storage_options)

    # Reading only: a write makes SeaweedFS create the bucket.
    with pytest.raises(StorageFailure, match="create it first"):
        storage.read("a")


@pytest.mark.parametrize("call", ["read", "put", "probe"])
def test_a_missing_azure_container_is_no_absent_object(azurite: AzureServer, call: str) -> None:
    storage = open_storage(f"abfs://no-{uuid.uuid4().hex[:8]}/root", storage_options=azurite.storage_options)

    with pytest.raises(StorageFailure, match="create it first"):
        CALLS[call](storage)


def test_a_whole_bucket_can_be_a_root(seaweed: S3Server) -> None:
    bucket = f"whole-{uuid.uuid4().hex[:8]}"
    seaweed.client().create_bucket(Bucket=bucket)
    storage = open_storage(f"s3://{bucket}", storage_options=seaweed.storage_options)

    storage.probe()
    storage.put("data/a/x", b"x")

    assert storage.create("cnr.json", b"{}") is CreateOutcome.CREATED
    assert [stat.key for stat in storage.list_objects("")] == ["cnr.json", "data/a/x"]
    assert storage.list_folders("data") == ["a"]


def test_a_read_is_one_get_and_a_create_is_one_put(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(s3_place.url, storage_options=s3_place.storage_options)
    storage.put("commits/0.json", b"record")
    sent: list[str] = []
    fs = storage._fs  # type: ignore[attr-defined]
    call_s3 = fs._call_s3

    async def counting(method: str, *args: Any, **options: Any) -> Any:
        sent.append(method)
        return await call_s3(method, *args, **options)

    monkeypatch.setattr(fs, "_call_s3", counting)

    assert storage.read("commits/0.json") == b"record"
    assert storage.read("commits/1.json") is None
    assert storage.create("commits/1.json", b"record") is CreateOutcome.CREATED
    assert storage.create("commits/1.json", b"other") is CreateOutcome.EXISTS
    assert sent == ["get_object", "get_object", "put_object", "put_object"]
