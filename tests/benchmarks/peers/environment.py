"""A virtual environment for the peers: it sees the project's own packages, torch among them, and adds the peers.

Everything is installed with ``--no-deps`` plus what the peers import, so no second torch arrives and nothing of the
project's own environment is changed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Package of the peer, and what else it imports. bergson and kronfluence name torchvision and more: they run without.
REQUIREMENTS: Mapping[str, Sequence[str]] = {
    "dattri-llm==0.1.0": (),
    "bergson==2.5.1": (
        "simple-parsing==0.1.9",
        "docstring-parser==0.18.0",
        "petname==2.9",
        "natsort==8.4.0",
        "jaxtyping==0.3.11",
        "wadler-lindig==0.1.8",
        "ml-dtypes==0.7.0",
    ),
    "traceprop==0.7.0": (),
    "kronfluence==1.0.1": ("einops==0.8.2", "einconv==0.1.0", "opt-einsum==3.4.0"),
}


@dataclass(frozen=True, slots=True)
class Environment:
    """Where peers run.

    Attributes:
        python: Its interpreter.
        failed: Peers that could not be installed: name of the package -> the first line of pip's error.
    """

    python: Path
    failed: dict[str, str] = field(default_factory=dict)


def prepare(folder: Path, requirements: Mapping[str, Sequence[str]] = REQUIREMENTS) -> Environment:
    """Make the environment, or complete one that is there.

    Args:
        folder: For the environment; made if it is missing.
        requirements: Each peer's package with what it imports.
    """
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False, symlinks=True)
        _see_own_packages(python)
    failed = {}
    for peer, imports in requirements.items():
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "-q", peer, *imports]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            failed[peer.partition("==")[0]] = first_error(done.stderr)
    return Environment(python, failed)


def first_error(text: str) -> str:
    """Return the line that says what went wrong: pip's first error, or how a traceback ends."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    if errors:
        return errors[0].removeprefix("ERROR:").strip()
    return lines[-1] if lines else "it ended without a word"


def _see_own_packages(python: Path) -> None:
    """Put the running environment's packages, editable ones too, behind the new one's own."""
    own = sysconfig.get_path("purelib")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    new = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    (Path(new) / "project.pth").write_text(f"import site; site.addsitedir({own!r})\n")
