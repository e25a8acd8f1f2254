"""Classify a backend's exception by type, errno, error code and HTTP status.

Message texts are never read: they differ between servers and change between releases. An unrecognised error means "the
object may be written", which is always safe, because the caller then reads back. No I/O, and no import of any backend:
replies are recognised by their attributes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from dataclasses import dataclass

from cnr_store.errors import AccessDenied, StorageFailure
from cnr_store.storage.base import CreateOutcome
from cnr_store.storage.redaction import Secrets

_EXISTS_CODES = frozenset({"PreconditionFailed", "BlobAlreadyExists", "ConditionNotMet", "412", "304"})
_EXISTS_STATUS = frozenset({412, 304})  # 304 for 412: minio#19442
_UNDECIDED_CODES = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_UNDECIDED_STATUS = frozenset({409, 429})  # S3 conflict; GCS conflict and rate limit on one object
_DENIED_STATUS = frozenset({401, 403})
_DENIED_ERRNO = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_ROOT_CODES = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AccountNotFound"})
_ABSENT_CODES = frozenset({"NoSuchKey", "BlobNotFound", "ResourceNotFound"})
_PAST_END_CODES = frozenset({"InvalidRange", "416"})
_NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "CredentialUnavailableError"
})  # fmt: skip
"""Exception classes of the drivers' libraries (botocore, google.auth, azure.identity)."""
_ADVICE = {
    errno.ENOSPC: ": the disk is full; free some space, then `cnr maintain`, or a relay's next round, deletes more",
    errno.EDQUOT: ": the quota is used up; free some space there",
    errno.EFBIG: ": the file system, or a limit of this process (ulimit -f), allows no file of that size",
}
_DENIED_BY_SERVER = (
    "check the credentials and their rights. Object stores also answer so for a missing key when the right to list is "
    "missing"
)
_DENIED_BY_FOLDER = "this user lacks the right: check owner, group and mode of the folder (`ls -ld`)"
_DENIED_ADVICE: dict[int | None, str] = {
    errno.EROFS: "the file system is read-only: mount it writable, or use another folder",
    errno.EACCES: _DENIED_BY_FOLDER,
    errno.EPERM: _DENIED_BY_FOLDER,
}
_LONGEST_CHAIN = 10
_CUT_OFF = {
    "botocore": {"HTTPClientError", "ConnectionError"},
    "aiohttp": {"ClientConnectionError", "ClientPayloadError"},
    "azure": {"ServiceRequestError", "ServiceResponseError"},
}
"""Exception classes of the drivers' libraries for a request without a complete answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer: error code and HTTP status, each None if the exception does not have it."""

    code: str | None
    status: int | None


def create_outcome(error: BaseException) -> CreateOutcome:
    """Return the outcome of an exclusive create that raised; never `CREATED`.

    The outermost classified error in the chain decides. Check `is_denied` first.
    """
    for link in _chain(error):
        if isinstance(link, FileExistsError):
            return CreateOutcome.EXISTS
        if _is_cut_off(link):
            return CreateOutcome.UNKNOWN
        reply = reply_of(link)
        if reply is not None:
            return _outcome_of(reply)
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        # s3fs turns a 412 whose body does not name the condition into EINVAL (SeaweedFS, Ceph), and some versions do
        # not attach the reply as the cause.
        return CreateOutcome.EXISTS
    return CreateOutcome.UNKNOWN


def is_denied(error: BaseException) -> bool:
    """Return whether the backend refused the credentials or the right to write.

    The outermost classified error in the chain decides: after a refused attempt, a later one that was cut off may have
    been written.
    """
    for link in _chain(error):
        if isinstance(link, PermissionError) or (isinstance(link, OSError) and link.errno in _DENIED_ERRNO):
            return True
        if _is_cut_off(link) or isinstance(link, (FileNotFoundError, FileExistsError)):
            return False
        reply = reply_of(link)
        if reply is not None:
            return reply.status in _DENIED_STATUS
    return False


