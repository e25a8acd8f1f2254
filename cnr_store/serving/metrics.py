"""What a loader tells of itself: the outcome of a look at the store, and counts since it was opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one look at the store did.

    Attributes
    ----------
    version, step
        What is served behind it; with ``publish="apply"`` what is served until `Loader.apply`.
    staged
        The version that waits for `Loader.apply`, or None.
    is_updated
        Whether another version is served, or staged, than before.
    rows, bytes
        Changed rows that were put into the tables, and the bytes that were stored for them.
    apply_s
        How long it took until the new versions were visible (staged), reading included, in seconds; 0 without any.
    error
        Why the loader does not serve what it should: the store cannot be read, the channel is gone, `validate` refused
        the version. What was served before stays. None if all is well.
    """

    version: int
    step: int
    staged: int | None
    is_updated: bool
    rows: int
    bytes: int
    apply_s: float
    error: Exception | None


@dataclass(slots=True)
class LoaderMetrics:
    """Counts of a loader since it was opened, and its state now. A loader counts in one of its own, and returns copies.

    Attributes
    ----------
    version, step
        What is served.
    staged
        The version that waits for `Loader.apply`, or None.
    staleness_s
        For how long a newer state than the one served has been there, as far as the loader knows: the time since the
        commit of the first version that it wants and does not serve; 0 if there is none. A store that cannot be reached
        does not show here but in ``checked_s``.
    age_s
        Time since the commit of the version served.
    checked_s
        Time since the loader last learned which version is the newest.
    cursor
        Where the registered cursor stands in the store; None without one, or where it could not be written.
    load_s
        How long the first load took.
    apply_s
        How long the last update to another version took, reading included.
    polls
        Looks at the store.
    updates
        Versions that were published after the first.
    rows, bytes
        Changed rows that were put into the tables, and the bytes that were stored for them.
    errors
        Looks that ended in an error, refusals not counted.
    failures
        How many of the last looks failed in a row.
    refused
        Versions that ``validate`` turned down.
    lookups, retries
        Lookups of this process, and how often one began anew because its view was merged meanwhile.
    error
        What `PollResult.error` of the last look was, as text; None if all is well.
    """

    version: int = 0
    step: int = 0
    staged: int | None = None
    staleness_s: float = 0.0
    age_s: float = 0.0
    checked_s: float = 0.0
    cursor: int | None = None
    load_s: float = 0.0
    apply_s: float = 0.0
    polls: int = 0
    updates: int = 0
    rows: int = 0
    bytes: int = 0
    errors: int = 0
    failures: int = 0
    refused: int = 0
    lookups: int = 0
    retries: int = 0
    error: str | None = None
