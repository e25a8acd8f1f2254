"""Compile the kernels without a GPU and print, as JSON, what each became: a script, because it must not run in the
process of the interpreter's tests.
"""

from __future__ import annotations

import json
import re
import sys
import time

from tests.gpu.kernels.builds import ARCHITECTURES, builds, compiled

FULL = 90
"""Compute capability (times ten) for which every specialisation is compiled; for the others one of each kernel."""


def main() -> None:
    """Compile everything; what does not compile ends the script."""
    found = []
    for build in builds():
        for architecture in ARCHITECTURES:
            if architecture != FULL and not build.is_representative:
                continue
            started = time.perf_counter()
            result = compiled(build, architecture)
            found.append(
                {
                    "build": build.name,
                    "kernel": build.kernel.__name__,
                    "architecture": architecture,
                    "is_exact": build.is_exact,
                    "registers": result.registers,
                    "stack_bytes": result.stack_bytes,
                    "fused": re.findall(r"fma\.[a-z.]*f32", result.ptx),
                    "inexact_divisions": re.findall(r"div\.(?:full|approx)[a-z.]*f32", result.ptx),
                    "flushes_subnormals": re.findall(r"\w+[a-z.]*\.ftz\.\w+", result.ptx),
                    "wide_loads": len(re.findall(r"ld\.global[a-z0-9_:.]*\.v(?:4\.b32|4\.f32|2\.b64)", result.ptx)),
                    "loads": re.findall(r"ld\.global[a-z0-9_:.]*", result.ptx),
                    "stores": re.findall(r"st\.global[a-z0-9_:.]*", result.ptx),
                    "atomics": re.findall(r"\b(?:atom|red)\.[a-z0-9_.:]*", result.ptx),
                    "population_counts": len(re.findall(r"popc\.b32", result.ptx)),
                    "seconds": round(time.perf_counter() - started, 2),
                }
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
