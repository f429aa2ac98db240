"""How the summary of a run looks: what was trained, on which samples, and what became of the others."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table
from rich.text import Text

from auditlog.display import bullets, clean, facts_grid, grid_of_cells, out, table, when
from auditlog.format.tracking import Tracking, Untracked
from auditlog.format.versions import version_in_words
from auditlog.ledger.sample_use import rows_in_words
from auditlog.trust.verdict import counted

SAMPLES_SHOWN = 20  # of each list of samples
UNTRACKED_SHOWN = 20

_FLAGS = {
    "padded duplicate": "they repeat a sample to fill a batch and did contribute to the weights",
    "not separable": "other samples are part of what their sketches hold",
}
_SAID_ELSEWHERE = ("self-check", "dataset")


def print_run(document: dict[str, Any]) -> None:
    """Print the summary of a run."""
    sealed = "abandoned, closed afterwards" if (document["seal"] or {}).get("reason") == "abandoned" else "sealed"
    state = sealed if document["sealed"] else "not sealed"
    tracking = Tracking.read(document["tracking"])
    facts = [
        ("run", f"{document['origin']}  ({document['path']})"),
        ("run id", document["run_id"]),
        ("started", when(document["created_us"])),
        ("model", str(document["model"].get("name", "–"))),
        ("key", document["vkey"]),
        ("sketch", f"{document['sketch']['dim']:,} int8 values, {' and '.join(document['sketch']['forms'])}"),
        *_tracking(tracking),
        *(("self-check", _self_check(found)) for found in document["self_checks"]),
        ("log", f"{document['entries']:,} entries: {document['records']:,} records in {document['steps']:,} steps"),
        ("samples", f"{document['samples']:,} of {document['samples_in_manifest']:,} rows were used"),
        *_resumes(document),
        *(("loss accepted", _loss(loss)) for loss in document["losses"]),
        ("state", f"{state}; {len(document['heads'])} signed heads"),
        ("root", document["root"] or "–"),
    ]
    facts += [(f"flag: {name}", _flagged(name, count)) for name, count in document["flags"].items()]
    out(facts_grid(facts))
    out(_sources(document["sources"]))
    _print_samples(document["sample_use"], document["sources"])
    _print_untracked(tracking.untracked)
    others = [notice for notice in document["notices"] if notice.get("notice") not in _SAID_ELSEWHERE]
    if others:
        out(bullets("notices", [json.dumps(notice) for notice in others]))
    if document["custody"]:
        acts = [[str(act["seq"]), act["kind"], when(act["ts_us"])] for act in document["custody"]]
        out(table([("custody", "right"), ("act", "left"), ("time", "left")], acts))
    out(Text("Stored, not verified: gradtrail verify says what this is worth.", style="dim"))


def _tracking(tracking: Tracking) -> list[tuple[str, str]]:
    """Say how gradients were taken and of how many parameters; nothing where the manifest does not."""
    if tracking.coverage is None:
        return []
    share = f"{tracking.tracked_entries:,} of {tracking.trainable_entries:,} trainable values"
    return [
        ("mode", tracking.mode_in_words),
        ("tracked", f"{share} ({tracking.coverage:.2%})"),
        ("routes", tracking.routes_in_words),
    ]


def _self_check(found: dict[str, Any]) -> str:
    where = f"rank {found['rank']}: " if found["rank"] else ""
    return f"{where}{found['sentence']} (entry {found['seq']})"


def _loss(loss: dict[str, Any]) -> str:
    """Say which entries and steps are gone."""
    steps, ends = loss.get("missing_steps"), [head["size"] for head in loss.get("heads", ())]
    gone = [f"entries {loss.get('size')} to {max(ends) - 1} were signed and are gone"] if ends else []
    if steps:
        gone.append(f"steps {steps['first']} to {steps['last']} were trained and never logged")
    return f"{' and '.join(gone) or 'what is gone is not said'} (entry {loss['seq']})"


def _flagged(name: str, count: int) -> str:
    meaning = _FLAGS.get(name)
    return counted(count, "record") + (f": {meaning}" if meaning else "")


def _sources(sources: list[dict[str, Any]]) -> Table:
    columns = [("source", "left"), ("format", "left"), ("rows", "right"), ("uses", "right")]
    columns += [("data version", "left"), ("SHA-256", "left")]
    rows = [
        [s["path"], s["format"], f"{s['rows']:,}", f"{s['uses']:,}", _version(s), s["sha256"][:16]] for s in sources
    ]
    return table(columns, rows)


def _version(source: dict[str, Any]) -> str:
    """Return a data version with its kind and what is known of whether the file has it."""
    return version_in_words(source["data_version_kind"], source["data_version"], source["dirty"])


def _print_samples(use: list[dict[str, Any]], sources: list[dict[str, Any]]) -> None:
    """Print what became of the samples: per source file, and the first of each list by file and row."""
    columns = [("source", "left"), *((samples["fate"], "right") for samples in use)]
    rows = [[source["path"], *(_of_source(samples, i) for samples in use)] for i, source in enumerate(sources)]
    out(table(columns, rows))
    grid = grid_of_cells()
    for samples in use:
        first = [(place["source"], place["row"]) for place in samples["first"]]
        named = rows_in_words(first, samples["count"], SAMPLES_SHOWN)
        text = Text(clean(f"{samples['count']:,}: {samples['reason']}"), overflow="fold")
        text.append(f" · rows {clean(named)}" if named else "", style="dim")
        grid.add_row(Text(samples["fate"], style="bold"), text)
    out(grid)


def _of_source(samples: dict[str, Any], number: int) -> str:
    return "not named" if samples["by_source"] is None else f"{samples['by_source'][number]:,}"


def _print_untracked(untracked: tuple[Untracked, ...]) -> None:
    """Print the trainable parameters that left no sketch, and why."""
    if not untracked:
        return
    columns = [("not tracked", "left"), ("entries", "right"), ("why", "left")]
    shown = [[each.name, f"{each.entries:,}", each.reason] for each in untracked[:UNTRACKED_SHOWN]]
    out(table(columns, shown))
    if len(untracked) > UNTRACKED_SHOWN:
        out(Text(f"… {len(untracked) - UNTRACKED_SHOWN:,} more; --json lists all", style="dim"))


def _resumes(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Say from where training went on, what no longer counts, and how many ranks there are, where there are several."""
    facts = [("ranks", f"{document['ranks']} processes; each kept its own log")] if document["ranks"] > 1 else []
    attempts = document["attempts"]
    if len(attempts) > 1:
        facts.append(("attempts", f"{len(attempts)}: {', '.join(map(_attempt, attempts))}"))
    if document["superseded_records"] or document["superseded_steps"]:
        steps = counted(document["superseded_steps"], "step")
        gone = f"{counted(document['superseded_records'], 'record')} of {steps}"
        facts.append(("superseded", f"{gone}: a later attempt went back behind them, so they are not counted as used"))
    return facts


def _attempt(attempt: dict[str, Any]) -> str:
    """Return ``2 from step 4 of attempt 1 to step 6``."""
    start = f" from step {attempt['from_step']} of attempt {attempt['from_attempt']}" if attempt["from_attempt"] else ""
    last = attempt["last_step"]
    return f"{attempt['number']}{start} {'without a step' if last is None else f'to step {last}'}"
