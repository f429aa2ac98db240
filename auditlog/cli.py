"""The ``gradtrail`` command: keygen, show, verify and seal, and the root that merges the other packages' commands.

Only the standard library, typer and our errors are imported here; the work is imported inside each command, so
that ``--help`` is quick and ``gradtrail verify`` never loads a model.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from auditlog.cli_erase import app as erase_app
from auditlog.cli_export import app as export_app
from auditlog.errors import Error, ReadError, UsageError

_PURPOSE = "An evidence log of per-sample gradients: train with it, verify it, query it, report from it."

ENTRY_POINTS = "gradtrail.commands"
_EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "accelerate": "train",
    "datasets": "train",
    "safetensors": "train",
    "scipy": "train",
    "jinja2": "report",
    "weasyprint": "report",
    "yaml": "report",
    "gguf": "demo",
}

app = typer.Typer(no_args_is_help=True)
app.add_typer(export_app)
app.add_typer(erase_app)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="KEY|FILE",
        help="Pinned public key (its text, a .vkey or PEM file, or its fingerprint), or a trust.toml. Repeatable.",
    ),
]
HeadOption = Annotated[
    list[Path] | None,
    typer.Option("--head", metavar="NOTE", help="Head kept elsewhere: a .note file or a folder of them. Repeatable."),
]
OriginOption = Annotated[str | None, typer.Option("--origin", metavar="NAME", help="The log one expects to see.")]
KeyOption = Annotated[
    str, typer.Option("--key", metavar="KEY", help="Your long-lived signing key: FILE.p12, FILE.pem or command:…")
]
PassphraseOption = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="File with the key's passphrase; asked for otherwise."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def main() -> None:
    """Run the command line; the console script.

    Our own errors end as two lines and an exit code, never as a traceback. Exit code 1 is kept for bugs.
    """
    try:
        _root()()
    except Error as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print_error(
            UsageError(f"this command needs {error.name}, which is not installed", f'pip install "gradtrail[{extra}]"')
        )
        sys.exit(UsageError.exit_code)


def print_error(error: Error) -> None:
    """Print an error and its advice to standard error."""
    from auditlog.display import clean

    typer.echo(f"error: {clean(str(error))}", err=True)
    if error.advice():
        typer.echo(f"  {clean(error.advice())}", err=True)


def _root() -> typer.Typer:
    """Return one application with the commands of all installed packages."""
    root = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback(help=_PURPOSE)(_options)
    for entry in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            root.add_typer(entry.load())
        except ImportError as error:  # verifying must not depend on the packages that train and report
            typer.echo(f"note: the commands of {entry.name} are not available: {error}", err=True)
    return root


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from auditlog.format.records import FORMAT_VERSION

    typer.echo(f"gradtrail {metadata.version('gradtrail')}, log format {FORMAT_VERSION} (draft)")
    if _is_mixed_install():
        typer.echo(
            "warning: django-auditlog is installed here too. Both packages are imported as 'auditlog' and overwrite "
            "each other's files: give gradtrail an environment of its own.",
            err=True,
        )
    raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of the root command; ``--version`` acts in its own callback."""


