"""``gradtrail demo``, ``modules`` and ``query``: parse, one library call, print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from auditlog.errors import DataError, UsageError

app = typer.Typer(no_args_is_help=True)


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where everything goes.")] = Path("gradtrail-demo"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an earlier demo in that folder.")] = False,
) -> None:
    """Play the whole story on a real model and real loan data: train, verify, query, report, tamper.

    Takes some minutes on two cores and needs no network.

    Example: gradtrail demo
    """
    with _installed("demo"):
        from attribution.demo.story import run_demo
    run_demo(folder, force=force)


@app.command()
def modules(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A transformers model, by name or folder, or a recipe FILE.py:FUNCTION."),
    ],
    lora: Annotated[int | None, typer.Option("--lora", metavar="R", help="Put LoRA of rank R on it first.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="As in AuditMode(…, mode='fused').")] = False,
    tokens: Annotated[int, typer.Option("--tokens", metavar="T", min=1, help="Tokens per row, for the figures.")] = 512,
    every: Annotated[bool, typer.Option("--all", help="One line per module, repeated layers too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show how each trainable module would be tracked, what that costs, and what would be left out.

    A transformers model is built from its configuration alone; no weights are read.

    Example: gradtrail modules HuggingFaceTB/SmolLM2-135M --lora 8
    """
    with _installed("train"):
        from attribution.demo.quiet import quiet
        from attribution.training import plan
    mode = "fused" if fused else "observe"
    with quiet():
        tracking, planned = plan.look(model, mode=mode, tokens=tokens, lora_rank=lora)
    if as_json:
        typer.echo(json.dumps(plan.to_document(tracking, planned, mode, tokens), indent=2))
        return
    from attribution.demo.stage import make_console

    console = make_console()
    for part in plan.render(tracking, planned, mode, tokens, every):
        console.print(part)


@app.command()
def query(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, sealed.")],
    target: Annotated[str, typer.Option("--target", metavar="TEXT", help="The answer to explain.")],
    against: Annotated[str, typer.Option("--against", metavar="TEXT", help="The answer it is compared with.")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What the model was asked.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="The same, from a text file.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE.jsonl", help="At least eight other cases, each with a prompt."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", metavar="FILE.py:FUNCTION", help="Builds the model; by default the recorded recipe."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder of the source files, to show the records.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Your signing key: logs the answer. Without it: not logged."),
    ] = None,
    passphrase_file: Annotated[
        Path | None, typer.Option("--passphrase-file", metavar="FILE", help="File with the key's passphrase.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Ask which training records pushed the model towards one answer and away from another.

    score > 0 means: training on the record pushed log p(target) - log p(against) up. The run itself is not verified
    here; gradtrail verify does that.

    Example: gradtrail query runs/credit --prompt-file case.txt --target deny --against approve
    --reference others.jsonl --key bank.p12
    """
    asked = _prompt(prompt, prompt_file)
    with _installed("train"):
        from attribution.demo.quiet import quiet
        from attribution.influence.session import answer
        from auditlog.trust.keys import Signer
    signer = None if key is None else Signer.load(key, passphrase_file=passphrase_file)
    others = _others(reference)
    with quiet():
        result, logged = answer(run, asked, target, against, others=others, recipe=recipe, data=data, signer=signer)
    where = "not logged: no --key was given" if logged is None else f"logged in the custody log as custody/{logged}"
    if as_json:
        typer.echo(json.dumps({**result.to_document(), "logged": logged}, indent=2))
        return
    from attribution.demo.stage import make_console
    from attribution.influence import show

    console = make_console()
    console.print(show.render(result))
    console.print()
    console.print(show.limits(result))
    console.print(f"\n[bold]{where}[/bold]")


@contextmanager
def _installed(extra: str) -> Iterator[None]:
    """Turn a missing package into an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("attribution", "auditlog"):
            raise
        raise UsageError(f"this command needs {error.name}", f'Run: pip install "gradtrail[{extra}]"') from error


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt from whichever option was given."""
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give the prompt once", "Use --prompt TEXT or --prompt-file FILE.")
    return prompt if prompt_file is None else _read(prompt_file).removesuffix("\n")  # type: ignore[return-value]


def _others(reference: Path | None) -> list[dict[str, Any]]:
    """Return the other cases' rows."""
    if reference is None:
        return []
    rows = []
    for number, line in enumerate(_read(reference).splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{reference}: line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise DataError(f"{reference}: line {number}: no text in field 'prompt'")
        rows.append(row)
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error
