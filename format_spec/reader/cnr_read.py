"""Independent reader of cnr-store format 1, from ``format_spec/v1.md`` alone ([n] is a section): plain, not fast."""

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import numpy as np
import xxhash

from format_spec.reader import documents, encodings
from format_spec.reader.documents import Refused, all_keys, need, parse, sha256, unzstd

ABSENT, CODED, ESCAPED = 0, 1, 2
STATUS_AFTER = {"add": CODED, "set": CODED, "delete": ABSENT, "escape": ESCAPED}


class Store:
    """A store in a local folder. ``records[v]`` is None where v is superseded [7.10], or below a relay [7.11]."""

    def __init__(self, root, branch=None):
        self.root, self.records, self.first, folder, begin = Path(root), [], 0, "commits", {}
        identity = self.object("cnr.json", "not_a_store")
        before, self.uuid = sha256(identity), documents.parse_identity(identity)["store_uuid"]
        if branch is not None:  # [7.9]
            pins = {pin["name"]: (key, pin["version"]) for key, pin in Store(root).records[-1]["pins"].items()}
            need(branch in pins, "branch_not_found", branch)
            uuid, fork_point = pins[branch]
            before = sha256(self.object(f"commits/{fork_point:020d}.json")[:65537])
            folder, begin = f"branches/{uuid}/commits", {"kind": "fork", "name": uuid, "target": fork_point}
        elif not (self.root / f"commits/{0:020d}.json").is_file() and (self.root / "relay.json").is_file():  # [7.11]
            marker = parse(self.object("relay.json"), "corrupt_store", "relay.json", "relay")
            need(marker["store_uuid"] == self.uuid, "corrupt_store", "relay.json: of another store")
            self.first, self.records, before = marker["first"], [None] * marker["first"], None
        self.read_log(folder, before)
        need(begin.items() <= (self.records[0] or {}).items(), "corrupt_record", f"branch {branch}: position 0")

    def object(self, key, kind="missing_object", digest=None):
        need((self.root / key).is_file(), kind, f"no {key}")
        data = (self.root / key).read_bytes()
        need(digest in (None, sha256(data)), "corrupt_object", f"{key}: sha256")
        return data

    def read_log(self, folder, before):
        torn = []  # digest and error of each position since the last record that can be read
        names = [int(path.stem) for path in (self.root / folder).glob("[0-9]" * 20 + ".json")]
        for v in range(self.first, max(names, default=self.first) + 1):
            key, record = f"{folder}/{v:020d}.json", None
            data = self.object(key, "corrupt_store")[:65537]  # [3.6]
            try:
                record = self.successor(v, data, key, before, [digest for digest, _ in torn])
                before, torn = sha256(data), []
            except Refused as error:
                torn.append((sha256(data), error))
            self.records.append(record)
        if torn:
            raise torn[0][1]
        self.complete(self.records[-1], key)

    def successor(self, v, data, key, before, torn):  # [3.3]
        record = documents.parse_record(data, self.uuid, key)
        parent = torn[-1] if torn else before or record["parent_digest"]  # nothing is before the first of a relay
        need((record["v"], record["parent_digest"]) == (v, parent), "corrupt_record", key)
        follows = {"follows": before, "torn": torn} if torn else None  # [7.10]
        need(record["supersedes"] == follows, "corrupt_record", f"{key}: supersedes")
        return record

    def complete(self, record, key):  # [3.4]: the newest record's lists, from its side objects and its own changes
        lists = {"kept": [], "expired": [], **{name: {} for name in ("tags", "channels", "pins", "aborted")}}
        stacked, limit = {name: {} for name in lists}, 1 << 26
        for name in (*(record["state"] or ()), None):
            data = b"" if name is None else self.object(f"state/{name}.json", digest=name)
            need(len(data) <= limit, "corrupt_object", f"{key}: side object {name}")
            layer, limit = record if name is None else parse(data, "corrupt_store", key, "overflow"), len(data) // 2
            for field, entries in stacked.items():
                for gone in layer.get("removed", {}).get(field, ()):
                    entries.pop(gone, None)
                entries.update(layer[field] if isinstance(lists[field], dict) else dict.fromkeys(layer[field]))
        record |= {"state": None} | {name: type(empty)(stacked[name]) for name, empty in lists.items()}
        documents.check_record(record, key)

    def snapshot(self, version=None):
        head = self.records[-1]
        version = len(self.records) - 1 if version is None else version
        need(not 0 <= version < self.first, "version_expired", f"version {version}")
        need(0 <= version < len(self.records) and self.records[version], "version_not_found", f"version {version}")
        live = version >= head["floor"] or version in [*head["kept"], *documents.named_versions(head)]
        need(
            live and version not in head["expired"] and head["kind"] != "close", "version_expired", f"version {version}"
        )
        record = self.records[version]
        missing = "version_expired" if self.first and record is not head else "missing_object"  # [7.11] CNR-RLY-6
        at = Snapshot([Segment(self, entry, missing) for entry in record["chain"]], record)
        need(record["kind"] not in ("baseline", "delta") or record["step"] == at.last["step"], "corrupt_record", "step")
        return at


