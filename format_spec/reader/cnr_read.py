"""Independent reader of cnr-store format 1, from ``format_spec/v1.md`` alone ([n] is a section): plain, not fast."""

import hashlib
import json
import math
import re
from itertools import accumulate, pairwise
from pathlib import Path
from urllib.parse import quote

import numpy as np
import xxhash
import zstandard
from jsonschema import Draft202012Validator

CARRIER = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
EXACT_BITS, U, GOLDEN, MASK = {"float32": 23, "float16": 10, "bfloat16": 7}, np.uint64, 0x9E3779B97F4A7C15, 2**64 - 1
STORED_AS, INTEGERS = {"bfloat16": "uint16", "bool": "uint8"}, ("int16", "int32", "int64")
SCHEMAS = {p.stem: Draft202012Validator(json.loads(p.read_text())) for p in Path(__file__).parents[1].glob("schemas/*")}
ABSENT, CODED, ESCAPED, OPS, INTEGER = 0, 1, 2, ("add", "set", "delete", "escape"), ("lattice", "float_bits")


class Refused(Exception):
    """The store may not be read: (kind of section 9, what was found)."""


def need(condition, kind, found):
    if not condition:
        raise Refused(kind, found)


def canonical(value):  # [3.1]
    if isinstance(value, dict):
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if not isinstance(value, float):
        return json.dumps(value, ensure_ascii=False)
    return re.sub(r"e\+?(-?)0*", r"e\1", re.sub(r"(\d)\.?(\d*)e-05$", r"0.0000\1\2", repr(value)))


def parse(data, kind, where, schema=None):  # [3.6]: of the four brackets, those that open have the second bit
    need(max([0, *accumulate((x & 2) - 1 for x in re.sub(rb'"(\\.|[^"\\])*"|[^][{}]', b"", data))]) < 65, kind, where)
    try:
        document = json.loads(data, parse_constant=lambda name: need(False, kind, f"{where}: {name}"))
    except ValueError as error:
        raise Refused(kind, f"{where}: {error}") from error
    need(isinstance(document, dict) and (schema is None or SCHEMAS[schema].is_valid(document)), kind, where)
    return document if schema is None else with_defaults(document, schema)


def with_defaults(value, schema, rule=None):  # [3.1] CNR-DOC-5
    rules, rule = SCHEMAS[schema].schema, SCHEMAS[schema].schema if rule is None else rule
    rule = rules["$defs"][rule["$ref"].rpartition("/")[2]] if "$ref" in rule else rule
    for one in rule.get("anyOf", ()):
        value = with_defaults(value, schema, one)
    if isinstance(value, dict):
        fields, others = rule.get("properties", {}), rule.get("additionalProperties", {})
        value = {name: one["default"] for name, one in fields.items() if "default" in one} | value
        return {name: with_defaults(one, schema, fields.get(name, others)) for name, one in value.items()}
    return [with_defaults(one, schema, rule.get("items") or {}) for one in value] if isinstance(value, list) else value


def unzstd(frame, where, kind="corrupt_store", sizes=range(1, 2**28 + 1)):  # [3.1] CNR-DOC-23: before memory is taken
    try:
        need(zstandard.frame_content_size(frame) in sizes, kind, f"{where}: size")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused(kind, f"{where}: {error}") from error
    return data if len(sizes) == 1 or sum(map(data.count, b",[{")) <= 1 << 24 else need(0, kind, where)  # [3.6]


def is_name(text):  # [2]
    return 0 < len(text.encode()) <= 1024 and not re.search(r"[\x00-\x1f\x7f]", text)


