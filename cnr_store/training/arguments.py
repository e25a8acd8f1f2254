"""What a manager's arguments become: options by table, and an open store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cnr_store.errors import BadInput, NotAStore
from cnr_store.runtime.ranks import Ranks, rank_zero
from cnr_store.store import Store
from cnr_store.training.options import StoreOptions
from cnr_store.types import TableDtype
from cnr_store.write.schema_choice import check_options
from cnr_store.write.table_options import TableOptions


def options_by_table(
    options: TableOptions | Mapping[str, TableOptions] | None, tables: Collection[str]
) -> dict[str, TableOptions]:
    """Return the options of every table.

    Raises
    ------
    BadInput
        No `TableOptions`, or those of a table that the model does not have.
    """
    given = TableOptions() if options is None else options
    for one in given.values() if isinstance(given, Mapping) else (given,):
        if not isinstance(one, TableOptions):
            raise BadInput(f"options= takes TableOptions, for all tables or by table; found {one!r}", found=one)
    if isinstance(given, TableOptions):
        return dict.fromkeys(tables, given)
    unknown = sorted(given.keys() - set(tables))
    if unknown:
        raise BadInput(f"options= names tables {unknown}; the model has {sorted(tables)}", table=unknown[0])
    return {table: given.get(table, TableOptions()) for table in tables}


def check_table_options(options: Mapping[str, TableOptions], dtypes: Mapping[str, TableDtype]) -> None:
    """Return if tables can be stored as their options say; ``dtypes`` are those of this rank's tables.

    Raises
    ------
    BadInput
    """
    for table, one in sorted(options.items()):
        if table in dtypes:
            check_options(table, one, dtypes[table])


def open_or_create(url: str, options: StoreOptions, ranks: Ranks) -> Store:
    """Return the store at a URL, created if there is none; or its branch, which must be there.

    Blocks; all ranks call it, and rank 0 opens it first.
    """
    opened: list[Store] = []

    def open_here() -> None:
        try:
            store = Store.open(
                url, branch=options.branch, storage_options=options.storage_options, threads=options.threads
            )
        except NotAStore:
            if options.branch is not None:
                raise
            store = Store.create(url, storage_options=options.storage_options, threads=options.threads)
        else:
            store.internals.finish_creation()
        opened.append(store)

    rank_zero(ranks, open_here)  # it may have to create it, which only one can
    if not opened:
        open_here()
    return opened[0]
