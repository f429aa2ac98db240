"""The process of one peer: ``python -m benchmarks.peers.child NAME DEVICE PAIRS FOLDER`` prints its rows as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

from benchmarks.peers.rows import MARK
from benchmarks.peers.trial import Measure, Trial


def main() -> None:
    """Measure one peer."""
    name, device, pairs, folder = sys.argv[1:]
    warnings.simplefilter("ignore")  # other people's
    measure: Measure = importlib.import_module(f"benchmarks.peers.{name}").measure
    rows = measure(Trial.gpt2(Path(folder), int(pairs), device))
    print(MARK + json.dumps([row.to_json() for row in rows]))


if __name__ == "__main__":
    main()