class Store:  # in a local folder; records[v] is None where it is superseded [7.10], or before a relay begins [7.11]
    def __init__(self, root, branch=None):
        self.root, self.records, self.first, torn, prefix, begin = Path(root), [], 0, [], "", {}
        identity = self.object("cnr.json", "not_a_store")
        before, self.identity = hashlib.sha256(identity).hexdigest(), parse(identity, "corrupt_store", "cnr.json")
        need(self.identity.get("format") == "cnr-store", "corrupt_store", "format of cnr.json")
        need(self.identity.get("major") == 1, "newer_format", f"major {self.identity.get('major')}")
        if branch is not None:  # [7.9]
            pins = {pin["name"]: (key, pin["version"]) for key, pin in Store(root).records[-1]["pins"].items()}
            need(branch in pins, "branch_not_found", branch)
            uuid, fork_point = pins[branch]
            before = hashlib.sha256(self.object(f"commits/{fork_point:020d}.json")[:65537]).hexdigest()
            prefix, begin = f"branches/{uuid}/", {"kind": "fork", "name": uuid, "target": fork_point}
        elif not (self.root / f"commits/{0:020d}.json").is_file() and (self.root / "relay.json").is_file():  # [7.11]
            marker = parse(self.object("relay.json"), "corrupt_store", "relay.json", "relay")
            need(marker["store_uuid"] == self.identity["store_uuid"], "corrupt_store", "relay.json: of another store")
            self.first, self.records, before = marker["first"], [None] * marker["first"], None
        names = [int(path.stem) for path in (self.root / f"{prefix}commits").glob("[0-9]" * 20 + ".json")]
        for key in (f"{prefix}commits/{v:020d}.json" for v in range(self.first, max(names, default=self.first) + 1)):
            digest = hashlib.sha256(data := self.object(key, "corrupt_store")[:65537]).hexdigest()  # [3.6]
            try:
                record, before, torn = self.record(key, data, before, [one for one, _ in torn]), digest, []
            except Refused as error:
                record, torn = None, [*torn, (digest, error)]
            self.records.append(record)
        need(not torn, *(torn[0][1].args if torn else ("", "")))
        self.complete(self.records[-1], key)
        need(begin.items() <= (self.records[0] or {}).items(), "corrupt_record", f"branch {branch}: position 0")

    def object(self, key, kind="missing_object", sha256=None):
        need((at := self.root / key).is_file(), kind, f"no {key}")
        need(sha256 in (None, hashlib.sha256(data := at.read_bytes()).hexdigest()), "corrupt_object", f"{key}: sha256")
        return data

    def record(self, key, data, before, torn):  # [3.3]
        record, bad = parse(data, "corrupt_record", key), "corrupt_record"
        check = xxhash.xxh3_128_hexdigest(canonical(record | {"check": ""}).encode())
        need(canonical(record).encode() == data and record.get("check") == check and len(data) <= 65536, bad, key)
        need(not record.get("reader_features"), "unknown_feature", f"{key}: features")
        need(SCHEMAS["commit_record"].is_valid(record), bad, key)
        record = with_defaults(record, "commit_record")
        need(record["store_uuid"] == self.identity["store_uuid"], "corrupt_store", f"{key}: of another store")
        parent = [before or record["parent_digest"], *torn][-1]  # the first of a relay has none there
        need((record["v"], record["parent_digest"]) == (len(self.records), parent), bad, key)
        need(record["supersedes"] == ({"follows": before, "torn": torn} if torn else None), bad, f"{key}: supersedes")
        self.check(record, key, bad)
        return record

    def complete(self, record, key):  # [3.4]: the newest record's lists, from its side objects and its own changes
        empty = {"kept": [], "expired": [], **{name: {} for name in ("tags", "channels", "pins", "aborted")}}
        stacked, limit = {name: {} for name in empty}, 1 << 26
        for name in (*(record["state"] or ()), None):
            data = b"" if name is None else self.object(f"state/{name}.json", sha256=name)
            need(len(data) <= limit, "corrupt_object", f"{key}: side object {name}")
            layer, limit = record if name is None else parse(data, "corrupt_store", key, "overflow"), len(data) // 2
            for field, entries in stacked.items():
                for gone in layer.get("removed", {}).get(field, ()):
                    entries.pop(gone, None)
                entries.update(own if isinstance(own := layer.get(field, ()), dict) else dict.fromkeys(own))
        record |= {"state": None} | {name: type(empty[name])(entries) for name, entries in stacked.items()}
        self.check(record, key, "corrupt_record")

    def check(self, record, key, bad):  # [3.3] CNR-LOG-20 and 61
        v, kind, ends = record["v"], record["kind"], [0] + [entry["l1"] for entry in record["chain"]]
        lengths = {"init": (1, 1), "baseline": (2, 2), "delta": (3, 65), "compact": (2, 64)}.get(kind, (1, 65))
        need(lengths[0] <= len(ends) <= lengths[1] and ends[-1] == record["checkpoint"], bad, f"{key}: chain")
        for k, entry in enumerate(record["chain"]):
            need(entry["l0"] == ends[k] < entry["l1"] and entry["kind"] == ("delta" if k else "baseline"), bad, key)
        need(kind in ("init", "fork") if v == 0 else kind != "init", bad, f"{key}: {kind} at {v}")
        named = {"tag": "name target", "untag": "name", "channel": "name", "fork": "name", "rollback": "target"}
        has_all = all(record[field] is not None for field in named.get(kind, "").split())
        need(has_all and (v == 0 or (record["target"] or 0) < v), bad, f"{key}: name, target")
        pins = record["pins"].values()
        names = [*record["tags"], *record["channels"], *(pin["name"] for pin in pins)]
        versions = [*record["tags"].values(), *record["channels"].values(), *(pin["version"] for pin in pins)]
        need(all(map(is_name, names)) and not {*record["tags"]} & {*record["channels"]}, bad, f"{key}: names")
        need(max([record["floor"], *versions, *record["expired"]]) <= v, bad, f"{key}: versions beyond it")
        need(max(record["kept"], default=-1) < record["floor"], bad, f"{key}: kept")

    def snapshot(self, version=None):
        version = len(self.records) - 1 if version is None else version
        need(not 0 <= version < self.first, "version_expired", f"version {version}")
        need(0 <= version < len(self.records) and self.records[version], "version_not_found", f"version {version}")
        head, record = self.records[-1], self.records[version]
        named = [*head["tags"].values(), *head["channels"].values(), *(pin["version"] for pin in head["pins"].values())]
        live = (version >= head["floor"] or version in [*head["kept"], *named]) and version not in head["expired"]
        need(live and head["kind"] != "close", "version_expired", f"version {version}")
        missing = "version_expired" if self.first and record is not head else "missing_object"  # [7.11] CNR-RLY-6
        at = Snapshot([Segment(self, entry, missing) for entry in record["chain"]], record)
        need(record["kind"] not in ("baseline", "delta") or record["step"] == at.last["step"], "corrupt_record", "step")
        return at


