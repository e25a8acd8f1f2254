"""Everything that a snapshot holds, as bytes by name: two states are the same if these are."""

from __future__ import annotations

import json

from cnr_store.format import document_tree
from cnr_store.read.snapshot import Snapshot
from cnr_store.types import Rectangle


def bytes_of(snapshot: Snapshot) -> dict[str, bytes]:
    """Step, tables, slots (those of one dimension by stored column range), dense tensors, documents, scalars."""
    found = {"step": str(snapshot.step).encode(), "scalars": json.dumps(snapshot.scalars, sort_keys=True).encode()}
    for table in snapshot.tables:
        view = snapshot.table(table)
        if view.schema.keys == "hashed":
            keys, arrays = view.read_all(slots=True)
            found |= {f"{table}/keys": keys.tobytes()}
            found |= {f"{table}/{name}": array.tobytes() for name, array in arrays.items()}
            continue
        found[f"{table}/shape"] = str(view.shape).encode()
        found[f"{table}/values"] = view.read().tobytes()
        for low, high in view.column_cuts:
            part = Rectangle((0, view.schema.num_rows), (low, high))
            for name, array in view.read_rectangle(part, slots=dict.fromkeys(view.schema.slots)).items():
                found[f"{table}/{name}/{low}"] = array.tobytes()
    found |= {f"dense/{name}": snapshot.read_dense(name).tobytes() for name in snapshot.dense}
    for name in snapshot.documents:
        kept = snapshot.read_document(name, lambda leaf: leaf)
        encoded = document_tree.encode(kept, lambda leaf: leaf if isinstance(leaf, document_tree.TensorLeaf) else None)
        found[f"document/{name}"] = json.dumps(encoded, sort_keys=True).encode()
    return found
