"""The documents at the root: the identity of a store, and the marker of a relay (spec, sections 3.2 and 7.11). Pure."""

from __future__ import annotations

from cnr_store.errors import CorruptStore, NewerFormat
from cnr_store.format.documents import decode_document
from cnr_store.format.records import FORMAT, MAJOR, Identity, RelayMarker

RESTORE_IDENTITY = "restore it from a backup, or from a relay, which has the same bytes"
"""What to do if ``cnr.json`` is lost or damaged: without it no command can open the store, `cnr verify` neither."""


def decode_identity(data: bytes, where: str) -> Identity:
    """Parse ``cnr.json``; refuses other formats and newer majors.

    Raises
    ------
    CorruptStore, NewerFormat
    """
    header = decode_document(data, dict, where, RESTORE_IDENTITY)
    if header.get("format") != FORMAT:
        raise CorruptStore(
            f"{where} is not a {FORMAT} identity; check the place, or {RESTORE_IDENTITY}",
            path=where,
            found=header.get("format"),
        )
    major = header.get("major")
    if isinstance(major, int) and major > MAJOR:
        raise NewerFormat(
            f"{where} has format {major}.{header.get('minor')}, this library reads up to {MAJOR}; "
            "install a newer cnr-store",
            path=where,
            expected=MAJOR,
            found=major,
        )
    return decode_document(data, Identity, where, RESTORE_IDENTITY)


def decode_relay_marker(data: bytes, store_uuid: str, where: str) -> RelayMarker:
    """Parse ``relay.json`` and check that it belongs to that store.

    Raises
    ------
    CorruptStore
    """
    marker = decode_document(data, RelayMarker, where)
    if marker.store_uuid != store_uuid:
        raise CorruptStore(
            f"{where} belongs to store {marker.store_uuid}, expected {store_uuid}; two stores were mixed, or another "
            "store is copied here: use an empty root",
            path=where, expected=store_uuid, found=marker.store_uuid,
        )  # fmt: skip
    return marker
