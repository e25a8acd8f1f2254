"""The documents of a store as the independent reader takes them: parsed, and refused where they break a rule.

It decides by a document's own bytes and by the state before it, and reads no objects. [n] is a section of the spec.
"""

import copy
import hashlib
import json
import math
import re
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from jsonschema import Draft202012Validator, ValidationError, validators

OPERATIONS = ("add", "set", "delete", "escape")
STORED_AS = {"bfloat16": "uint16", "bool": "uint8"}
EXACT_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
ENCODING_FIELDS = ("encoding", "scale", "mantissa_bits", "bits", "search", "param_dtype", "num_bins", "ratio")
CODEC_DTYPES = {"digits": ("int16", "int32", "int64"), "gaps": ("int64",)}
NAMED = {
    "tag": ("name", "target"),
    "untag": ("name",),
    "channel": ("name",),
    "fork": ("name",),
    "rollback": ("target",),
}
CHAIN_LENGTHS = {"init": (0, 0), "baseline": (1, 1), "delta": (2, 64), "compact": (1, 63)}


class Refused(Exception):
    """The store may not be read: (kind of section 9, what was found)."""


def need(condition, kind, found):
    if not condition:
        raise Refused(kind, found)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def fill_in(validator, rules, document, schema):  # [3.1] CNR-DOC-5
    for name, rule in rules.items() if isinstance(document, dict) else ():
        if "default" in rule:
            document.setdefault(name, copy.deepcopy(rule["default"]))
    yield from Draft202012Validator.VALIDATORS["properties"](validator, rules, document, schema)


def full_match(_, pattern, text, __):  # in Python $ also matches before a last line feed
    if isinstance(text, str) and not re.fullmatch(pattern, text):
        yield ValidationError(f"{text!r} does not match {pattern}")


def at_most_bytes(_, limit, name, __):  # CNR-LAY-2
    if isinstance(name, str) and len(name.encode()) > limit:
        yield ValidationError(f"a name of more than {limit} bytes")


RULES = {"properties": fill_in, "pattern": full_match, "maxLength": at_most_bytes}
INTEGER = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # 1.0 is none
Schema = validators.extend(Draft202012Validator, RULES, type_checker=INTEGER)
SCHEMAS = {p.stem: Schema(json.loads(p.read_text())) for p in Path(__file__).parents[1].glob("schemas/*")}


def canonical(value):  # [3.1]
    if isinstance(value, dict):
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if not isinstance(value, float):
        return json.dumps(value, ensure_ascii=False)
    in_full = re.sub(r"(\d)\.?(\d*)e-05$", r"0.0000\1\2", repr(value))
    return re.sub(r"e\+?(-?)0*", r"e\1", in_full)


def parse(data, kind, where, schema=None):
    brackets = re.sub(rb'"(\\.|[^"\\])*"|[^][{}]', b"", data)  # those outside of texts
    depth = max(accumulate((1 if bracket in b"[{" else -1 for bracket in brackets), initial=0))
    need(depth <= 64, kind, f"{where}: {depth} levels")  # [3.6]
    try:
        document = json.loads(data.decode())
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()  # finite; no half of a surrogate pair
    except ValueError as error:
        raise Refused(kind, f"{where}: {error}") from error
    need(isinstance(document, dict) and (schema is None or SCHEMAS[schema].is_valid(document)), kind, where)
    return document


def unzstd(frame, where, kind="corrupt_store", size=None):  # CNR-DOC-23: the size is checked before memory is taken
    try:
        content_size = zstandard.frame_content_size(frame)
        need(content_size == size if size else 0 < content_size <= 1 << 28, kind, f"{where}: {content_size} bytes")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused(kind, f"{where}: {error}") from error
    need(size or sum(map(data.count, b",[{")) <= 1 << 24, kind, f"{where}: too many values")  # [3.6] CNR-DOC-25
    return data


def parse_identity(data):  # [3.2]
    identity = parse(data, "corrupt_store", "cnr.json")
    need(identity.get("format") == "cnr-store", "corrupt_store", "format of cnr.json")
    major = identity.get("major")
    need(not isinstance(major, int) or major <= 1, "newer_format", f"cnr.json: major {major}")
    need(SCHEMAS["identity"].is_valid(identity), "corrupt_store", "cnr.json")
    return identity


def parse_record(data, store_uuid, where):  # [3.3]
    record, bad = parse(data, "corrupt_record", where), "corrupt_record"
    check = xxhash.xxh3_128_hexdigest(canonical(record | {"check": ""}).encode())
    need(canonical(record).encode() == data and record.get("check") == check and len(data) <= 65536, bad, where)
    need(not record.get("reader_features"), "unknown_feature", f"{where}: features")
    need(SCHEMAS["commit_record"].is_valid(record), bad, where)
    need(record["store_uuid"] == store_uuid, "corrupt_store", f"{where}: of another store")
    check_record(record, where)
    return record


