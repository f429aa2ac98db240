"""Other ways to record per-sample gradients, on the same model, batches and seed, each in a process of its own.

``python -m benchmarks.peers`` prints the table. Peers come from PyPI into an environment of their own (see
``environment``). One that cannot be installed or run gives a row that says why, and no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import environment
from benchmarks.peers.environment import Environment
from benchmarks.peers.rows import MARK, Row, Span, ratios
from rich.console import Console
from rich.table import Table

ENVIRONMENT = Path(".cache/peers")
# Module of this package -> the package from PyPI that it runs; the first are the project's own.
PEERS: dict[str, str] = {
    "ours": "",
    "logra_style": "",
    "last_block": "",
    "dattri_llm_offload": "dattri-llm",
    "bergson_callback": "bergson",
    "traceprop_store": "traceprop",
    "kronfluence_factors": "kronfluence",
}
ROUNDS, QUICK_ROUNDS = 8, 3
_LIMIT_S = 600  # of one peer
_ROOT = Path(__file__).resolve().parents[3]


def measure(device: str = "cpu", pairs: int | None = None, folder: Path = ENVIRONMENT) -> dict[str, Any]:
    """Measure every peer.

    Args:
        device: ``cpu`` or ``cuda``.
        pairs: How many rounds of a plain and a recorded step each peer gets.
        folder: Where the peers' environment is, or will be.

    Returns:
        Entries for ``results.json``: ``ratio.*`` with their intervals, and ``tables.peers``, one entry per row.
    """
    rounds = pairs or (QUICK_ROUNDS if os.environ.get("BENCH_QUICK") else ROUNDS)
    place = environment.prepare(folder)
    rows = [row for module, package in PEERS.items() for row in measured_apart(module, package, place, device, rounds)]
    return {**ratios(rows), "tables.peers": [row.to_json() for row in rows]}


def measured_apart(module: str, package: str, place: Environment, device: str, rounds: int) -> list[Row]:
    """Measure one peer in a process of its own; a failure is a row too."""
    name = package or module
    if package in place.failed:
        return [Row(name, failed=f"not installed: {place.failed[package]}")]
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(place.python), "-m", "benchmarks.peers.child", module, device, str(rounds), scratch]
        paths = os.pathsep.join([str(_ROOT / "tests"), str(_ROOT)])
        try:
            done = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return [Row(name, failed=f"stopped after {_LIMIT_S} s")]
    if done.returncode:
        return [Row(name, failed=environment.first_error(done.stderr))]
    return read_rows(done.stdout)


def read_rows(output: str) -> list[Row]:
    """Read the rows from what a peer's process printed among things of its own."""
    (line,) = [line for line in output.splitlines() if line.startswith(MARK)]
    return [Row.from_json(body) for body in json.loads(line.removeprefix(MARK))]


def as_table(found: dict[str, Any]) -> Table:
    """Return the peers' table; times per step of 8 samples, medians with the interval of 95 %."""
    table = Table(title="recording per-sample gradients of GPT-2 124M, LoRA r=8, B=8, T=128", title_style="bold")
    for column in ("", "added, ms", "CPU, ms", "own code, ms", "net, ms", "second pass, ms", "KB per sample"):
        table.add_column(column, justify="left" if not column else "right")
    for row in map(Row.from_json, found["tables.peers"]):
        name = f"{row.peer} {row.version}".strip()
        if row.failed:
            table.add_row(name, f"[red]{row.failed}[/]")
            continue
        spans = (row.added, row.cpu_added, row.gross, row.net, row.second_pass)
        size = "" if row.bytes_per_sample is None else f"{row.bytes_per_sample / 1000:,.1f}"
        table.add_row(name, *(_shown(span) for span in spans), size)
    for name in ("ratio.dattri_llm", "ratio.logra_baseline", "ratio.posthoc"):
        table.caption = f"{table.caption or ''}{name} = {_ratio(found, name)}   "
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--pairs", type=int, default=None)
    options.add_argument("--environment", type=Path, default=ENVIRONMENT)
    chosen = options.parse_args(arguments)
    Console(width=160).print(as_table(measure(chosen.device, chosen.pairs, chosen.environment)))


def _shown(span: Span | None) -> str:
    return "" if span is None else f"{span.ms:.1f} [{span.low:.1f}, {span.high:.1f}]"


def _ratio(found: dict[str, Any], name: str) -> str:
    value, interval = found[name], found[f"{name}.interval"]
    if value is None:
        return "not measured"
    return f"{value:.3g}" if interval is None else f"{value:.3g} [{interval[0]:.3g}, {interval[1]:.3g}]"
