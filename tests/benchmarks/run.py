"""``make bench``: every figure, measured and held to its bar, in one command. Writes ``results.json``.

Each group of figures is measured in a process of its own, so that one that fails loses nothing but its own figures,
and none inherits another's memory. ``results.json`` is deleted first; with ``--only`` the other groups' figures stay
and are named as old.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import bars
from rich.console import Console

RESULTS, README = Path("results.json"), Path("README.md")
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
GROUPS = ("overhead", "memory", "fidelity", "sketches", "scan", "writer", "ledger", "peers")
METHOD = (
    "The figures of a group come from one process on one machine. Steps of all kinds are taken in turns, one of each "
    "per round, and compared round by round. Given is the median over rounds; its 95 % interval lies between two order "
    "statistics (the whole range below six rounds), so nothing is assumed about the noise. Wall seconds, and CPU "
    "seconds beside them where a name says cpu."
)
PACKAGES = ("torch", "transformers", "peft", "numpy", "duckdb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns how many groups failed."""
    options = _options(arguments)
    if options.profile:
        from benchmarks import profiling

        print(profiling.report(options.profile))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    results = kept(RESULTS, options.only)
    RESULTS.unlink(missing_ok=True)
    if results:  # the other groups' figures, so that a run that is broken off loses none of them
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for group in options.only:
        console.print(f"measuring {group} …")
        results = joined(results, group, *measured_apart(group, options.device, is_quick=options.quick))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(bars.as_table(results))
    failed = [group for group in options.only if results["groups"][group]["error"]]
    for group, note in results["groups"].items():
        if group not in options.only:
            console.print(f"{group}: old, measured {note['measured']}")
        elif note["error"]:
            console.print(f"[bold red]{group} failed:[/] {note['error']}")
    if options.write_readme:
        README.write_text(with_figures(README.read_text(encoding="utf-8"), results), encoding="utf-8")
    console.print(f"written to {RESULTS}")
    return len(failed)


def measured_apart(group: str, device: str, *, is_quick: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure one group in a process of its own.

    Returns:
        Its entries for ``results.json``, none if it failed, and a note on how it went: ``error`` is the last line that
        it wrote.
    """
    began, error, found = time.monotonic(), None, {}
    with tempfile.TemporaryDirectory() as name:
        into = Path(name) / "found.json"
        command = [sys.executable, "-m", "benchmarks.child", group, device, str(into)]
        environment = os.environ | ({"BENCH_QUICK": "1"} if is_quick else {})
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            found = json.loads(into.read_text(encoding="utf-8"))
        else:
            sys.stderr.write(done.stderr)
            error = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    took = round(time.monotonic() - began, 1)
    return found, {"took_s": took, "device": device, "quick": is_quick, "error": error}


def joined(results: Mapping[str, Any], group: str, found: Mapping[str, Any], note: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results with one more group in them, and with the method of this run."""
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    groups = {**results.get("groups", {}), group: {"measured": measured, **note, "names": sorted(found)}}
    return {**found, **{k: v for k, v in results.items() if k not in found}, "method": method(), "groups": groups}


def kept(path: Path, chosen: Sequence[str]) -> dict[str, Any]:
    """Return what an earlier ``results.json`` says of the groups that are not measured now."""
    if not path.is_file():
        return {}
    old = json.loads(path.read_text(encoding="utf-8"))
    groups = {group: note for group, note in old.get("groups", {}).items() if group not in chosen}
    return {name: old[name] for note in groups.values() for name in note["names"]} | {"groups": groups}


def method() -> dict[str, Any]:
    """Return how and on what was measured."""
    return {
        "how": METHOD,
        "machine": {"cpu": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES},
        "threads": os.environ.get("OMP_NUM_THREADS", "as torch chooses"),
    }


def with_figures(readme: str, results: Mapping[str, Any]) -> str:
    """Return the README with the table of figures between its two markers.

    Raises:
        ValueError: If it lacks them.
    """
    before, found, rest = readme.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"README.md has no place for the figures; it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{bars.as_markdown(results)}\n{END}{after}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", type=_groups, default=GROUPS, help=f"some of: {','.join(GROUPS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that everything runs")
    parser.add_argument("--write-readme", action="store_true", help="put the table into README.md")
    parser.add_argument("--profile", metavar="SETUP.MODE", help="where the time goes: gpt2.t128.fused, for example")
    return parser.parse_args(arguments)


def _groups(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(",")) if text else GROUPS
    unknown = [group for group in chosen if group not in GROUPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