def _is_mixed_install() -> bool:
    """Return whether django-auditlog shares our import name in this environment."""
    try:
        metadata.distribution("django-auditlog")
    except metadata.PackageNotFoundError:
        return (Path(__file__).parent / "registry.py").exists()
    return True


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(metavar="KEY.p12", help="Where the key goes; KEY.vkey goes beside it.")],
    name: Annotated[str, typer.Option("--name", help="The key's name in signatures, such as bank.example/audit.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Make a long-lived signing key, encrypted, and its public half.

    Example: gradtrail keygen signing.p12 --name bank.example/audit
    """
    from auditlog.trust.keys import Signer, read_passphrase

    if passphrase_file is not None:
        passphrase = read_passphrase(passphrase_file)
    elif sys.stdin.isatty():
        passphrase = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True)
    else:
        raise UsageError("a key needs a passphrase", "Give --passphrase-file FILE, or run it on a terminal.")
    signer = Signer.generate(name)
    public = signer.save(path, passphrase)
    typer.echo(f"signing key  {path}  (keep it, and its passphrase, off the training machine if you can)")
    typer.echo(f"public key   {public}  (give it to whoever will verify, by a way they trust)")
    typer.echo(f"fingerprint  {signer.vkey.fingerprint}")
    typer.echo(str(signer.vkey))


@app.command()
def verify(
    run: RunArgument,
    trust: TrustOption = None,
    head: HeadOption = None,
    since: Annotated[
        Path | None,
        typer.Option("--since", metavar="NOTE", help="Kept head from which on the log is to have only grown."),
    ] = None,
    origin: OriginOption = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder of the source files: opens every sample's commitment too."),
    ] = None,
    custody: Annotated[
        Path | None, typer.Option("--custody", metavar="DIR", help="A custody log of this run that is kept elsewhere.")
    ] = None,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Let a run that is not sealed yet verify, as far as it is signed.")
    ] = False,
    allow_unanchored: Annotated[
        bool, typer.Option("--allow-unanchored", help="Exit 0 although nothing from outside was given to compare with.")
    ] = False,
    log_only: Annotated[
        bool, typer.Option("--log-only", help="Leave sketches and salts unread: the log alone, much faster.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run against what you hold outside it, and say what was and was not checked.

    Exit code: 0 verified, 3 cannot read, 4 integrity, 5 incomplete, 6 authenticity, 7 unanchored.

    Example: gradtrail verify runs/credit --trust bank.vkey --head auditor/credit/00001024.note
    """
    from auditlog import display
    from auditlog.ledger.verify_run import verify_run
    from auditlog.trust.anchors import Trust

    if log_only and data is not None:
        raise UsageError("--data opens every sample's commitment and --log-only opens none", "Give one of the two.")
    try:
        brought = Trust.load(
            trust or (), head or (), origin, since=since, allow_open=allow_open, allow_unanchored=allow_unanchored
        )
        with display.counter("reading", "entries", quiet=as_json) as progress:
            verdict = verify_run(run, brought, data=data, custody=custody, payloads=not log_only, progress=progress)
    except ReadError as error:
        display.print_unreadable(run, error, as_json=as_json)
        raise typer.Exit(error.exit_code) from error
    if as_json:
        _print_json(verdict.to_json())
    else:
        display.print_verdict(run, verdict)
    raise typer.Exit(verdict.exit_code)


@app.command()
def show(
    run: RunArgument,
    seq: Annotated[int | None, typer.Option("--seq", metavar="N", help="One entry in full.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The samples of one optimizer step, by file and row.")
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Every optimizer step.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Add up each step's samples again and compare with its gradient.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a run folder holds. Nothing is verified here: that is what verify is for.

    Example: gradtrail show runs/credit --step 7
    """
    from auditlog import display, display_run, summary
    from auditlog.ledger.conservation import recompute as recompute_steps
    from auditlog.ledger.reader import RunReader

    with RunReader.open(run) as reader:
        if seq is not None:
            document, printer = summary.entry(reader, seq), display.print_entry
        elif step is not None:
            document, printer = summary.step(reader, step), display.print_step
        elif recompute:
            document, printer = (
                summary.conservation(recompute_steps(reader), summary.step_count(reader)),
                display.print_conservation,
            )
        elif steps:
            document, printer = summary.steps(reader), display.print_steps
        else:
            document, printer = summary.run(reader), display_run.print_run
    if as_json:
        _print_json(document)
    else:
        printer(document)


@app.command()
def seal(
    run: RunArgument,
    key: KeyOption,
    abandon: Annotated[bool, typer.Option("--abandon", help="Close a run that stopped and will not go on.")] = False,
    on_head: Annotated[
        str | None, typer.Option("--on-head", metavar="PLACE", help="Hand the head over: a folder or command:CMD.")
    ] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Seal although entries are gone, and have the log say so.")
    ] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Seal a run that ended without a seal, such as after a crash.

    A run that ends normally seals itself. What was recorded stays; the seal says that the run was abandoned.

    Example: gradtrail seal runs/credit --abandon --key signing.p12
    """
    if not abandon:
        raise UsageError(
            "a run seals itself when training ends",
            "If it crashed and will not be resumed, close it with --abandon.",
        )
    from auditlog.ledger.abandon import seal_abandoned
    from auditlog.trust.keys import Signer

    signer = Signer.load(key, passphrase_file=passphrase_file)
    note = seal_abandoned(run, signer, on_head=on_head, accept_loss=accept_loss)
    statement = note.checkpoint()
    typer.echo(f"sealed as abandoned: {statement.origin}, {statement.size:,} entries, root {statement.root.hex()}")
    typer.echo(f"keep this head elsewhere: {run / 'heads' / f'{statement.size:08d}.note'}")


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
