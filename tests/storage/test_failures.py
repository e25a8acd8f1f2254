"""What a backend's exception means: by type, errno, code and status; the texts below are noise on purpose."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any, cast

import aiohttp
import pytest
import s3fs.errors
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError, ServiceResponseError
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from fsspec.exceptions import FSTimeoutError
from gcsfs.retry import HttpError

from cnr_store.errors import AccessDenied, StorageFailure
from cnr_store.storage import CreateOutcome
from cnr_store.storage.failures import create_outcome, is_absent, is_denied, is_past_end, reply_of, storage_failure
from cnr_store.storage.redaction import Secrets

EXISTS, UNDECIDED, UNKNOWN = CreateOutcome.EXISTS, CreateOutcome.UNDECIDED, CreateOutcome.UNKNOWN
MISLEADING = "already exists, not found, access denied, timed out, 412"


def client_error(code: str, status: int | None, **fields: str) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": MISLEADING, **fields}}
    if status is not None:
        response["ResponseMetadata"] = {"HTTPStatusCode": status}
    return ClientError(response, "PutObject")


def from_s3fs(code: str, status: int | None, **fields: str) -> BaseException:
    """The exception that the real driver makes of a server's answer."""
    error: BaseException = s3fs.errors.translate_boto_error(client_error(code, status, **fields))
    return error


class AzureAnswer:
    """The part of an HTTP response that azure-core reads."""

    reason = MISLEADING
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None

    def __init__(self, status: int) -> None:
        self.status_code = status

    def text(self) -> str:
        return MISLEADING


def azure_error(kind: type[HttpResponseError], status: int, code: str) -> HttpResponseError:
    answer: Any = AzureAnswer(status)
    error: Any = kind(message=MISLEADING, response=answer)
    error.error_code = code
    return cast("HttpResponseError", error)


def from_adlfs(error: HttpResponseError) -> BaseException:
    """FileExistsError the way adlfs raises it: inside the handler, without a cause of its own."""
    try:
        try:
            raise error
        except ResourceExistsError:
            raise FileExistsError("blob")  # noqa: B904
    except FileExistsError as raised:
        return raised


CREATE_CASES: list[tuple[str, BaseException, CreateOutcome]] = [
    ("type", FileExistsError(MISLEADING), EXISTS),
    ("errno EEXIST", OSError(errno.EEXIST, MISLEADING), EXISTS),
    ("AWS names the condition", from_s3fs("PreconditionFailed", 412, Condition="If-None-Match"), EXISTS),
    ("SeaweedFS and Ceph do not", from_s3fs("PreconditionFailed", 412), EXISTS),
    ("EINVAL without a cause", OSError(errno.EINVAL, "None"), EXISTS),
    ("bare status as code", from_s3fs("412", 412), EXISTS),
    ("304 for 412", from_s3fs("304", 304), EXISTS),
    ("304 without a code", client_error("Unknown", 304), EXISTS),
    ("S3 conflict", from_s3fs("ConditionalRequestConflict", 409), UNDECIDED),
    ("S3 conflict, no status", client_error("ConditionalRequestConflict", None), UNDECIDED),
    ("S3 operation aborted", from_s3fs("OperationAborted", 409), UNDECIDED),
    ("GCS conflict", HttpError({"code": 409, "message": MISLEADING}), UNDECIDED),
    ("GCS rate limit", HttpError({"code": 429, "message": MISLEADING}), UNDECIDED),
    ("GCS text code", HttpError({"code": "429", "message": MISLEADING}), UNDECIDED),
    ("Azure exists", azure_error(ResourceExistsError, 409, "BlobAlreadyExists"), EXISTS),
    ("adlfs exists", from_adlfs(azure_error(ResourceExistsError, 409, "BlobAlreadyExists")), EXISTS),
    ("Azure condition", azure_error(HttpResponseError, 412, "ConditionNotMet"), EXISTS),
    ("Azure other conflict", azure_error(HttpResponseError, 409, "BlobImmutableDueToPolicy"), UNDECIDED),
    ("S3 internal error", from_s3fs("InternalError", 500), UNKNOWN),
    ("S3 slow down", from_s3fs("SlowDown", 503), UNKNOWN),
    ("S3 request timeout", from_s3fs("RequestTimeout", 400), UNKNOWN),
    ("S3 invalid argument is no refusal", from_s3fs("InvalidArgument", 400), UNKNOWN),
    ("Azure server busy", azure_error(HttpResponseError, 503, "ServerBusy"), UNKNOWN),
    ("GCS backend error", HttpError({"code": 503, "message": MISLEADING}), UNKNOWN),
    ("GCS forbidden without a code", OSError(f"Forbidden: {MISLEADING}"), UNKNOWN),
    ("driver timeout", FSTimeoutError(), UNKNOWN),
    ("read timeout", ReadTimeoutError(endpoint_url="http://x"), UNKNOWN),
    ("reply lost", ConnectionClosedError(endpoint_url="http://x"), UNKNOWN),
    ("reset", ConnectionResetError(errno.ECONNRESET, MISLEADING), UNKNOWN),
    ("cancelled", asyncio.CancelledError(), UNKNOWN),
    ("multipart upload gone", FileNotFoundError(MISLEADING), UNKNOWN),
    ("disk full", OSError(errno.ENOSPC, MISLEADING), UNKNOWN),
    ("never heard of", RuntimeError(MISLEADING), UNKNOWN),
]


