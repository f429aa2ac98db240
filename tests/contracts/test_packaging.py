"""What is shipped is what is needed: a wheel holds the templates and no tests, and public names exist."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_ships_templates_formats_and_nothing_of_the_tests(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"reports/templates/report.css", "reports/obligations.yaml", "auditlog/FORMAT.md"} <= set(names)
    assert any(name.startswith("reports/templates/") and name.endswith(".html.j2") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"auditlog", "attribution", "reports"}


@pytest.mark.parametrize("package", ["auditlog", "attribution", "reports"])
def test_every_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_versions_agree() -> None:
    import auditlog

    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == auditlog.__version__
    assert f"## {declared[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_project_names_no_machine_and_no_unfinished_work() -> None:
    wanted = re.compile(r"/wor[k]/|/roo[t]/|\bNotImplemented[E]rror|\bTOD[O]\b|\bFIXM[E]\b")
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT).parts
        if inside[0].startswith(".") or inside[0] in ("gradtrail-demo", "runs", "dist") or not path.is_file():
            continue
        if path.suffix in (".py", ".md", ".j2", ".toml", ".yaml", ".css") or path.name == "Makefile":
            assert not wanted.search(path.read_text()), path
