"""How findings and facts look: tables and a panel on a terminal, plain lines in a pipe.

Strings from a run (paths, names, messages) come from somebody else; control characters in them are shown as
escapes, so no file name can move the cursor or colour a verdict.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from auditlog.errors import ReadError
from auditlog.trust.verdict import Check, Finding, Verdict, unreadable

MAX_FINDINGS = 40
MAX_ROWS = 200

_MEANING = {
    0: "every check passed, under the trust given",
    3: "no statement about the content",
    4: "what is stored is not what was logged",
    5: "something is missing",
    6: "not signed by, or not the log of, whom it should be",
    7: "agrees with itself, but with nothing outside the folder",
}
_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "not run": ("–", "dim")}
_PIPE_WIDTH = 10_000  # no wrapping: lines are for grep


def print_verdict(run: Path, verdict: Verdict) -> None:
    """Print a verdict: what it says, what was checked, against which trust, and what was not checked."""
    facts = [
        ("run", f"{verdict.origin}  ({run})"),
        ("log", _log_line(verdict)),
        ("root", verdict.root or "cannot be computed"),
        ("trust", verdict.trust),
    ]
    parts: list[RenderableType] = [facts_grid(facts), Text(), _checks(verdict.checks)]
    if verdict.findings:
        parts += [Text(), _findings(verdict.findings)]
    if verdict.not_checked:
        parts += [Text(), bullets("not checked", verdict.not_checked)]
    _framed(f"{verdict.status} · exit {verdict.exit_code}", verdict.exit_code, parts)


def print_unreadable(run: Path, error: ReadError, *, as_json: bool) -> None:
    """Print that no verdict could be formed, and why."""
    finding = unreadable(run, error)
    if as_json:
        document = {"schema": "gradtrail/verdict", "status": "CANNOT READ", "exit_code": error.exit_code}
        print(json.dumps(document | {"findings": [finding.to_json()]}, indent=2))
        return
    parts: list[RenderableType] = [_findings((finding,))]
    _framed(f"CANNOT READ · exit {error.exit_code}", error.exit_code, parts)


def print_step(document: dict[str, Any]) -> None:
    """Print the samples of one step, attempt by attempt."""
    names = [("entry", "right"), ("sample", "right"), ("source file: row", "left"), ("rank", "right")]
    columns = [*names, ("micro", "right"), ("slot", "right"), ("part", "right"), ("loss", "right")]
    is_packed = any(use["spans"] for attempt in document["attempts"] for use in attempt["samples"])
    columns += [("tokens of the row", "left")] if is_packed else []
    for attempt in document["attempts"]:
        state = "" if attempt["live"] else ", superseded by a later attempt"
        uses = attempt["samples"]
        title = f"step {document['step']}, attempt {attempt['attempt']}{state}: {len(uses)} samples"
        out(Text(f"{title}, {when(attempt['ts_us'])}", style="bold"))
        rows = [
            [
                *(str(use["seq"]), str(use["sample_index"]), f"{use['source']}: {use['row']}", str(use["rank"])),
                *(str(use["micro"]), str(use["slot"]), str(use["part"]), number(use["loss"])),
                *([_spans(use["spans"] or ())] if is_packed else []),
            ]
            for use in uses
        ]
        out(table(columns, rows))


def _spans(spans: Iterable[dict[str, int]]) -> str:
    """Return ``0–16`` per span, both ends in it; with its row where that is another, and where the text goes on."""
    said, row = [], None
    for span in spans:
        elsewhere = f"row {span['row']}: " if row not in (None, span["row"]) else ""
        later = f" (its tokens from {span['place']} on)" if span["place"] else ""
        said.append(f"{elsewhere}{span['start']}–{span['end'] - 1}{later}")
        row = span["row"]
    return ", ".join(said)


def print_steps(document: dict[str, Any]) -> None:
    """Print one line per step."""
    names = [("step", "right"), ("records", "right"), ("loss", "right"), ("lr", "right"), ("f", "right")]
    columns = [*names, ("residual", "right"), ("time", "left"), ("attempt", "right"), ("", "left")]
    rows = [
        [
            str(step["step"]),
            str(step["records"]),
            number(step.get("loss")),
            number(step["lr"][0] if isinstance(step.get("lr"), list) and step["lr"] else step.get("lr")),
            number(step.get("f")),
            number(step.get("residual")),
            when(step["ts_us"]),
            str(step["attempt"]),
            "" if step["live"] else "superseded",
        ]
        for step in document["steps"]
    ]
    out(table(columns, rows))


def print_conservation(document: dict[str, Any]) -> None:
    """Print each step's recomputed sum and whether it holds."""
    columns = [("step", "right"), ("f", "right"), ("residual", "right"), ("tolerance", "right"), ("", "left")]
    rows = [
        [str(s["step"]), number(s["f"]), number(s["residual"]), number(s["tolerance"]), "✓" if s["ok"] else "✗ differs"]
        for s in document["steps"]
    ]
    out(table(columns, rows))
    failed = [s["step"] for s in document["steps"] if not s["ok"]]
    if failed:
        first = f"first in step {failed[0]}"
        out(Text(f"{len(failed)} of {len(rows)} steps do not add up, {first}.", style="bold red"))
    if document["not_compared"]:
        why = "no gradient is stored, or a sample's sketch is not finite"
        out(Text(f"{document['not_compared']} steps could not be compared: {why}.", style="bold red"))
    if rows and not failed:
        out(f"{len(rows)} steps: the stored samples add up to the gradient that was consumed.")