def check_record(record, where):  # [3.3] CNR-LOG-20 and 61
    v, kind, chain, bad = record["v"], record["kind"], record["chain"], "corrupt_record"
    ends = [0, *(entry["l1"] for entry in chain)]
    least, most = CHAIN_LENGTHS.get(kind, (0, 64))
    need(least <= len(chain) <= most and ends[-1] == record["checkpoint"], bad, f"{where}: chain")
    for k, entry in enumerate(chain):
        need(entry["l0"] == ends[k] < entry["l1"], bad, f"{where}: chain")
        need(entry["kind"] == ("delta" if k else "baseline"), bad, f"{where}: chain")
    need(kind in ("init", "fork") if v == 0 else kind != "init", bad, f"{where}: {kind} at {v}")
    need(all(record[field] is not None for field in NAMED.get(kind, ())), bad, f"{where}: name, target")
    need(v == 0 or (record["target"] or 0) < v, bad, f"{where}: target")
    need(not {*record["tags"]} & {*record["channels"]}, bad, f"{where}: a tag and a channel of one name")
    need(max([record["floor"], *record["expired"], *named_versions(record)]) <= v, bad, f"{where}: versions beyond it")
    need(max(record["kept"], default=-1) < record["floor"], bad, f"{where}: kept")


def named_versions(record):
    pins = (pin["version"] for pin in record["pins"].values())
    return [*record["tags"].values(), *record["channels"].values(), *pins]


def parse_manifest(data, where):  # [3.5]
    manifest = parse(unzstd(data, where), "corrupt_store", where)
    need(manifest.get("format") == 1, "newer_format", where)
    need(SCHEMAS["segment"].is_valid(manifest), "corrupt_store", where)
    return manifest


def check_manifest(manifest, entry, listed, need):  # [3.5] CNR-DOC-8 and 9
    need(len({path for path, _ in listed}) == len(listed), "an object is listed twice")
    names = [*manifest["documents"], *manifest["small"], *manifest["kept_documents"]]
    need(len(set(names)) == len(names), "a document in two places")
    need({*manifest["documents"].values()} <= {path for path, _ in listed}, "a document that is not listed")
    need(all(manifest[name] == entry[name] for name in ("kind", "l0", "l1")), "not as its chain entry")
    need(entry["seg"] == f"{manifest['base']:020d}-{manifest['txn']}", "not as the name of its segment")
    need(sum(item["size"] for _, item in listed) <= entry["size_bytes"], "size_bytes")
    need(sum(group["rows"] for group in manifest["groups"]) == entry["rows"], "rows")
    for group in manifest["groups"] + manifest["dense_arrays"]:
        for name, array in group["arrays"].items():
            check_array(group, name, array, lambda ok, path=group["path"], name=name: need(ok, f"array {path}.{name}"))
    for name, table in manifest["tables"].items():
        check_schema(table, lambda ok, name=name: need(ok, f"schema of {name}"))
    check_parts(manifest, need)
    check_dense(manifest, need)


