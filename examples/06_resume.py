"""Training breaks off in the middle; the same run goes on, and the log says so.

python examples/06_resume.py [FOLDER]
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from small_model import build, write_data

from attribution import AuditMode
from auditlog import DataManifest, Signer, Trust, verify_run

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="gradtrail-"))
write_data(folder / "data")
manifest = DataManifest.build(folder / "data" / "*.jsonl")
signer = Signer.generate("bank.example/audit")

recipe = build(manifest)
model, rows = recipe.model, [recipe.dataset[i] for i in range(24)]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = [recipe.collator(rows[i : i + 4]) for i in range(0, 24, 4)]
saved = {}


def audited(**options):
    return AuditMode(
        model, optimizer, manifest, run=folder / "run", signer=signer, on_head=folder / "auditor", **options
    )


def train(first: int, breaks_at: int | None = None) -> None:
    for step in range(first, len(batches)):
        if step == breaks_at:
            raise KeyboardInterrupt
        if step == 2:  # a checkpoint after two steps
            saved.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        model(**batches[step]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


try:
    with audited():
        train(0, breaks_at=4)
except KeyboardInterrupt:
    print("broken off after 4 steps")

# Back to the checkpoint: steps 3 and 4 are taken again, and their first records no longer count.
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
with audited(resume=True, from_step=2):
    train(2)

verdict = verify_run(folder / "run", Trust.load([str(signer.vkey)], [folder / "auditor" / "run"]))
print(f"{verdict.status}: {verdict.attempts} attempts, {verdict.records} records in {verdict.steps} steps")
print(f"gradtrail show {folder / 'run'}")
