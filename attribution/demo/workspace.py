"""The demo's folder: what lies where, and the files a person would have written."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from auditlog.errors import UsageError
from auditlog.trust.keys import Signer

KEY_NAME = "demo-bank.example/audit"
MARKER = ".gradtrail-demo"

DECLARATIONS = """\
# What people declare, beside what the log recorded. A fictional bank; write your own.
declared_by: Demo Bank, head of retail credit (fictional)
declared_on: {today}
system:
  name: Demo Bank mortgage pre-screening
  version: 2026-12 demo
  intended_purpose: Proposes to approve or deny a mortgage application of a natural person; a credit officer decides.
provider: Demo Bank (fictional)
deployer: Demo Bank (fictional)
# The bank fine-tunes the model into a high-risk system for its own use, so it is both.
roles: [provider, deployer]
classification:
  basis: Article 6(2) with Annex III point 5(b), creditworthiness of natural persons
  decided_by: Demo Bank, legal department (fictional)
  decided_on: {today}
statements:
  collection_method: Boston HMDA mortgage applications of 1990 (United States), from a published study.
  selection_rationale: All denials of the training split and equally many approvals; 400 rows held out.
  plain_explanation: None was given. This is a demonstration.
# Everything else stays open on purpose; the report lists it as open human inputs.
"""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths below the demo's folder."""

    root: Path

    @classmethod
    def create(cls, root: Path, *, force: bool = False) -> Workspace:
        """Make the folder.

        Raises:
            UsageError: If it exists and ``force`` is not given, or it exists and is not a demo's folder.
        """
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            if not (root / MARKER).is_file():
                raise UsageError(f"{root} exists and is not a demo's folder", "Choose another: gradtrail demo FOLDER")
            if not force:
                raise UsageError(f"{root} exists already", f"Overwrite it with: gradtrail demo {root} --force")
            shutil.rmtree(root)
        root.mkdir(parents=True, exist_ok=True)
        (root / MARKER).write_text("Made by `gradtrail demo`. `gradtrail demo --force` deletes this folder.\n")
        return cls(root)

    @property
    def data(self) -> Path:
        """Training files and held-out rows."""
        return self.root / "data"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.root / "runs" / "credit"

    @property
    def auditor(self) -> Path:
        """What stands for another organisation's machine: the public key and the heads that were handed over."""
        return self.root / "auditor"

    @property
    def vkey(self) -> Path:
        """The auditor's copy of the public key."""
        return self.auditor / "bank.vkey"

    @property
    def key(self) -> Path:
        """The bank's long-lived signing key."""
        return self.root / "keys" / "bank.p12"

    @property
    def passphrase(self) -> Path:
        """Its passphrase; in a file because nobody sits at the keyboard."""
        return self.root / "keys" / "passphrase.txt"

    @property
    def declarations(self) -> Path:
        """What people declare."""
        return self.root / "declarations.yaml"

    @property
    def report(self) -> Path:
        """The PDF."""
        return self.root / "report-art26.pdf"

    @property
    def case(self) -> Path:
        """The contested case: its prompt, and the other cases it is compared with."""
        return self.root / "case"

    def copy(self, name: str) -> Path:
        """A copy of the run that is attacked."""
        return self.root / "attacked-copies" / name

    def last_head(self) -> Path:
        """The newest head that the auditor holds."""
        return max((self.auditor / self.run.name).glob("*.note"))

    def make_key(self) -> Signer:
        """Make the bank's key and give its public half to the auditor."""
        self.key.parent.mkdir(mode=0o700)
        self.passphrase.touch(mode=0o600)
        self.passphrase.write_text(secrets.token_urlsafe(18) + "\n")
        signer = Signer.generate(KEY_NAME)
        public = signer.save(self.key, self.passphrase.read_text().strip())
        self.auditor.mkdir()
        shutil.copyfile(public, self.vkey)
        return signer

    def write_declarations(self) -> None:
        """Write the declarations that the report prints beside the recorded facts."""
        today = datetime.now(UTC).date().isoformat()
        self.declarations.write_text(DECLARATIONS.format(today=today), encoding="utf-8")