@pytest.mark.parametrize(("error", "expected"), [case[1:] for case in CREATE_CASES], ids=[c[0] for c in CREATE_CASES])
def test_a_failed_create_is_sorted_into_three_classes(error: BaseException, expected: CreateOutcome) -> None:
    assert not is_denied(error)
    assert create_outcome(error) is expected


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(MISLEADING),
        OSError(errno.EACCES, MISLEADING),
        OSError(errno.EROFS, MISLEADING),
        from_s3fs("AccessDenied", 403),
        from_s3fs("InvalidAccessKeyId", 403),
        from_s3fs("SignatureDoesNotMatch", 403),
        from_s3fs("403", 403),
        client_error("NeverHeardOf", 403),
        azure_error(HttpResponseError, 403, "AuthorizationFailure"),
        azure_error(HttpResponseError, 401, "NoAuthenticationInformation"),
        HttpError({"code": 401, "message": MISLEADING}),
    ],
    ids=lambda error: f"{type(error).__name__}-{reply_of(error)}",
)
def test_refused_credentials_are_denied_and_never_absent(error: BaseException) -> None:
    failure = storage_failure(error, action="reading", url="s3://b", key="k", secrets=Secrets())

    assert is_denied(error)
    assert not is_absent(error)
    assert type(failure) is AccessDenied
    assert failure.__cause__ is error


@pytest.mark.parametrize("error", [NoCredentialsError(), PartialCredentialsError(provider="env", cred_var="secret")])
def test_credentials_that_no_driver_found_are_asked_for(error: BaseException) -> None:
    """A regression: the error had only the driver's name of it."""
    failure = storage_failure(error, action="reading", url="s3://b", key="k", secrets=Secrets())

    assert type(failure) is AccessDenied
    assert "no credentials; set them in the environment" in str(failure)


def test_a_full_disk_is_called_full_and_says_what_frees_it() -> None:
    """A regression: the message had the name of the errno alone."""
    failure = storage_failure(
        OSError(errno.ENOSPC, MISLEADING), action="writing", url="/data/s", key="k", secrets=Secrets()
    )

    assert "(OSError, ENOSPC): the disk is full; free some space" in str(failure)
    assert "`cnr maintain`" in str(failure)


def test_a_read_only_folder_is_called_that_and_not_wrong_credentials() -> None:
    """A regression: a training whose folder became read-only was told to check its credentials."""
    error = OSError(errno.EROFS, MISLEADING)
    failure = storage_failure(error, action="writing", url="/data/s", key="k", secrets=Secrets())

    assert isinstance(failure, AccessDenied)
    assert "read-only" in str(failure)
    assert "credentials" not in str(failure)


