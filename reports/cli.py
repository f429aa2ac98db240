"""``gradtrail report`` and ``gradtrail obligations``: parse, one library call, print."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


class Kind(StrEnum):
    """Which report."""

    ART26 = "art26"


class Role(StrEnum):
    """Whose duties."""

    DEPLOYER = "deployer"
    PROVIDER = "provider"


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run folder, sealed.", metavar="RUN")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The PDF to write.", metavar="FILE")],
    key: Annotated[
        str, typer.Option("--key", help="Your long-lived signing key: FILE.p12, FILE.pem or command:…", metavar="KEY")
    ],
    kind: Annotated[Kind, typer.Option("--kind", help="Which report.")] = Kind.ART26,
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", help="Pinned public key: its text or a .vkey file. Repeatable.", metavar="VKEY"),
    ] = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(
            "--head", help="Head kept elsewhere: a .note file or a folder of them. Repeatable.", metavar="NOTE"
        ),
    ] = None,
    origin: Annotated[str | None, typer.Option("--origin", metavar="NAME", help="The log one expects to see.")] = None,
    declarations: Annotated[
        Path | None,
        typer.Option("--declarations", help="Role, classification and what else people declare.", metavar="FILE.yaml"),
    ] = None,
    passphrase_file: Annotated[
        Path | None,
        typer.Option("--passphrase-file", help="File with the key's passphrase; asked for otherwise.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Verify a run and write a report from what verified.

    The report is logged in the run's custody log, so it needs a key. A run that does not verify gets no report.

    Example: gradtrail report runs/credit -o report.pdf --trust bank.vkey --head auditor/credit
    --declarations declarations.yaml --key bank.p12 --passphrase-file passphrase.txt
    """
    from auditlog.trust.anchors import Trust
    from auditlog.trust.keys import Signer
    from reports.build import build_report

    made = build_report(
        run,
        output,
        trust=Trust.load(trust or [], head or [], origin),
        signer=Signer.load(key, passphrase_file=passphrase_file),
        declarations=declarations,
        kind=kind.value,
    )
    if as_json:
        values = {name: getattr(made, name) for name in ("report_id", "pdf_sha256", "evidence_sha256", "size_bytes")}
        typer.echo(json.dumps({"path": str(made.path), **values, "custody_seq": made.custody_seq}, indent=2))
        return
    typer.echo(f"{made.path}  {made.size_bytes:,} bytes, DRAFT, {made.report_id}")
    typer.echo(f"  sha256 {made.pdf_sha256}")
    typer.echo(f"  logged as entry {made.custody_seq} of the custody log")


@app.command()
def obligations(
    role: Annotated[Role | None, typer.Option("--role", help="Only the duties of one role.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the duties that reports speak about, and the highest rating that training records can reach.

    Example: gradtrail obligations --role deployer
    """
    from reports.obligations import load_register

    register = load_register()
    chosen = [o for o in register.obligations if role is None or o.role == role.value]
    if as_json:
        listed = [o.model_dump(mode="json") for o in chosen]
        typer.echo(json.dumps({"basis": register.basis.model_dump(mode="json"), "obligations": listed}, indent=2))
        return
    typer.echo(f"{register.basis.law}, as at {register.basis.as_at}. Working summary, not legal advice.")
    typer.echo("Ceiling: the highest rating a report may show; a rating is no statement that a duty is fulfilled.\n")
    for o in chosen:
        typer.echo(f"{o.id:<14} {o.role:<9} {o.ceiling:<8} {o.reference}: {o.title}")
        typer.echo(f"{'':<33}{o.limit}")
