"""``gradtrail export`` and ``gradtrail prove``: evidence that leaves the machine, to be checked without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]


@app.command()
def export(
    run: _Run,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.zip", help="Where to; RUN's name with .zip otherwise."),
    ] = None,
    with_sketches: Annotated[
        bool,
        typer.Option(
            "--with-sketches", help="Put sketches, salts and results of queries in too: as confidential as the data."
        ),
    ] = False,
    force: _Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Write a run's evidence as one zip file, with a verifier that needs no gradtrail.

    Inside are the log, its signed heads, the manifest and the custody log; model weights and source data are not. The
    run is not changed. A run that is still open is exported as far as it goes, and the bundle says so.

    Example: gradtrail export runs/credit -o credit.zip
    """
    from auditlog import display
    from auditlog.bundle.export import export_run

    target = out or Path(f"{run.resolve().name}.zip")
    with display.counter("exporting", "entries", quiet=as_json) as progress:
        done = export_run(run, target, payloads=with_sketches, force=force, progress=progress)
    if as_json:
        typer.echo(json.dumps(done.to_json(), indent=2))
        return
    entries = sum(log.entries for log in done.logs)
    typer.echo(f"wrote    {done.path}  ({done.size_bytes:,} bytes, {entries:,} entries)")
    typer.echo(f"SHA-256  {done.sha256}")
    if not done.sealed:
        typer.echo("state    NOT sealed: the run is open or was interrupted; whoever verifies needs --allow-open")
    if not with_sketches:
        typer.echo("inside   no sketches and no salts: --with-sketches puts them in, and makes the file confidential")
    typer.echo("check    python verify_gradtrail.py FILE.zip --key KEY.vkey --head NOTE")
    typer.echo("         The program is in the zip; better is a copy that whoever checks got from elsewhere.")


@app.command()
def prove(
    run: _Run,
    seq: Annotated[int, typer.Argument(metavar="SEQ", help="The entry, as show and verify number them.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to; printed otherwise.")
    ] = None,
    force: _Force = False,
) -> None:
    """Prove that one entry is in the log: a text to mail, which anyone checks offline.

    It is a C2SP tlog-proof and holds the entry itself; others of the log cannot be read from it.

    Example: gradtrail prove runs/credit 4711 -o entry.tlog-proof
    """
    from auditlog.bundle.proof import prove_entry
    from auditlog.errors import UsageError
    from auditlog.ledger.files import write_once

    text = prove_entry(run, seq).encode()
    if out is None:
        typer.echo(text.decode(), nl=False)
        return
    if out.exists() and not force:
        raise UsageError(f"{out} exists already", "Give another name with -o, or --force to replace it.")
    if force:
        out.unlink(missing_ok=True)
    write_once(out, text)
    typer.echo(f"wrote {out}; check it with: python verify_gradtrail.py --proof {out} --key KEY.vkey")
