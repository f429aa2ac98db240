"""What tests of every folder share: the command line, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from auditlog import cli


class Output(NamedTuple):
    """What one call of the command line ended with and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def gradtrail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """Run the command line in this process."""

    def run(*arguments: object) -> Output:
        monkeypatch.setattr(sys, "argv", ["gradtrail", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        code = left.value.code
        return Output(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run
