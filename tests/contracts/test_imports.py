"""What each command may load: an auditor's machine has no torch, and asking for help loads next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "peft", "datasets", "weasyprint", "jinja2")

PROBE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError("this machine has no " + name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["gradtrail", *{arguments!r}]
from auditlog.cli import main
main()
"""


def run_without(heavy: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line on a machine where some packages cannot be imported."""
    code = PROBE.format(heavy=set(heavy), arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


OF_THE_LOG = ("verify", "show", "seal", "keygen", "export", "prove", "erase")


@pytest.mark.parametrize("command", ["", *OF_THE_LOG, "query", "report", "demo", "obligations"])
def test_help_of_every_command_works_on_an_auditors_machine(command: str) -> None:
    done = run_without(HEAVY, *filter(None, [command, "--help"]))
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_verify_needs_no_model(tmp_path: Path) -> None:
    done = run_without(HEAVY, "verify", str(tmp_path / "nowhere"))
    assert done.returncode == 3, done.stderr
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("command", "extra"), [(["query", "RUN", "--prompt", "x", "--target", "y"], "train"), (["report", "RUN"], "report")]
)
def test_a_command_without_its_extra_says_which_one(tmp_path: Path, command: list[str], extra: str) -> None:
    (tmp_path / "run").mkdir()
    done = run_without(HEAVY, *[str(tmp_path / "run") if word == "RUN" else word for word in command])
    assert done.returncode in (2, 3), done.stdout
    assert "Traceback" not in done.stderr


def test_importing_the_log_loads_no_database() -> None:
    code = "import auditlog, sys; print(sorted(set(sys.modules) & {'duckdb', 'pyarrow', 'torch'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
