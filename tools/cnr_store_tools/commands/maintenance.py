"""Keep stores fast and small, and watch that: metrics."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cnr_store import read_status
from cnr_store_tools.options import Debug, StorageOptions, Url, open_store, parse_address, parse_duration


def metrics(
    url: Url,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Answer scrapes there until SIGTERM, e.g. 127.0.0.1:9464."),
    ] = None,
    max_age: Annotated[
        str, typer.Option("--max-age", metavar="TIME", help="Scrapes within this time are answered from one reading.")
    ] = "30s",
    storage_option: StorageOptions = None,
    debug: Debug = False,  # noqa: ARG001 - read from the arguments by the guard
) -> None:
    """Print the store's Prometheus metrics, or serve them over HTTP."""
    # Only metrics need the client library, which is an optional package.
    from cnr_store_tools.metrics import StoreCollector, metrics_text, serve_metrics

    address = None if listen is None else parse_address(listen)
    max_age_s = parse_duration(max_age, "--max-age")
    with open_store(url, storage_option) as store:
        collector = StoreCollector(lambda: read_status(store), store.url, max_age_s=max_age_s)
        if address is None:
            sys.stdout.write(metrics_text(collector))
            return
        serve_metrics(collector, *address, announce=_announce)


def _announce(host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"serving http://{shown}:{port}/metrics\n")
    sys.stderr.flush()
