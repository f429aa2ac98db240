"""How the demo looks on a terminal: numbered steps, facts in two columns, progress, and commands one can repeat."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from attribution.errors import AttributionError

STEPS = 7
PIPE_WIDTH = 120
NAME_WIDTH = 19


class Stage:
    """Prints the story.

    Args:
        console: Where to; by default standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or make_console()
        self.began = perf_counter()

    def step(self, number: int, title: str, text: str) -> None:
        """Open a step: its number and title, and in a sentence or two what happens and why."""
        self.console.print()
        self.console.print(Rule(f"[bold]{number}/{STEPS}  {title}[/bold]", align="left", style="cyan"))
        self.console.print(Text(text, style="italic"))
        self.console.print()

    def facts(self, *rows: tuple[str, str]) -> None:
        """Print names and values in two columns."""
        self.console.print(_two_columns(rows))

    def say(self, text: str, style: str = "") -> None:
        """Print one paragraph."""
        self.console.print(Text(text, style=style))

    def command(self, *words: str | Path, expect: int = 0) -> int:
        """Print a command, run it, and print its exit code.

        Raises:
            AttributionError: If it ends with another code than the story needs.
        """
        shown = [str(word) for word in words]
        self.repeatable(*shown)
        sys.stdout.flush()
        code = subprocess.run(_resolve(shown), check=False).returncode
        good = code == expect
        told = f"→ exit {code}, " + ("as it should be" if good else f"but {expect} was expected")
        self.console.print(Text(told, style="green" if good else "bold red"))
        if not good:
            raise AttributionError(
                f"{typed(shown)} ended with exit {code}, the demo expected {expect}",
                "Run the command by hand to see more; the workspace is left as it is.",
            )
        return code

    def repeatable(self, *words: str | Path) -> None:
        """Print a command on one line, as one would type it."""
        self.console.print(Text.assemble(("$ ", "dim"), (typed([str(w) for w in words]), "bold")), soft_wrap=True)

    def end(self, title: str, *rows: tuple[str, str]) -> None:
        """Print the closing summary in a frame."""
        self.console.print()
        self.console.print(
            Panel(_two_columns(rows), title=f"[bold]{title}[/bold]", title_align="left", border_style="cyan")
        )

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """Show a progress bar on a terminal, nothing in a pipe; yields ``advance(n=1, note="")``."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(title, total=total, note="")

            def advance(n: int = 1, note: str = "") -> None:
                bar.update(task, advance=n, note=note)

            yield advance

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner on a terminal while something short goes on that has no steps to count."""
        return self.console.status(text) if self.console.is_terminal else nullcontext()

    @property
    def elapsed(self) -> str:
        """Minutes and seconds since the beginning."""
        minutes, seconds = divmod(int(perf_counter() - self.began), 60)
        return f"{minutes} min {seconds:02d} s"


def make_console() -> Console:
    """Return a console on standard output that keeps tables readable in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def typed(words: Sequence[str]) -> str:
    """Return a command as one would type it: plain ``python``, and double quotes where they save the reader's eyes."""
    return " ".join("python" if word == sys.executable else _quote(word) for word in words)


def _quote(word: str) -> str:
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _two_columns(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=NAME_WIDTH)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def _resolve(words: Sequence[str]) -> list[str]:
    """Return the command with ``gradtrail`` taken from this Python's own environment."""
    if words[0] != "gradtrail":
        return list(words)
    beside = Path(sys.executable).with_name("gradtrail")
    found = str(beside) if beside.is_file() else shutil.which("gradtrail")
    if found is None:
        raise AttributionError("the gradtrail command is not on the path", "Install the package: pip install -e .")
    return [found, *words[1:]]
