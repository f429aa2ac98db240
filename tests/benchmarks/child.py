"""One group of figures, measured in this process: ``python -m benchmarks.child GROUP DEVICE FILE``.

The group's module has ``measure(device)``, which returns its entries for ``results.json``. ``BENCH_QUICK`` in the
environment asks for few rounds.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path


def main(group: str, device: str, into: str) -> None:
    logging.disable(logging.WARNING)  # audit mode's own advice to its user
    found = importlib.import_module(f"benchmarks.{group}").measure(device)
    Path(into).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