def check_array(group, name, array, need):  # [4.2]: sizes, before anything is decoded
    chunk_rows, codec, shards = group["chunk_rows"], array["codec"], array.get("shards")
    decoded = chunk_rows * (array["width"] or 1) * np.dtype(array["dtype"]).itemsize
    least, most = (decoded + 4, decoded + 4) if codec == "bytes" else (4, (decoded + 16) * 5 // 4 + 4096)
    need(codec == "bytes" or array["dtype"] in CODEC_DTYPES[codec])
    if "order" in array:  # CNR-SEG-17
        by = group["arrays"].get(array["order"], {"dtype": None})
        need(by["dtype"] == "int16" and by["width"] is None and "order" not in by)
        need(codec == "digits" and array["width"] is not None)
    need(chunk_rows == 1 or decoded <= 1 << (23 if name in ("codes", "values", array["dtype"]) else 27))
    stored = sizes = [item["size"] for item in array["objects"][1:]]
    if shards:  # CNR-SEG-20: chunks, then an index
        sizes, room = shards["sizes"], shards["chunks"]
        need(stored == [sum(sizes[k : k + room]) + 16 * room + 4 for k in range(0, len(sizes), room)])
        need(len(shards["digests"]) == 32 * len(sizes))
    need(len(sizes) == -(-group["rows"] // chunk_rows) and all(least <= size <= most for size in sizes))


def check_schema(table, need):  # [5]: encodings that decode to floats
    need(table["shift"] == 0 or table["encoding"]["encoding"] == "lattice")
    for array in (table, *table["slots"].values()):
        scale, bits = array["encoding"].get("scale"), array["encoding"].get("mantissa_bits")
        need(scale is None or 2.0**-126 <= scale * 0.5 ** table["shift"] <= (2 - 2**-23) * 2.0**105)  # CNR-ENC-5
        need(bits in (None, EXACT_BITS[array["dtype"]]) or array["dtype"] == "float32")  # CNR-ENC-14


def check_parts(manifest, need):  # CNR-SEG-8, CNR-SEG-19
    tables, groups = manifest["tables"], {group["path"]: [group["rows"], None] for group in manifest["groups"]}
    need(len(groups) == len(manifest["groups"]), "two groups of one path")
    areas = dict.fromkeys(tables, 0)
    for part in manifest["parts"]:
        name, (start, stop), (low, high) = part["table"], part["rows"], part["columns"]
        need(name in tables, f"part of {name}")
        dim = tables[name]["dim"]
        need(start <= stop <= tables[name]["num_rows"] and low < high <= dim, f"part of {name}")
        need(tables[name]["keys"] == "dense" or high - low == dim, f"part of {name}: hashed")
        areas[name] += (stop - start) * (high - low)
        for op, line in ((op, part[op]) for op in OPERATIONS if part[op]):
            left, operation = groups.get(line["group"], (0, None))
            need(line["count"] <= left and operation in (None, op), f"{op} list of {name}")
            groups[line["group"]] = [left - line["count"], op]
    need(all(left == 0 for left, _ in groups.values()), "rows of a group without a list")
    for name, table in tables.items():
        most = 1 << 50 if table["keys"] == "dense" else 0
        need(areas[name] == table["num_rows"] * table["dim"] <= most, f"parts of {name}")


def check_dense(manifest, need):  # [4.6]
    arrays = {f"{g['path']}.{key}": (g["rows"], a) for g in manifest["dense_arrays"] for key, a in g["arrays"].items()}
    free = {path: 0 for path, (_, array) in arrays.items() if array["width"] is None}  # from which element on
    for name, tensor in sorted(manifest["dense"].items(), key=lambda item: item[1]["offset"]):
        path, offset, size = tensor["path"], tensor["offset"], math.prod(tensor["shape"])
        need(path in free and offset + size <= arrays[path][0], f"dense {name}: array")
        need(arrays[path][1]["dtype"] == STORED_AS.get(tensor["dtype"], tensor["dtype"]), f"dense {name}: dtype")
        need(math.prod(filter(None, tensor["shape"])) <= 1 << 50, f"dense {name}: shape")
        need(offset >= free[path] if size else tensor["digest"] == xxhash.xxh3_128_hexdigest(b""), f"dense {name}")
        free[path] += size and offset + size - free[path]


def check_change(own, tables, dense, documents, need):  # CNR-DOC-24: what a manifest ends or keeps was there
    need({*own["dropped"]} <= {*tables} - {*own["tables"]}, "dropped")
    need({*own["ended"]} <= {*dense} - {*own["dense"]}, "ended")
    need({*own["kept_documents"]} <= documents.keys(), "kept documents")


def lasting(table):  # what stays within a generation; fields that a newer version adds are not looked at
    slots = sorted(table["slots"].items())
    encodings = [table["encoding"], *(slot["encoding"] for _, slot in slots)]
    shapes = [(name, slot["kind"], slot["dtype"], slot["fill"]) for name, slot in slots]
    known = [[encoding.get(field) for field in ENCODING_FIELDS] for encoding in encodings]
    return [table["dim"], table["dtype"], table["keys"], shapes, known]


def check_tables(own, tables, ends, begun, need):  # [4.3] CNR-SEG-18; begun: how the newest generations began
    for name, table in own["tables"].items():
        old, first = tables.get(name), begun.get(name)
        if old and old["generation"] == table["generation"]:
            is_same = lasting(table) == lasting(first)
            need(is_same and old["shift"] <= table["shift"] <= first["shift"] + 8, f"table {name} in its generation")
        else:
            need(first is None or table["generation"] > first["generation"], f"generation of table {name}")
            begun[name] = table
    before = {
        (end["table"], *end["rows"], *end["columns"]): end["state_digest"] for one in ends.values() for end in one
    }
    for part in own["parts"]:  # CNR-DOC-10, where the rectangle was one before
        name, end = part["table"], before.get((part["table"], *part["rows"], *part["columns"]))
        old, new = tables.get(name), own["tables"][name]
        goes_on = old and all(old[key] == new[key] for key in ("generation", "shift", "num_rows"))
        start = part["base_digest"]
        if new["keys"] == "hashed":  # the keys of all parts together
            start = sum_of([one for one in own["parts"] if one["table"] == name], "base_digest")
            end = sum_of(ends.get(name, ()), "state_digest")
        need(not goes_on or None in (start, end) or start == end, f"base digest of table {name}")


def all_keys(parts, count):  # CNR-DIG-6: those of all parts of a hashed table together
    return [parts[0] | {"rows": [0, count], "state_digest": sum_of(parts, "state_digest")}]


def sum_of(parts, field):  # None if a part has none
    digests = [part[field] for part in parts]
    return None if None in digests else f"{sum(int(one, 16) for one in digests) % 2**64:016x}"
