"""A synthetic mortgage table in the shape of the real one, with a mark in the column that must never be written."""

from __future__ import annotations

import csv
import io

import numpy as np

SENTINEL = b"xq9-race-of-applicant"
COLUMNS = (
    "",
    "dir",
    "hir",
    "lvr",
    "ccs",
    "mcs",
    "pbcr",
    "dmi",
    "self",
    "single",
    "uria",
    "comdominiom",
    "black",
    "deny",
)


def make_csv(rows: int, incomplete: int = 1, seed: int = 0) -> bytes:
    """Every fifth application is denied; the last ``incomplete`` rows have a missing value."""
    rng = np.random.default_rng(seed)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    for number in range(1, rows + 1):
        denied = number % 5 == 0
        yes = {name: rng.choice(["yes", "no"]) for name in ("pbcr", "dmi", "self", "single")}
        row = {
            "": number,
            "dir": rng.uniform(0.1, 0.6),
            "hir": rng.uniform(0.05, 0.4),
            "lvr": rng.uniform(0.3, 1.1),
            "ccs": rng.integers(4, 7) if denied else rng.integers(1, 4),
            "mcs": rng.integers(1, 5),
            "uria": rng.uniform(2, 10),
            "comdominiom": rng.integers(0, 2),
            "black": SENTINEL.decode(),
            "deny": "yes" if denied else "no",
            **yes,
        }
        if number > rows - incomplete:
            row["pbcr"] = "NA"
        writer.writerow(row)
    return text.getvalue().encode()
