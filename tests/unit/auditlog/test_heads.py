"""Heads as files, and their way to somebody else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from auditlog.errors import StoreError, UsageError
from auditlog.ledger.files import write_once
from auditlog.ledger.heads import check_on_head, deliver, note_name, read_notes

NOTE = b"origin\n1\nroot\n\n\xe2\x80\x94 key sig\n"


def test_names_sort_like_sizes() -> None:
    names = [note_name(size) for size in (1, 9, 10, 1024, 99_999_999)]
    assert names == sorted(names)
    assert note_name(1024) == "00001024.note"


def test_a_file_is_written_once_and_the_same_bytes_again_are_no_error(tmp_path: Path) -> None:
    path = tmp_path / "heads" / "1.note"
    write_once(path, NOTE)
    write_once(path, NOTE)
    with pytest.raises(StoreError, match="other content"):
        write_once(path, b"another")
    assert path.read_bytes() == NOTE
    assert [p.name for p in path.parent.iterdir()] == ["1.note"]  # no temporary file stays


def test_a_left_over_temporary_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".1.note.partial").write_bytes(b"half a no")
    write_once(tmp_path / "1.note", NOTE)
    assert read_notes(tmp_path) == {"1.note": NOTE}


def test_a_folder_receives_the_note_under_the_runs_name(tmp_path: Path) -> None:
    deliver(tmp_path / "auditor", tmp_path / "credit", "1.note", NOTE)
    assert (tmp_path / "auditor/credit/1.note").read_bytes() == NOTE


def test_two_runs_cannot_share_one_place(tmp_path: Path) -> None:
    deliver(tmp_path / "auditor", tmp_path / "a" / "run", "1.note", NOTE)
    with pytest.raises(StoreError, match="other content"):
        deliver(tmp_path / "auditor", tmp_path / "b" / "run", "1.note", b"another")


def test_a_callable_and_a_command_receive_the_same_bytes(tmp_path: Path) -> None:
    seen: list[tuple[str, bytes]] = []
    deliver(lambda name, note: seen.append((name, note)), tmp_path, "1.note", NOTE)
    assert seen == [("1.note", NOTE)]
    copy = tmp_path / "copy"
    program = f"import sys; open({str(copy)!r}, 'wb').write(sys.stdin.buffer.read())"
    deliver(f'command:{sys.executable} -c "{program}"', tmp_path, "1.note", NOTE)
    assert copy.read_bytes() == NOTE


def test_a_refusal_is_an_error_that_says_what_the_other_side_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="status 3: no room"):
        deliver(
            f"command:{sys.executable} -c \"import sys; sys.stderr.write('no room'); sys.exit(3)\"", tmp_path, "n", NOTE
        )
    with pytest.raises(StoreError, match="did not run"):
        deliver("command:/no/such/program", tmp_path, "n", NOTE)

    def refuse(name: str, note: bytes) -> None:
        raise RuntimeError("line is down")

    with pytest.raises(StoreError, match="line is down"):
        deliver(refuse, tmp_path, "n", NOTE)


def test_a_place_that_binds_nobody_is_refused_beforehand(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "file").write_text("")
    for place in (run, run / "heads", tmp_path / "file", "command:"):
        with pytest.raises(UsageError):
            check_on_head(place, run)
    for place in (None, tmp_path / "auditor", "command:true", print):
        check_on_head(place, run)  # type: ignore[arg-type]
