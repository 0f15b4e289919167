"""What building the built-in model's INT8 graph costs, in a fresh process and an empty cache.

    python benchmarks/edge_build.py

The model itself is fetched beforehand and not counted. Prints a table and, last, one JSON line.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine_core.models import BUILTIN, ModelStore

# The build as the engine's own command line runs it, and then what it says about itself.
BUILD = """
import json, resource, sys
from edge_engine.__main__ import main
status = main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"status": status, "peak": peak, "torch": "torch" in sys.modules}))
"""
# ru_maxrss is in KiB on Linux and in bytes on macOS.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    """Measure and print."""
    model = ModelStore().pull(BUILTIN).path
    with tempfile.TemporaryDirectory() as cache:
        # A model named by its file is read where it lies, so only the build goes into the cache.
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", BUILD, "build", "--model", str(model)],
            env={**os.environ, "CACHE_DIRECTORY": cache},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - begin
        size = sum(entry.bytes for entry in ModelStore(Path(cache)).entries())
    told = json.loads(done.stdout.splitlines()[-1])
    result = {
        "seconds": round(seconds, 2),
        "peak_rss_mb": round(told["peak"] * RSS_UNIT / 1e6),
        "torch_imported": told["torch"],
    }
    print(f"built {size / 1e6:.0f} MB from {model.name}\n")
    for name, value in result.items():
        print(f"{name:<16} {value:>8}")
    print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