def print_entry(document: dict[str, Any]) -> None:
    """Print one entry."""
    facts = [("entry", f"{document['seq']}: {document['kind']}"), ("time", when(document["ts_us"]))]
    if document["kind"] == "record":
        facts += [("source", str(document["source"])), ("flags", ", ".join(document["flags"]) or "none")]
        facts += [(name, str(value)) for name, value in document["fields"].items() if name not in ("seq", "flags")]
    else:
        facts += [("leaf", document["leaf"])]
    out(facts_grid(facts))
    if "body" in document:
        out(Text("\n".join(map(clean, json.dumps(document["body"], indent=2).split("\n")))))


@contextmanager
def counter(verb: str, unit: str, *, quiet: bool = False) -> Iterator[Callable[[int], None] | None]:
    """Give a callback that shows a running count on a terminal, and ``None`` in a pipe."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with console.status(verb) as status:
        yield lambda count: status.update(f"{verb}: {count:,} {unit}")


def clean(text: str) -> str:
    r"""Return ``text`` with everything that is not printable written as an escape.

    Example:
        >>> clean("a\x1b[31mb\nc")
        'a\\x1b[31mb\\nc'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def number(value: Any) -> str:
    """Return a number with as many digits as one reads, or a dash."""
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def when(ts_us: int) -> str:
    """Return a time of the operator's clock, in UTC."""
    try:
        return datetime.fromtimestamp(ts_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{ts_us} us"


def _log_line(verdict: Verdict) -> str:
    state = "abandoned and closed later" if verdict.abandoned else "sealed" if verdict.sealed else "not sealed"
    return (
        f"{verdict.entries:,} entries: {verdict.records:,} records of {verdict.samples:,} samples "
        f"in {verdict.steps:,} steps; {state}"
    )


def _checks(checks: tuple[Check, ...]) -> RenderableType:
    grid = grid_of_cells()
    for check in checks:
        mark, style = _MARKS[check.status]
        grid.add_row(Text(mark, style=style), Text(clean(check.name)), Text(clean(check.detail), style="dim"))
    return grid


def _findings(findings: tuple[Finding, ...]) -> RenderableType:
    grid = grid_of_cells()
    for finding in sorted(findings, key=lambda f: f.level == "note")[:MAX_FINDINGS]:
        style = "dim" if finding.level == "note" else "bold red"
        text = Text(clean(finding.message))
        if finding.hint:
            text.append(f" → {clean(finding.hint)}", style="dim")
        grid.add_row(Text(finding.code, style=style), text)
    if len(findings) > MAX_FINDINGS:
        grid.add_row(Text("…"), Text(f"and {len(findings) - MAX_FINDINGS:,} more; --json lists all"))
    return grid


def bullets(title: str, lines: tuple[str, ...] | list[str]) -> RenderableType:
    """Return a titled list."""
    grid = grid_of_cells()
    for line in lines:
        grid.add_row(Text("·"), Text(clean(line)))
    return Group(Text(title, style="bold"), grid)


def facts_grid(facts: list[tuple[str, str]]) -> RenderableType:
    """Return labelled values, one below the other."""
    grid = grid_of_cells()
    for label, value in facts:
        grid.add_row(Text(label, style="bold"), Text(clean(value), overflow="fold"))
    return grid


def grid_of_cells() -> Table:
    """Return an empty table without lines."""
    return Table.grid(padding=(0, 2, 0, 0))


def table(columns: list[tuple[str, str]], rows: list[list[str]]) -> Table:
    """Return a table of plain cells; columns are ``(title, "left" or "right")``."""
    made = Table(box=box.SIMPLE if sys.stdout.isatty() else None, pad_edge=False)
    for name, justify in columns:
        made.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for row in rows[:MAX_ROWS]:
        made.add_row(*(Text(clean(cell)) for cell in row))
    if len(rows) > MAX_ROWS:
        made.add_row(Text(f"… {len(rows) - MAX_ROWS:,} more; --json lists all"))
    return made


def _framed(title: str, exit_code: int, parts: list[RenderableType]) -> None:
    """Print a panel on a terminal; in a pipe the same lines without a frame."""
    style = "green" if exit_code == 0 else "yellow" if exit_code == 7 else "red"
    if sys.stdout.isatty():
        panel = Panel(
            Group(*parts), title=f"[bold]{title}[/]", subtitle=_MEANING[exit_code], border_style=style, padding=(1, 2)
        )
        out(panel)
    else:
        out(Text(f"{title} ({_MEANING[exit_code]})"), *parts)
    out(Text(f"exit {exit_code}", style=f"bold {style}"))


def out(*renderables: RenderableType) -> None:
    """Print to standard output; in a pipe without wrapping, colour or trailing blanks."""
    if sys.stdout.isatty():
        Console(highlight=False).print(*renderables, sep="\n")
        return
    console = Console(highlight=False, width=_PIPE_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(*renderables, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
