"""``gradtrail erase``: destroy what a run holds of a sample, and say so under a signature."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def erase(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder; it must be sealed.")],
    source: Annotated[
        str, typer.Option("--source", metavar="PATH", help="The source file, as gradtrail show RUN spells it.")
    ],
    row: Annotated[list[int], typer.Option("--row", metavar="N", help="Its row, from 0. Repeatable.")],
    basis: Annotated[
        str, typer.Option("--basis", metavar="TEXT", help="Why. It stays in the log, so name no person in it.")
    ],
    key: Annotated[
        str, typer.Option("--key", metavar="KEY", help="Key of whoever acts: FILE.p12, FILE.pem or command:…")
    ],
    passphrase_file: Annotated[
        Path | None,
        typer.Option("--passphrase-file", metavar="FILE", help="File with the key's passphrase; asked for otherwise."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Erase samples from a sealed run: salts, sketches, and results of queries that name them. There is no way back.

    The log stays whole and verifies: it says what was erased, when, and on which basis. Not erased are: their source
    and row numbers, loss and token count in the log; the source files; the trained weights; copies elsewhere.

    Example: gradtrail erase runs/credit --source train.jsonl --row 17 --basis "GDPR Art. 17(1)(a)" --key audit.p12
    """
    import sys

    from auditlog.display import clean
    from auditlog.errors import UsageError
    from auditlog.ledger.erase import erase as erase_samples
    from auditlog.trust.keys import Signer
    from auditlog.trust.verdict import counted

    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("erasing cannot be undone", "Say --yes, or run it on a terminal.")
        typer.confirm(f"Erase {len(set(row))} rows of {clean(source)} from {clean(str(run))} for good?", abort=True)
    signer = Signer.load(key, passphrase_file=passphrase_file)
    erased = erase_samples(run, [(source, number) for number in row], basis, signer)
    if as_json:
        typer.echo(json.dumps(asdict(erased), indent=2))
        return
    typer.echo(
        f"erased   {counted(erased.samples, 'sample')}: salts, and the sketches of {counted(erased.records, 'use')}"
    )
    typer.echo(f"         stored gradients of {counted(erased.gradients, 'step')}, which would give them away")
    for name in erased.results:
        typer.echo(f"         custody/{clean(name)}, which named them")
    typer.echo(f"logged   custody entry {erased.event}")
    typer.echo("left     source and row numbers, loss and token count in the log; source files; trained weights;")
    typer.echo("         backups, file-system snapshots and copies elsewhere, which are yours to see to")