class Segment:  # [4.1]: a manifest and the objects that it lists
    def __init__(self, store, entry, missing):
        self.store, self.name, bad = store, entry["seg"], ("corrupt_store", f"data/{entry['seg']}/_segment.json.zst")
        data = unzstd(store.object(bad[1], missing, entry["sha256"]), bad[1])
        need(parse(data, *bad).get("format", 0) == 1, "newer_format", bad[1])
        self.manifest = manifest = parse(data, *bad, "segment")
        objects, self.arrays = [(item["path"], item) for item in manifest["objects"]], {}
        for group in manifest["groups"] + manifest["dense_arrays"]:  # [4.2]: what follows from the rest
            group["begun"], rows, chunk_rows = 0, group["rows"], group["chunk_rows"]
            for name, one in group["arrays"].items():
                path = ".".join([group["path"], *(quote(x, safe="").replace("~", "%7E") for x in name.split("/", 1))])
                one |= {"path": path, "rows": rows, "chunk_rows": chunk_rows, "start": 0, "count": rows, "left": rows}
                size = chunk_rows * (one["width"] or 1) * np.dtype(one["dtype"]).itemsize
                sane = one["codec"] == "bytes" or one["dtype"] in INTEGERS[2 * (one["codec"] == "gaps") :]
                least, most = (size + 4, size + 4) if one["codec"] == "bytes" else (4, (size + 16) * 5 // 4 + 4096)
                limit = 1 << (23 if name in ("codes", "values", one["dtype"]) else 27)  # dense: named by dtype
                own = [item["size"] for item in one["objects"][1:]]  # of chunks, or of shards: chunks and an index
                shard = one.get("shards", {"chunks": 1, "sizes": own, "digests": 32 * len(own) * "0"})
                room, sizes, index = shard["chunks"], shard["sizes"], (16 * shard["chunks"] + 4) * ("shards" in one)
                sane = sane and (size <= limit or chunk_rows == 1) and len(sizes) == -(-rows // chunk_rows)
                sane = sane and own == [sum(sizes[k : k + room]) + index for k in range(0, len(sizes), room)]
                need(sane and len(shard["digests"]) == 32 * len(sizes) and all(least <= x <= most for x in sizes), *bad)
                end = "/0" * (one["codec"] != "bytes" or one["width"] is not None)
                at = [(f"{path}/c/{k // room}{end}", sum(sizes[k - k % room : k]), x) for k, x in enumerate(sizes)]
                objects += zip([f"{path}/zarr.json", *{key: 0 for key, *_ in at}], one["objects"], strict=True)
                self.arrays[path], one["places"] = one, at
        groups, self.objects = {one["path"]: one for one in manifest["groups"]}, dict(objects)
        tables, areas, rows = manifest["tables"], dict.fromkeys(manifest["tables"], 0), 0
        for part in manifest["parts"]:  # [3.5] CNR-DOC-8: legal rectangles, which make each table up
            need(part["table"] in tables, *bad)
            table, (start, stop), (low, high) = tables[part["table"]], part["rows"], part["columns"]
            need(start <= stop <= table["num_rows"] and low < high <= table["dim"], *bad)
            need(table["keys"] == "dense" or (high - low == table["dim"] and not part["add"]), *bad)
            areas[part["table"]] += (stop - start) * (high - low)
            for op, one in ((op, part[op]) for op in OPS if part[op]):  # [4.2]: behind those of the parts before
                need((group := groups.get(one["group"])) and group.setdefault("op", op) == op, *bad)
                at = {"start": group["begun"], "count": one["count"]}
                one["arrays"] = {name: array | at for name, array in group["arrays"].items()}
                group["begun"], rows = group["begun"] + one["count"], rows + one["count"]
        sane = all(one["begun"] == one["rows"] for one in manifest["groups"]) and len(self.objects) == len(objects)
        need(sane and all(manifest[name] == entry[name] for name in ("kind", "l0", "l1")), *bad)
        sane = self.name == f"{manifest['base']:020d}-{manifest['txn']}" and rows == entry["rows"]
        need(sane and sum(one["size"] for _, one in objects) <= entry["bytes"], *bad)
        names = [*tables, *manifest["dense"], *(slot for table in tables.values() for slot in table["slots"])]
        names += [node for name in (*manifest["documents"], *manifest["kept"]) for node in name.split("/")]
        need({*manifest["documents"].values()} <= {*self.objects} and all(map(is_name, names)), *bad)
        need(all(areas[k] == t["num_rows"] * t["dim"] <= (t["keys"] == "dense") << 50 for k, t in tables.items()), *bad)
        for tensor in manifest["dense"].values():  # [4.6]
            size, pack = math.prod(tensor["shape"]), self.arrays.get(tensor["path"], {"width": 0, "left": 0})
            pack["left"], fits = pack["left"] - size, pack["width"] is None and tensor["offset"] + size <= pack["rows"]
            here = fits and pack["left"] >= 0 and pack["dtype"] == STORED_AS.get(tensor["dtype"], tensor["dtype"])
            need(here and (size or tensor["digest"] == xxhash.xxh3_128_hexdigest(b"")), *bad)

    def read(self, path):
        item, data = self.objects[path], self.store.object(f"data/{self.name}/{path}")
        need((len(data), xxhash.xxh3_128_hexdigest(data)) == (item["size"], item["xxh3_128"]), "corrupt_object", path)
        return data

    def array(self, entry, beside=()):  # [4.2]: sizes are compared before anything is decoded
        rows, start, path, width = (entry[name] for name in ("chunk_rows", "start", "path", "width"))
        size, dtype, first = rows * (width or 1), np.dtype(entry["dtype"]), start // rows
        places = entry["places"][first : -(-(start + entry["count"]) // rows)]
        chunks = [self.decode(entry["codec"], *place, size, dtype) for place in places]
        values = np.concatenate([np.empty(0, dtype), *chunks]).reshape(-1, width or 1)[: entry["rows"] - first * rows]
        if "order" in entry:  # of whole chunks
            order = beside.get(entry["order"], {"dtype": None})
            need(order["dtype"] == "int16" and order["width"] is None and "order" not in order, "corrupt_store", path)
            order = self.array(order | {"start": first * rows, "count": len(values)})
            values = values[np.argsort(np.lexsort((order, np.arange(len(values)) // rows)))]
        return values[start - first * rows :][: entry["count"], 0 if width is None else slice(None)]

    def decode(self, codec, path, start, length, count, dtype):  # the crc32c is for readers without an inventory
        data, where = self.read(path)[start : start + length - 4], f"{self.name}/{path}"
        if codec == "bytes":
            need(len(data) == count * dtype.itemsize, "corrupt_object", f"{where}: number of elements")
            return np.frombuffer(data, dtype)
        chunk = np.frombuffer(unzstd(data, where, "corrupt_object", [count * dtype.itemsize + 16]), np.uint8)
        return unpack(chunk, count, dtype, codec == "gaps")


class Snapshot:
    def __init__(self, segments, record):
        self.last, self.documents = segments[-1].manifest if segments else {"scalars": {}}, {}
        self.segments, self.record, self.tables, self.dense, self.ends, lives = segments, record, {}, {}, {}, {}
        for segment in segments:  # [3.5] CNR-DOC-24: a manifest states what it changes
            own, tables, ends, dense = segment.manifest, self.tables, self.ends, self.dense
            has = {"tables": tables, "dense": dense, "documents": self.documents}
            for key, (new, old) in zip(("dropped", "ended", "kept"), has.items(), strict=True):
                need({*own[key]} <= {*old} - {*own[new]}, "corrupt_store", f"{segment.name}: {key}")
            self.dense = {k: dense[k] for k in dense if k not in own["ended"]} | dict.fromkeys(own["dense"], segment)
            self.documents = {k: self.documents[k] for k in own["kept"]} | dict.fromkeys(own["documents"], segment)
            segment.tables = self.tables = {k: v for k, v in tables.items() if k not in own["dropped"]} | own["tables"]
            self.ends = {k: ends[k] for k in ends if k in self.tables} | {name: {} for name in own["tables"]}
            for name, table in own["tables"].items():  # [4.3] CNR-SEG-18: what stays within a generation
                goes_on = (old := tables.get(name)) and old["generation"] == table["generation"]
                first = lives.setdefault(name, table) if goes_on or name not in lives else lives[name]
                fixed = [{**one, "num_rows": 0, "shift": 0, "fill": 0} for one in (first, table)]
                sane = fixed[0] == fixed[1] and first["shift"] + 8 >= table["shift"] >= (old or table)["shift"]
                sane = sane if goes_on or first is table else table["generation"] > first["generation"]
                need(sane, "corrupt_store", f"{segment.name}: table {name} within its generation")
                lives[name] = first if goes_on else table
            for part in own["parts"]:  # CNR-DOC-10, where the rectangle was one before
                name, at = part["table"], (*part["rows"], *part["columns"])
                self.ends[name][at], end = part, ends.get(name, {}).get(at, {}).get("state_digest")
                old, new = tables.get(name), own["tables"][name]
                same = old and all(old[key] == new[key] for key in ("generation", "shift", "num_rows"))
                need(not same or end is None or part["base_digest"] in (None, end), "corrupt_store", segment.name)

    def read_dense(self, name):  # [4.6]
        entry = (segment := self.dense[name]).manifest["dense"][name]
        flat = segment.array(segment.arrays[entry["path"]])[entry["offset"] :][: math.prod(entry["shape"])]
        need(xxhash.xxh3_128_hexdigest(flat.tobytes()) == entry["digest"], "corrupt_object", f"dense {name}: digest")
        return flat.reshape(entry["shape"])

    def read_document(self, name):  # [4.7], with its $ tags
        return json.loads(unzstd((held := self.documents[name]).read(held.manifest["documents"][name]), name))

    def read_table(self, name):  # {"values", slots, and "keys" of a hashed table}; (n, ranges) if a slot has several
        schema, named = self.tables[name], [s.tables.get(name, {}) for s in self.segments]
        begin = max((k + 1 for k, x in enumerate(named) if x.get("generation") != schema["generation"]), default=0)
        parts = [(s, part) for s in self.segments[begin:] for part in s.manifest["parts"] if part["table"] == name]
        ranges = {tuple(part["columns"]) for _, part in parts if part["rows"][0] < part["rows"][1]}
        cuts = list(pairwise(sorted({0, schema["dim"]}.union(*ranges))))  # the elementary column intervals
        is_law = ranges <= set(cuts) or all(slot["kind"] != "row" for slot in schema["slots"].values())
        need(is_law and cuts[0][0] == 0 and cuts[-1][1] == schema["dim"], "corrupt_store", f"{name}: ranges {ranges}")
        tables = [Table(name, schema, self.segments[begin:], parts, *columns) for columns in cuts]
        for part in (part for part in self.ends[name].values() if part["state_digest"]):
            digest = sum(t.digest(*part["rows"]) for t in tables if part["columns"][0] <= t.low < part["columns"][1])
            need(part["state_digest"] == f"{digest & MASK:016x}", "corrupt_store", f"table {name}: state digest")
        found = [table.decode() for table in tables]
        return found[0] if len(found) == 1 else {key: np.column_stack([one[key] for one in found]) for key in found[0]}


class Table:  # columns [low, high) of one; arrays: name -> (encoding, dtype, one-dimensional, adds differences, fill)
    def __init__(self, name, schema, segments, parts, low, high):
        self.where, self.hashed, self.low, self.high = f"table {name}", schema["keys"] == "hashed", low, high
        self.schema, adds = schema, schema["encoding"]["encoding"] in INTEGER and not self.hashed
        self.arrays = {"codes": (schema["encoding"], schema["dtype"], False, adds, schema["fill"])} | {
            f"slots/{slot}": (s["encoding"], s["dtype"], s["kind"] == "row", adds and s["mirror"], s["fill"])
            for slot, s in schema["slots"].items()
        }
        tables = [(segment, segment.tables[name]) for segment in segments]
        parts = [(s, part) for s, part in parts if part["columns"][0] < high and low < part["columns"][1]]
        work = [(s, part, op, self.row_ids(s, part, part[op])) for s, part in parts for op in OPS if part[op]]
        keys = np.concatenate([np.empty(0, np.int64), *(rows for *_, rows in work)])
        self.ids = np.unique(keys) if self.hashed else np.arange(max(table["num_rows"] for _, table in tables))
        self.status, self.held, self.exact = np.zeros(len(self.ids), np.uint8), {}, {}
        for array, (encoding, dtype, vector, *_) in self.arrays.items():
            self.exact[array] = np.zeros((len(self.ids), 1 if vector else high - low), CARRIER[dtype])
            self.held[array] = self.exact[array].astype(np.int64 if encoding["encoding"] in INTEGER else CARRIER[dtype])
        for segment, table in tables:  # [4.4]
            self.status[len(self.ids) if self.hashed else table["num_rows"] :] = ABSENT
            twice = self.status * 0
            for _, part, op, rows in (item for item in work if item[0] is segment):
                at = np.searchsorted(self.ids, rows)
                need(not twice[at].any(), "corrupt_store", f"{self.where}: a row in two lists")
                twice[at] = 1
                self.apply(segment, part, op, at, schema["shift"] - table["shift"])

    def row_ids(self, segment, part, row_list):  # [4.3]
        rows, (low, high) = segment.array(row_list["arrays"]["rows"]), part["rows"]
        chunk, start = row_list["arrays"]["rows"]["chunk_rows"], row_list["arrays"]["rows"]["start"]
        ends = np.unique(np.clip(np.arange(-(start % chunk), len(rows) + chunk, chunk), 0, len(rows)))
        sane = rows.dtype == np.int64 and rows.shape == (row_list["count"],) and bool(np.all(rows[1:] > rows[:-1]))
        sane = sane and [row_list["first"], row_list["last"]] == [rows[ends[:-1]].tolist(), rows[ends[1:] - 1].tolist()]
        need(sane and (self.hashed or low <= rows[0] <= rows[-1] < high), "corrupt_store", f"{self.where}: row ids")
        return rows

    def apply(self, segment, part, op, at, shift):
        (low, high), arrays, where = part["columns"], part[op]["arrays"], f"{self.where}: {op} rows"
        is_legal = op != "add" or (np.all(self.status[at] == CODED) and not self.hashed)
        need(is_legal and 0 <= shift < 32 and 0 <= low < high <= self.schema["dim"], "corrupt_store", where)
        self.status[at] = {"delete": ABSENT, "escape": ESCAPED}.get(op, CODED)
        for name, (encoding, dtype, vector, adds, _) in self.arrays.items() if op != "delete" else ():
            target = (self.exact if op == "escape" else self.held)[name]
            values = segment.array(arrays["values" if (op, name) == ("escape", "codes") else name], arrays)
            if op != "escape" and encoding["encoding"] == "affine":  # [5.2]
                bits = np.unpackbits(values, axis=1, bitorder="little").reshape(len(at), -1, encoding["bits"])
                codes = (bits << np.arange(encoding["bits"], dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
                scale, zero = (segment.array(arrays[k])[:, None].astype(np.float32) for k in ("scale", "zero_point"))
                values = narrow(zero + scale * codes[:, : high - low].astype(np.float32), dtype)
            known = (np.int8, np.int16, np.int32) if target.dtype == np.int64 else (target.dtype,)
            fits = values.dtype in known and values.shape == ((len(at),) if vector else (len(at), high - low))
            need(fits and low <= self.low and self.high <= high, "corrupt_store", f"{where}: {name}")
            values, first = values.reshape(len(at), -1).astype(target.dtype), 0 if vector else self.low - low
            values = values[:, first : first + target.shape[1]]
            values = values << shift if name == "codes" and target.dtype == np.int64 else values
            if op == "add" and adds:  # of float_bits modulo 2^32
                values = (values + target[at]).astype(np.int32 if encoding["encoding"] == "float_bits" else np.int64)
                need(np.array_equal(values, values.astype(np.int32)), "corrupt_store", f"{where}: codes leave int32")
            target[at] = values

    def digest(self, start, stop):  # [4.5]
        low, total = self.low, 0
        for status, held, constant in ((CODED, self.held, 3), (ESCAPED, self.exact, 5)):
            rows = (start + np.flatnonzero(self.status[start:stop] == status)).view(U)
            total += int(mix(rows ^ U(constant * GOLDEN & MASK)).sum()) if low == 0 else 0
            for name, (_, dtype, vector, adds, _) in self.arrays.items():
                seed = U(int.from_bytes(hashlib.sha256(b"slot:" + name[6:].encode()).digest()[:8], "little"))
                columns = np.arange(low, low + 1 if vector else self.high, dtype=U)
                factors = mix(columns ^ U(1 << 63) if name == "codes" else columns + seed) | U(1)
                codes = held[name][rows.view(np.int64)]
                if status == ESCAPED:
                    codes = (codes.astype(np.uint32) << 16 if dtype == "bfloat16" else np.float32(codes)).view(np.int32)
                if adds:
                    total += int(((mix(rows) | U(1)) * (codes.astype(np.int64).view(U) * factors).sum(axis=1)).sum())
        return total

    def decode(self):  # [5]
        present = self.status != ABSENT
        result = {"keys": self.ids[present]} if self.hashed else {}
        for name, (encoding, dtype, vector, _, fill) in self.arrays.items():
            values = self.held[name]
            if encoding["encoding"] == "lattice":
                scale = np.float32(encoding["scale"] * 0.5 ** (self.schema["shift"] if name == "codes" else 0))
                values = narrow(scale * values.astype(np.float32), dtype)
            elif encoding["encoding"] == "float_bits":
                size = np.where(values < 0, -1 - values, values) << EXACT_BITS[dtype] - encoding["mantissa_bits"]
                bits = size | (values < 0) << (31 if dtype == "float32" else 15)
                values = bits.astype(np.uint32 if dtype == "float32" else np.uint16).view(CARRIER[dtype])
            values = np.where((self.status == ESCAPED)[:, None], self.exact[name], values)
            values[~present] = narrow(np.full(1, fill, np.float32), dtype)
            values = values[present] if self.hashed else values[: self.schema["num_rows"]]
            result["values" if name == "codes" else name[6:]] = values[:, 0] if vector else values
        return result


def unpack(chunk, count, dtype, is_gaps):  # [4.2]: planes of digits, the top one first
    values, start = np.zeros(count, dtype), 0
    for base in (int(byte) or 256 for byte in chunk[-8:] if byte != 1):
        stop = start - (-count // (each := int(math.log(256, base) + 1e-9)))  # so many digits are in a byte
        need(stop <= len(chunk) - 8, "corrupt_object", "digits that have no room")
        digits = (chunk[start:stop] // base ** np.arange(each)[:, None] % base).reshape(-1)[:count] - base // 2
        values, start = values * dtype.type(base) + digits.astype(dtype), stop
    return np.cumsum(values, dtype=dtype) if is_gaps else values


def mix(x):  # splitmix64
    z = ((x := x + U(GOLDEN)) ^ x >> U(30)) * U(0xBF58476D1CE4E5B9)
    return (z := (z ^ z >> U(27)) * U(0x94D049BB133111EB)) ^ z >> U(31)


def narrow(values, dtype):  # [5.1]: nearest, ties to even; finite values stay finite
    if dtype == "float16":
        return np.where(np.isfinite(values), np.clip(values, -65504, 65504), values).astype(np.float16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.int64)
        size, sign = bits & 0x7FFFFFFF, bits >> 16 & 0x8000
        near = np.minimum((size + 0x7FFF + (size >> 16 & 1)) >> 16, 0x7F7F)
        return (np.where(size < 0x7F800000, near, size >> 16) | sign).astype(np.uint16)
    return values