def is_absent(error: BaseException) -> bool:
    """Return whether the object does not exist, and its bucket or container, as far as known, does."""
    found = False
    for link in _chain(error):
        reply = reply_of(link)
        if reply is not None:
            if reply.code in _NO_ROOT_CODES:
                return False
            found = found or reply.code in _ABSENT_CODES or reply.status == 404
        found = found or isinstance(link, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    return found


def is_past_end(error: BaseException) -> bool:
    """Return whether a range began at or after the end of an existing object."""
    replies = [reply for reply in map(reply_of, _chain(error)) if reply is not None]
    return any(reply.status == 416 or reply.code in _PAST_END_CODES for reply in replies)


def reply_of(error: BaseException) -> Reply | None:
    """Return the server's answer from one exception (botocore, azure-core or gcsfs), or None."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore ClientError
        code = response.get("Error", {}).get("Code")
        status = _status(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        text = None if code is None else str(code)
        return Reply(text, _status(text) if status is None else status)
    if hasattr(error, "status_code"):  # azure-core HttpResponseError
        status, code = _status(error.status_code), getattr(error, "error_code", None)
        # The SDK's error codes are string enums; their str() is not the value.
        text = None if code is None else str(getattr(code, "value", code))
        return None if status is None and text is None else Reply(text, status)
    # aiohttp ClientResponseError, whose code is deprecated; gcsfs HttpError, google-api-core.
    status = _status(getattr(error, "status", None)) or _status(getattr(error, "code", None))
    return None if status is None else Reply(None, status)


def storage_failure(
    error: BaseException, *, action: str, url: str, key: str | None, secrets: Secrets
) -> StorageFailure:
    """Return the error to raise for a backend's exception, with a cause that contains no options.

    Parameters
    ----------
    action
        A verb for the message, such as "reading".
    """
    what = f"{action} {key!r} in {url}" if key else f"{action} {url}"
    reply = next((reply for reply in map(reply_of, _chain(error)) if reply is not None), None)
    shown = type(error).__name__
    if reply is not None:
        shown += f", code {reply.code}" if reply.code else ""
        shown += f", status {reply.status}" if reply.status else ""
    elif isinstance(error, OSError) and error.errno is not None:
        shown += f", {errno.errorcode.get(error.errno, error.errno)}"
    failure: StorageFailure
    if is_denied(error):
        code = error.errno if reply is None and isinstance(error, OSError) else None
        failure = AccessDenied(
            f"{what} was refused ({shown}); {_DENIED_ADVICE.get(code, _DENIED_BY_SERVER)}",
            path=key,
            found=shown,
        )
    elif reply is not None and reply.code in _NO_ROOT_CODES:
        failure = StorageFailure(
            f"{what} failed ({shown}): the bucket or container does not exist; create it first",
            path=key,
            found=shown,
        )
    elif any(type(link).__name__ in _NO_CREDENTIALS for link in _chain(error)):
        failure = AccessDenied(
            f"{what} failed ({shown}): the driver found no credentials; set them in the environment or the driver's "
            "own files, or pass storage_options",
            path=key,
            found=shown,
        )
    else:
        advice = _ADVICE.get(error.errno, "") if isinstance(error, OSError) and error.errno is not None else ""
        failure = StorageFailure(f"{what} failed ({shown}){advice}", path=key, found=shown)
    failure.__cause__ = secrets.without(error)
    return failure


def _outcome_of(reply: Reply) -> CreateOutcome:
    if reply.code in _UNDECIDED_CODES:
        return CreateOutcome.UNDECIDED
    if reply.code in _EXISTS_CODES or reply.status in _EXISTS_STATUS:
        return CreateOutcome.EXISTS
    if reply.status in _UNDECIDED_STATUS:
        return CreateOutcome.UNDECIDED
    return CreateOutcome.UNKNOWN


def _is_cut_off(error: BaseException) -> bool:
    """Return whether the request ended without an answer, so its effect is unknown."""
    if isinstance(error, (TimeoutError, ConnectionError, asyncio.CancelledError)):
        return True
    kinds = type(error).__mro__
    return any(kind.__name__ in _CUT_OFF.get(kind.__module__.partition(".")[0], ()) for kind in kinds)


def _status(value: object) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return int(value) if isinstance(value, int) and 100 <= value <= 599 else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