def path_of(group, name):  # [3.5]
    return ".".join([group, *(quote(x, safe="").replace("~", "%7E") for x in name.split("/", 1))])


class Segment:  # [4.1]: a manifest and the objects that it lists
    def __init__(self, store, entry, missing):
        self.store, self.name, self.where = store, entry["seg"], f"data/{entry['seg']}/_segment.json.zst"
        data = store.object(self.where, missing, entry["sha256"])
        self.manifest = manifest = documents.parse_manifest(data, self.where)
        listed, self.arrays = [(item["path"], item) for item in manifest["objects"]], {}
        for group in manifest["groups"] + manifest["dense_arrays"]:
            for name, array in group["arrays"].items():
                listed += self.objects_of(group, name, array)
        documents.check_manifest(manifest, entry, listed, self.need)
        self.objects, self.tables, self.decoded = dict(listed), {}, {}
        begun = dict.fromkeys((group["path"] for group in manifest["groups"]), 0)
        for line in (part[op] for part in manifest["parts"] for op in STATUS_AFTER if part[op]):  # CNR-SEG-19
            line["start"] = begun[line["group"]]
            begun[line["group"]] += line["count"]

    def need(self, condition, found):
        need(condition, "corrupt_store", f"{self.where}: {found}")

    def objects_of(self, group, name, array):  # [4.2]; "places": object, offset and size of each chunk
        path = path_of(group["path"], name)
        stored = [item["size"] for item in array["objects"][1:]]
        room, sizes = (array["shards"][key] for key in ("chunks", "sizes")) if "shards" in array else (1, stored)
        end = ".0" if array["codec"] != "bytes" or array["width"] is not None else ""
        keys = [f"{path}/c.{k // room}{end}" for k in range(len(sizes))]
        places = [(key, sum(sizes[k - k % room : k]), sizes[k]) for k, key in enumerate(keys)]
        rows = {"rows": group["rows"], "chunk_rows": group["chunk_rows"]}
        self.arrays[path] = array | rows | {"group": group["path"], "places": places}
        paths = [f"{path}/zarr.json", *dict.fromkeys(keys)]
        self.need(len(paths) == len(array["objects"]), f"{path}: number of objects")
        return zip(paths, array["objects"], strict=True)

    def read(self, path):
        item, data = self.objects[path], self.store.object(f"data/{self.name}/{path}")
        need((len(data), xxhash.xxh3_128_hexdigest(data)) == (item["size"], item["xxh3_128"]), "corrupt_object", path)
        return data

    def array(self, path):  # [4.2]
        self.need(path in self.arrays, f"no array {path}")
        if path not in self.decoded:
            array, dtype = self.arrays[path], np.dtype(self.arrays[path]["dtype"])
            chunks = [self.chunk(array, place, dtype) for place in array["places"]]
            values = np.concatenate([np.empty(0, dtype), *chunks]).reshape(-1, array["width"] or 1)[: array["rows"]]
            if "order" in array:  # CNR-SEG-17
                by, chunk = self.array(path_of(array["group"], array["order"])), np.arange(len(values))
                values = values[np.argsort(np.lexsort((by, chunk // array["chunk_rows"])))]
            self.decoded[path] = values[:, 0] if array["width"] is None else values
        return self.decoded[path]

    def rows_of(self, line, name):  # of a row list
        return self.array(path_of(line["group"], name))[line["start"] :][: line["count"]]

    def chunk(self, array, place, dtype):  # the crc32c at its end is for readers without an inventory
        (path, start, length), count = place, array["chunk_rows"] * (array["width"] or 1)
        data, where = self.read(path)[start : start + length - 4], f"{self.name}/{path}"
        if array["codec"] == "bytes":
            need(len(data) == count * dtype.itemsize, "corrupt_object", f"{where}: number of elements")
            return np.frombuffer(data, dtype)
        values = encodings.unpack(unzstd(data, where, "corrupt_object", count * dtype.itemsize + 16), count, dtype)
        return np.cumsum(values, dtype=dtype) if array["codec"] == "gaps" else values


class Snapshot:
    def __init__(self, segments, record):
        self.segments, self.record, self.last = segments, record, segments[-1].manifest if segments else {"scalars": {}}
        self.tables, self.dense, self.documents, self.ends, begun = {}, {}, {}, {}, {}
        for segment in segments:  # [3.5] CNR-DOC-24: a manifest states what it changes
            own, before, ends = segment.manifest, self.tables, self.ends
            documents.check_change(own, before, self.dense, self.documents, segment.need)
            documents.check_tables(own, before, ends, begun, segment.need)
            self.dense = {name: at for name, at in self.dense.items() if name not in own["ended"]}
            self.dense |= dict.fromkeys(own["dense"], segment)
            self.documents = {name: self.documents[name] for name in own["kept_documents"]}
            self.documents |= dict.fromkeys([*own["documents"], *own["small"]], segment)
            self.tables = {name: table for name, table in before.items() if name not in own["dropped"]} | own["tables"]
            segment.tables = self.tables
            self.ends = {name: ends[name] for name in self.tables if name not in own["tables"]}
            self.ends |= {name: [part for part in own["parts"] if part["table"] == name] for name in own["tables"]}

    def read_dense(self, name):  # [4.6]
        entry = (segment := self.dense[name]).manifest["dense"][name]
        flat = segment.array(entry["path"])[entry["offset"] :][: math.prod(entry["shape"])]
        need(xxhash.xxh3_128_hexdigest(flat.tobytes()) == entry["digest"], "corrupt_object", f"dense {name}: digest")
        return flat.reshape(entry["shape"])

    def read_document(self, name):  # [4.7], with its $ tags
        own, small = (segment := self.documents[name]).manifest, segment.manifest["small"]
        return small[name] if name in small else json.loads(unzstd(segment.read(own["documents"][name]), name))

    def read_table(self, name):  # {"values", slots, and "keys" of a hashed table}; (n, ranges) if a slot has several
        schema = self.tables[name]
        generations = [segment.tables.get(name, {}).get("generation") for segment in self.segments]
        others = [k for k, generation in enumerate(generations, 1) if generation != schema["generation"]]
        table = Table(name, schema, self.segments[max(others, default=0) :])  # its life [4.4]
        for part in all_keys(self.ends[name], len(table.ids)) if table.hashed else self.ends[name]:
            need(part["state_digest"] in (None, table.digest(part)), "corrupt_store", f"table {name}: state digest")
        return table.decode()


class Table:
    """Rows by columns of status and values. A one-dimensional slot stands at the first column of each column range."""

    def __init__(self, name, schema, life):
        self.name, self.schema, self.hashed = name, schema, schema["keys"] == "hashed"
        self.adds = encodings.is_integer(schema["encoding"])
        self.arrays = {"codes": schema | {"kind": "element"}}
        self.arrays |= {f"slots/{slot}": one for slot, one in schema["slots"].items()}
        parts = [(segment, part) for segment in life for part in segment.manifest["parts"] if part["table"] == name]
        ranges = sorted({tuple(part["columns"]) for _, part in parts if part["rows"][0] < part["rows"][1]})
        self.lows = [low for low, _ in ranges] or [0]
        is_disjoint = all(one[1] <= other[0] for one, other in pairwise(ranges))
        has_vectors = any(slot["kind"] == "row" for slot in schema["slots"].values())
        self.need(is_disjoint or not has_vectors, f"column ranges {ranges}")  # CNR-SEG-13
        lists = [(s, p, op, self.row_ids(s, p, p[op])) for s, p in parts for op in STATUS_AFTER if p[op]]
        keys = np.concatenate([np.empty(0, np.int64), *(rows for *_, rows in lists)])
        most = max(segment.tables[name]["num_rows"] for segment in life)
        self.ids = np.unique(keys) if self.hashed else np.arange(most)
        shape = (len(self.ids), schema["dim"])
        self.status, self.held, self.exact = np.zeros(shape, np.uint8), {}, {}
        for key, array in self.arrays.items():
            carrier, is_integer = encodings.CARRIER[array["dtype"]], encodings.is_integer(array["encoding"])
            self.exact[key], self.held[key] = (
                np.zeros(shape, carrier),
                np.zeros(shape, np.int64 if is_integer else carrier),
            )
        for segment in life:  # [4.4]
            table, seen = segment.tables[name], np.zeros(shape, bool)
            self.status[len(self.ids) if self.hashed else table["num_rows"] :] = ABSENT
            for _, part, op, rows in (item for item in lists if item[0] is segment):
                at = np.ix_(np.searchsorted(self.ids, rows), range(*part["columns"]))
                self.need(not seen[at].any(), "a row in two lists")
                seen[at] = True
                self.apply(segment, part, op, at, schema["shift"] - table["shift"])

    def need(self, condition, found):
        need(condition, "corrupt_store", f"table {self.name}: {found}")

    def row_ids(self, segment, part, line):  # [4.3]
        rows, (low, high) = segment.rows_of(line, "rows"), part["rows"]
        chunk_rows = segment.arrays[path_of(line["group"], "rows")]["chunk_rows"]
        self.need(rows.dtype == np.int64 and rows.ndim == 1 and np.all(rows[1:] > rows[:-1]), "row ids")
        in_chunk = (line["start"] + np.arange(len(rows))) // chunk_rows
        begins = np.flatnonzero(np.diff(in_chunk, prepend=-1))
        ends = [*begins[1:] - 1, len(rows) - 1]
        self.need((line["first"], line["last"]) == (rows[begins].tolist(), rows[ends].tolist()), "first, last")
        self.need(self.hashed or low <= rows[0] <= rows[-1] < high, "row ids outside the part")
        return rows

    def apply(self, segment, part, op, at, shift):
        self.need(op != "add" or (self.adds and np.all(self.status[at] == CODED)), "add to a row without codes")
        self.status[at] = STATUS_AFTER[op]
        (rows, columns), read = at, partial(segment.rows_of, part[op])
        for name, array in self.arrays.items() if op != "delete" else ():
            target = (self.exact if op == "escape" else self.held)[name]
            values = read("values" if (op, name) == ("escape", "codes") else name)
            encoding, width = array["encoding"]["encoding"], part["columns"][1] - part["columns"][0]
            if op != "escape" and encoding == "affine":
                values = encodings.affine(values, read("scale"), read("zero_point"), array)[:, :width]
            dtypes = ("int16", "int32") if target.dtype == np.int64 else (target.dtype,)
            shape = (len(rows),) if array["kind"] == "row" else (len(rows), width)
            self.need(values.dtype in dtypes and values.shape == shape, f"{op} rows: {name}")
            values = values.reshape(len(rows), -1).astype(target.dtype)
            values = values << shift if name == "codes" and target.dtype == np.int64 else values
            here = (rows, columns[:, :1] if array["kind"] == "row" else columns)
            if op == "add":  # CNR-ENC-7; of float_bits modulo 2^32
                values = values + target[here]
                values = values.astype(np.int32) if encoding == "float_bits" else values
                self.need(np.array_equal(values, values.astype(np.int32)), "codes leave int32")
            target[here] = values

    def digest(self, part):  # [4.5]
        rows, (low, high), total = slice(*part["rows"]), part["columns"], 0
        for status, constant in ((CODED, 3), (ESCAPED, 5)) if low == 0 else ():
            total += int(encodings.row_marks(self.ids[rows][self.status[rows, 0] == status], constant).sum())
        for name, array in self.arrays.items() if self.adds else ():  # CNR-DIG-3
            columns = np.arange(low, low + 1 if array["kind"] == "row" else high)
            status, exact = self.status[rows, columns], self.exact[name][rows, columns]
            stored = [self.held[name][rows, columns], encodings.exact_codes(exact, array["dtype"])]
            codes = np.select([status == CODED, status == ESCAPED], stored).view(np.uint64)
            factors = encodings.row_factors(self.ids[rows])[:, None] * encodings.column_factors(name, columns)
            total += int((codes * factors).sum())
        return f"{total % 2**64:016x}"

    def decode(self):  # [5]
        is_present = self.status[:, 0] != ABSENT
        result = {"keys": self.ids[is_present]} if self.hashed else {}
        for name, array in self.arrays.items():
            columns, dtype = self.lows if array["kind"] == "row" else slice(None), array["dtype"]
            status, shift = self.status[:, columns], self.schema["shift"] if name == "codes" else 0
            values = encodings.decode(self.held[name][:, columns], array["encoding"], shift, dtype)
            values = np.where(status == ESCAPED, self.exact[name][:, columns], values)
            values[status == ABSENT] = encodings.narrow(np.full(1, array["fill"], np.float32), dtype)
            values = values[is_present] if self.hashed else values[: self.schema["num_rows"]]
            is_vector = array["kind"] == "row" and len(self.lows) == 1
            result["values" if name == "codes" else name[6:]] = values[:, 0] if is_vector else values
        return result
