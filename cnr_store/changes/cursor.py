"""The position of a consumer in a log: a small record that it stores with its own data. Pure, no I/O."""

from __future__ import annotations

import msgspec

from cnr_store.errors import BadInput
from cnr_store.format.documents import canonical_json, loads
from cnr_store.format.layout import is_branch_name
from cnr_store.store import Store


class ChangeCursor(msgspec.Struct, frozen=True, kw_only=True):
    """Every change up to ``version`` has been consumed.

    Attributes
    ----------
    store
        The uuid of the store.
    branch
        The uuid of the branch whose log it is; empty for the store's own log.
    version
        The log position.

    Examples
    --------
    >>> cursor = ChangeCursor(store="5" * 32, branch="", version=7)
    >>> ChangeCursor.from_json(cursor.to_json()) == cursor
    True
    """

    store: str
    branch: str
    version: int

    @classmethod
    def at(cls, store: Store, version: int) -> ChangeCursor:
        """Return the cursor of a consumer that has the state of ``version`` of this store or branch. No I/O."""
        return cls(store=store.uuid, branch=store.internals.branch_uuid, version=version)

    @classmethod
    def from_json(cls, text: str | bytes) -> ChangeCursor:
        """Return the cursor that `to_json` wrote.

        Raises
        ------
        BadInput
        """
        try:
            cursor = loads(text.encode() if isinstance(text, str) else text, _DECODER)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise BadInput(f"this is no cursor of a change stream: {error}; start over without one") from error
        if cursor.version < 0 or (cursor.branch and not is_branch_name(cursor.branch)):
            raise BadInput(
                f"this is no cursor of a change stream: version {cursor.version} of branch {cursor.branch[:80]!r}",
                found=cursor.version,
            )
        return cursor

    def to_json(self) -> str:
        """Return the cursor as one line of JSON."""
        return canonical_json(self).decode()

    def check_of(self, store: Store) -> None:
        """Refuse a cursor of another store or branch, whose versions mean something else. No I/O.

        Raises
        ------
        BadInput
        """
        own = ChangeCursor.at(store, self.version)
        if own != self:
            raise BadInput(
                f"the cursor is of store {self.store} (branch {self.branch or 'none'}), and {store.url} is "
                f"{own.store} (branch {own.branch or 'none'}); open that one, or start over without a cursor",
                expected=own.store, found=self.store,
            )  # fmt: skip


# Made while the module is imported, as those of `cnr_store.format.documents`.
_DECODER = msgspec.json.Decoder(ChangeCursor)
