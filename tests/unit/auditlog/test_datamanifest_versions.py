"""Data versions: what git and DVC say is compared with the files; what is declared is recorded as declared."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError
from auditlog.format.manifest import DataVersion

ROW = '{"text": "a"}\n'


def git(folder: Path, *arguments: str) -> str:
    settings = ["user.name=x", "user.email=x@example.com", "protocol.file.allow=always", "status.showUntrackedFiles=no"]
    flags = [flag for setting in settings for flag in ("-c", setting)]
    return subprocess.run(
        ["git", "-C", str(folder), *flags, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def repository(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(ROW)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "data")
    return folder


def version_of(pattern: Path, version: str) -> DataVersion:
    (found,) = DataManifest.build(pattern, version=version).block.versions
    return found


def md5(content: str | bytes) -> str:
    return hashlib.md5(content.encode() if isinstance(content, str) else content).hexdigest()


def test_git_calls_a_file_dirty_that_the_commit_does_not_hold(tmp_path: Path) -> None:
    folder = repository(tmp_path, "a.jsonl", "odd [1]*.jsonl", "sub/b.jsonl")
    git(folder, "config", "status.showUntrackedFiles", "no")
    (folder / "ignored").mkdir()
    (folder / "ignored" / "c.jsonl").write_text(ROW)
    (folder / ".git" / "info" / "exclude").write_text("ignored/\n")
    assert version_of(folder / "a.jsonl", "git").dirty is False
    (folder / "odd 1x.jsonl").write_text(ROW)  # the other's name, read as a pattern, matches it
    assert version_of(folder / "odd [1]*.jsonl", "git").dirty is False
    assert version_of(folder / "ignored" / "c.jsonl", "git").dirty is True
    (folder / "sub" / "new.jsonl").write_text(ROW)
    assert version_of(folder / "sub" / "b.jsonl", "git").dirty is False
    assert version_of(folder / "sub" / "*.jsonl", "git").dirty is True
    git(folder, "add", ".")
    assert version_of(folder / "sub" / "*.jsonl", "git").dirty is True
    git(folder, "commit", "-qm", "more")
    found = version_of(folder / "sub" / "*.jsonl", "git")
    assert (found.kind, found.revision, found.dirty) == ("git", git(folder, "rev-parse", "HEAD"), False)


def test_git_follows_a_link_to_its_file(tmp_path: Path) -> None:
    folder = repository(tmp_path, "real/a.jsonl")
    (folder / "data").mkdir()
    (folder / "data" / "b.jsonl").write_text(ROW)
    (folder / "data" / "link.jsonl").symlink_to("../real/a.jsonl")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "link")
    build = lambda: DataManifest.build(folder / "data" / "*.jsonl", version="git", base=folder)  # noqa: E731
    assert build().block.versions[0].dirty is False
    (folder / "real" / "a.jsonl").write_text(ROW * 2)
    assert build().block.versions[0].dirty is True


def test_a_submodules_files_belong_to_its_own_commit(tmp_path: Path) -> None:
    inner = repository(tmp_path / "inner", "b.jsonl")
    outer = repository(tmp_path / "outer", "a.jsonl")
    git(outer, "submodule", "--quiet", "add", str(inner), "sub")
    git(outer, "commit", "-qm", "submodule")
    manifest = DataManifest.build([outer / "a.jsonl", outer / "sub" / "*.jsonl"], version="git")
    first, second = manifest.block.versions
    assert (first.revision, first.dirty) == (git(outer, "rev-parse", "HEAD"), False)
    assert (second.revision, second.dirty) == (git(inner, "rev-parse", "HEAD"), False)
    assert manifest.locate([0, 1])[2].tolist() == [0, 1]
    assert second.root == hashlib.sha256(bytes.fromhex(manifest.block.sources[1].sha256)).hexdigest()
    (outer / "sub" / "b.jsonl").write_text(ROW * 2)
    versions = DataManifest.build([outer / "a.jsonl", outer / "sub" / "*.jsonl"], version="git").block.versions
    assert [v.dirty for v in versions] == [False, True]


def test_a_dvc_file_beside_the_data_is_the_version_and_is_compared(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROW)
    pointer = f"outs:\n- md5: {md5(ROW)}\n  size: {len(ROW)}\n  hash: md5\n  path: a.jsonl\n"
    (tmp_path / "a.jsonl.dvc").write_text(pointer)
    found = version_of(tmp_path / "a.jsonl", "dvc")
    assert (found.kind, found.revision, found.dirty) == ("dvc", f"md5:{md5(ROW)}", False)
    (file,) = found.files
    assert (file.path, file.digest, file.size_bytes) == ("a.jsonl", f"md5:{md5(ROW)}", len(ROW))
    (tmp_path / "a.jsonl").write_text(ROW * 2)
    assert version_of(tmp_path / "a.jsonl", "dvc").dirty is True


def test_before_version_3_dvc_took_line_ends_as_unix_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW.replace("\n", "\r\n").encode())
    pointer = f"outs:\n- md5: {md5(ROW)}\n  size: 15\n  path: a.jsonl\n"
    (tmp_path / "a.jsonl.dvc").write_text(pointer)
    assert version_of(tmp_path / "a.jsonl", "dvc").dirty is False
    (tmp_path / "a.jsonl.dvc").write_text(pointer + "  hash: md5\n")
    assert version_of(tmp_path / "a.jsonl", "dvc").dirty is True


@pytest.mark.parametrize("cache", [".dvc/cache/files/md5", ".dvc/cache"])
def test_a_dvc_folder_is_compared_through_its_listing_in_the_cache(tmp_path: Path, cache: str) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "a.jsonl").write_text(ROW)
    (tmp_path / "data" / "sub" / "b.jsonl").write_text(ROW * 2)
    names = {"a.jsonl": ROW, "sub/b.jsonl": ROW * 2}
    listing = json.dumps([{"md5": md5(text), "relpath": name} for name, text in names.items()])
    name = md5(listing) + ".dir"
    (tmp_path / "data.dvc").write_text(f"outs:\n- md5: {name}\n  hash: md5\n  nfiles: 2\n  path: data\n")
    pattern = tmp_path / "data" / "**" / "*.jsonl"
    found = version_of(pattern, "dvc")
    assert (found.revision, found.dirty) == (f"md5:{name}", None), "without the listing nothing can be compared"
    cached = tmp_path / cache / name[:2] / name[2:]
    cached.parent.mkdir(parents=True)
    cached.write_text(listing)
    assert version_of(pattern, "dvc").dirty is False
    (tmp_path / "data" / "new.jsonl").write_text(ROW)
    assert version_of(pattern, "dvc").dirty is True
    (tmp_path / "data" / "new.jsonl").unlink()
    cached.write_text(listing + " ")
    with pytest.raises(DataError, match="damaged: its MD5 is not its name"):
        version_of(pattern, "dvc")


def test_outputs_of_a_dvc_stage_and_several_pointers(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", ROW), ("b.jsonl", ROW * 2)):
        (tmp_path / name).write_text(text)
    (tmp_path / "a.jsonl.dvc").write_text(f"outs:\n- md5: {md5(ROW)}\n  hash: md5\n  path: a.jsonl\n")
    out = f"{{md5: {md5(ROW * 2)}, hash: md5, path: b.jsonl, size: 28}}"
    (tmp_path / "dvc.lock").write_text(f"schema: '2.0'\nstages:\n  make:\n    cmd: make\n    outs:\n    - {out}\n")
    found = version_of(tmp_path / "*.jsonl", "dvc")
    lines = f"md5:{md5(ROW)}  a.jsonl\nmd5:{md5(ROW * 2)}  b.jsonl\n"
    assert (found.revision, found.dirty) == (f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}", False)


@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        ("outs:\n- md5: 00\n  path: other.jsonl\n", "no .dvc file or dvc.lock speaks of"),
        ("outs: [", "not YAML"),
        ("- 1\n", "not a DVC file"),
        ("outs:\n- path: a.jsonl\n", "an entry of outs has no path and md5"),
    ],
)
def test_dvc_files_that_say_nothing_are_named(tmp_path: Path, pointer: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(ROW)
    (tmp_path / "a.jsonl.dvc").write_text(pointer)
    with pytest.raises(DataError, match=message) as caught:
        version_of(tmp_path / "a.jsonl", "dvc")
    assert caught.value.advice()


def test_declared_revisions_are_recorded_as_declared(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROW)
    lakefs = version_of(tmp_path / "a.jsonl", "lakefs://credit@1a2b3c")
    assert (lakefs.kind, lakefs.revision, lakefs.dirty) == ("lakefs", "credit@1a2b3c", None)
    hub = version_of(tmp_path / "a.jsonl", "hub:org/name@" + "0" * 40)
    assert (hub.kind, hub.revision, hub.dirty) == ("hub", "org/name@" + "0" * 40, None)
    assert hub.root == version_of(tmp_path / "a.jsonl", "files").root
    for wrong in ("lakefs://credit", "hub:org/name", "hub:@x"):
        with pytest.raises(DataError, match="not of the form"):
            version_of(tmp_path / "a.jsonl", wrong)
