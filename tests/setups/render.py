"""Measures every set-up and writes the table into attribution/METHODS.md: ``make setups``."""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import datasets
import torch
from setups.measure import Audited, Measured, SetUp, measure
from setups.refusals import REFUSALS
from setups.registry import SETUPS
from tiny import write_rows

from auditlog import DataManifest, Signer

METHODS = Path(__file__).parents[2] / "attribution" / "METHODS.md"
BEGIN, END = "<!-- set-ups -->", "<!-- end of set-ups -->"

_HEADER = "| Set-up | samples | error | residual | weights | error, fused | residual, fused | weights, fused |"
_RULE = "|---|---:|---:|---:|---:|---:|---:|---:|"


def figures(folder: Path, data: DataManifest, signer: Signer) -> Iterator[tuple[SetUp, dict[str, Measured]]]:
    """Yield each set-up with what it gave in each of its modes."""
    for number, setup in enumerate(SETUPS):
        yield setup, {mode: measure(setup, mode, folder / f"{number}-{mode}", data, signer) for mode in setup.modes}


def row(setup: SetUp, found: dict[str, Measured]) -> str:
    """Return a row of the table; figures to one digit."""
    cells = [setup.name, str(next(iter(found.values())).samples)]
    for mode in ("observe", "fused"):
        m = found.get(mode)
        cells += ["", "", ""] if m is None else [f"{m.error:.0e}", f"{m.residual:.0e}", _weights(m)]
    return f"| {' | '.join(cells)} |"


def _weights(found: Measured) -> str:
    return "identical" if found.drift == 0 else f"{found.drift:.0e}"


def refusal_rows(folder: Path, data: DataManifest, signer: Signer) -> Iterator[str]:
    """Yield a row for each refusal, after seeing that it is one."""
    for number, refusal in enumerate(REFUSALS):
        try:
            refusal.act(Audited(folder / f"refusal-{number}", data, signer))
        except refusal.error as error:
            yield f"| {refusal.name} | `{type(error).__name__}` | {refusal.when} |"
        else:
            raise AssertionError(f"{refusal.name}: not refused")


def tables(folder: Path) -> tuple[list[str], list[str]]:
    """Return the lines between the marks, and the names of set-ups beyond their limit."""
    write_rows(folder / "data")
    data = DataManifest.build(folder / "data" / "*.jsonl")
    signer = Signer.generate("bank.example/audit")
    lines, beyond, group = list[str](), list[str](), ""
    for setup, found in figures(folder, data, signer):
        if setup.group != group:
            group = setup.group
            lines += ["", f"**{group}** (limit {setup.limit:.0e})", "", _HEADER, _RULE]
        lines.append(row(setup, found))
        print(lines[-1], flush=True)
        beyond += [setup.name for m in found.values() if not max(m.error, m.residual) <= setup.limit]
    lines += ["", "**Refused**", "", "| Refused | error | when |", "|---|---|---|"]
    return [*lines, *refusal_rows(folder, data, signer), ""], beyond


def main() -> int:
    """Render; the exit status is 1 if a figure is beyond its limit."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    logging.getLogger("gradtrail").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        lines, beyond = tables(Path(folder))
    text = METHODS.read_text(encoding="utf-8")
    inner = "\n".join(lines).replace("\\", r"\\")
    METHODS.write_text(re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{inner}\n{END}", text, flags=re.DOTALL), encoding="utf-8")
    for name in beyond:
        print(f"beyond its limit: {name}", file=sys.stderr)
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