CUT_OFF: list[Callable[[], BaseException]] = [
    TimeoutError,
    FSTimeoutError,
    ConnectionResetError,
    asyncio.CancelledError,
    lambda: ReadTimeoutError(endpoint_url="http://x"),
    lambda: ConnectionClosedError(endpoint_url="http://x"),
    lambda: EndpointConnectionError(endpoint_url="http://x"),
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientPayloadError,
    lambda: ServiceResponseError(MISLEADING),
]


@pytest.mark.parametrize("cut_off", CUT_OFF, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("is_cause", [True, False])
@pytest.mark.parametrize(
    "answer",
    [PermissionError(MISLEADING), client_error("AccessDenied", 403), FileExistsError(MISLEADING)],
    ids=lambda error: type(error).__name__,
)
def test_a_request_that_was_cut_off_behind_an_answer_is_unknown(
    answer: BaseException, is_cause: bool, cut_off: Callable[[], BaseException]
) -> None:
    """A retry may have succeeded although an earlier attempt was denied: the writer must not get a final error."""
    error = cut_off()
    error.__cause__, error.__context__ = (answer, None) if is_cause else (None, answer)

    assert not is_denied(error)
    assert create_outcome(error) is UNKNOWN
    assert type(storage_failure(error, action="reading", url="s3://b", key="k", secrets=Secrets())) is StorageFailure


def test_a_refusal_behind_a_request_that_was_cut_off_is_denied() -> None:
    error = PermissionError(MISLEADING)
    error.__context__ = TimeoutError()

    assert is_denied(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(MISLEADING),
        NotADirectoryError(MISLEADING),
        from_s3fs("NoSuchKey", 404),
        from_s3fs("404", 404),
        azure_error(ResourceNotFoundError, 404, "BlobNotFound"),
    ],
    ids=lambda error: f"{type(error).__name__}-{reply_of(error)}",
)
def test_a_missing_object_is_absent(error: BaseException) -> None:
    assert is_absent(error)
    assert not is_denied(error)


@pytest.mark.parametrize(
    "error",
    [from_s3fs("NoSuchBucket", 404), azure_error(ResourceNotFoundError, 404, "ContainerNotFound")],
    ids=["s3", "azure"],
)
def test_a_missing_bucket_is_a_failure_and_not_an_absent_object(error: BaseException) -> None:
    failure = storage_failure(error, action="reading", url="s3://b", key="k", secrets=Secrets())

    assert not is_absent(error)
    assert type(failure) is StorageFailure
    assert "create it first" in str(failure)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (from_s3fs("InvalidRange", 416), True),
        (azure_error(HttpResponseError, 416, "InvalidRange"), True),
        (HttpError({"code": 416, "message": MISLEADING}), True),
        (OSError(errno.EINVAL, "InvalidRange"), False),
        (from_s3fs("PreconditionFailed", 412), False),
    ],
)
def test_a_range_behind_the_end_is_told_by_its_code(error: BaseException, expected: bool) -> None:
    assert is_past_end(error) is expected


def test_a_failure_names_action_key_place_type_and_code() -> None:
    error = from_s3fs("SlowDown", 503)

    failure = storage_failure(error, action="writing", url="s3://b/r", key="data/x", secrets=Secrets())

    assert type(failure) is StorageFailure
    assert failure.path == "data/x"
    assert failure.__cause__ is error
    for part in ["writing 'data/x'", "s3://b/r", "SlowDown", "503"]:
        assert part in str(failure)
    assert MISLEADING not in str(failure)


def raise_alone() -> None:
    try:
        raise PermissionError("while looking for something else")
    except PermissionError:
        raise RuntimeError("alone") from None


def test_only_the_errors_behind_an_exception_count_not_the_ones_it_hides() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise_alone()

    assert not is_denied(caught.value)
    assert create_outcome(caught.value) is UNKNOWN
