"""What a loader reports: the result of a poll, and counts since it was opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PollResult:
    """The result of one poll.

    Attributes
    ----------
    version, step
        The version served after it; with ``publish="apply"`` until `Loader.apply`.
    staged
        The staged version, which `Loader.apply` publishes, or None.
    is_updated
        Whether a new version was served or staged.
    rows, size_bytes
        Number of changed rows, and their stored bytes.
    apply_s
        Seconds until the new versions were visible (staged), reading included; 0 without any.
    error
        Why the loader does not serve its target: the store cannot be read, the channel was deleted, `validate` refused
        the version. Then the present version stays. None if there was no error.
    """

    version: int
    step: int
    staged: int | None
    is_updated: bool
    rows: int
    size_bytes: int
    apply_s: float
    error: Exception | None


@dataclass(slots=True)
class LoaderMetrics:
    """Counts of a loader since it was opened, and its state now. A loader counts in its own object, and returns copies.

    Attributes
    ----------
    version, step
        The served version.
    staged
        The staged version, which `Loader.apply` publishes, or None.
    is_expired
        Whether the served version has expired in the store, as far as the loader knows: it is served from memory, and
        cannot be loaded again. A version that a loader is pinned to expires unless a tag, a channel or a cursor keeps
        it.
    staleness_s
        Seconds since the commit of the first version that the loader should serve and does not, as far as it knows; 0
        if there is none. An unreachable store shows in ``checked_s``, not here.
    age_s
        Time since the commit of the version served.
    checked_s
        Time since the loader last learned which version is the newest.
    cursor_version
        Where the registered cursor stands in the store; None without one, or where it could not be written.
    load_s
        How long the first load took.
    apply_s
        How long the last update to another version took, reading included.
    polls
        Looks at the store.
    updates
        Versions that were published after the first.
    rows, size_bytes
        Number of changed rows, and their stored bytes.
    errors
        Looks that ended in an error, refusals not counted.
    failures
        How many of the last looks failed in a row.
    refused
        Versions that ``validate`` refused.
    lookups, retries
        Lookups of this process, and how often one began again because its view was merged meanwhile.
    error
        What `PollResult.error` of the last look was, as text; None if all is well.
    """

    version: int = 0
    step: int = 0
    staged: int | None = None
    is_expired: bool = False
    staleness_s: float = 0.0
    age_s: float = 0.0
    checked_s: float = 0.0
    cursor_version: int | None = None
    load_s: float = 0.0
    apply_s: float = 0.0
    polls: int = 0
    updates: int = 0
    rows: int = 0
    size_bytes: int = 0
    errors: int = 0
    failures: int = 0
    refused: int = 0
    lookups: int = 0
    retries: int = 0
    error: str | None = None
