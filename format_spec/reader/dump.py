"""Print what the independent reader finds in a store, and write it as .npy files if asked.

python -m format_spec.reader.dump STORE
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import xxhash

from format_spec.reader import cnr_read


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("--branch", help="its name; without it the log of the store, or of a relay")
    parser.add_argument("--version", type=int)
    parser.add_argument("--out", type=Path, help="folder for .npy files")
    options, found = parser.parse_args(), {}
    try:
        snapshot = cnr_read.Store(options.store, options.branch).snapshot(options.version)
        for name in snapshot.tables:
            found |= {f"table {name} {key}": array for key, array in snapshot.read_table(name).items()}
        found |= {f"dense {name}": snapshot.read_dense(name) for name in snapshot.dense}
    except cnr_read.Refused as error:
        sys.exit(": ".join(error.args))
    print(f"version {snapshot.record['v']} step {snapshot.record['step']} chain {len(snapshot.segments)}")
    for index, (name, array) in enumerate(found.items()):
        print(f"{name}: {array.dtype} {array.shape} xxh3 {xxhash.xxh3_64_hexdigest(array.tobytes())}")
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            np.save(options.out / f"{index:05d}.npy", array)


if __name__ == "__main__":
    main()
