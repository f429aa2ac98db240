"""Audit mode around a plain training loop.

    python examples/01_plain_loop.py [FOLDER]

Afterwards: gradtrail verify FOLDER/run --trust FOLDER/auditor/bank.vkey --head FOLDER/auditor/run
"""

import sys
import tempfile
from pathlib import Path

import torch
from small_model import build, write_data

from attribution import AuditMode
from auditlog import DataManifest, Signer, Trust, verify_run

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="gradtrail-"))
write_data(folder / "data")

# 1. Fix what is trained on: files, rows, digests, a version.
manifest = DataManifest.build(folder / "data" / "*.jsonl")

# 2. A long-lived key. Its public half goes to whoever will verify; here a folder stands for them.
signer = Signer.generate("bank.example/audit")
(folder / "auditor").mkdir()
(folder / "auditor" / "bank.vkey").write_text(f"{signer.vkey}\n")

# 3. An ordinary loop. The batch carries `sample_index`; nothing else changes.
recipe = build(manifest)
optimizer = torch.optim.AdamW(recipe.model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(recipe.dataset, batch_size=8, shuffle=True, collate_fn=recipe.collator)

with AuditMode(
    recipe.model,
    optimizer,
    manifest,
    run=folder / "run",
    signer=signer,
    recipe=f"{Path(__file__).parent / 'small_model.py'}:build",
    on_head=folder / "auditor",  # every signed head leaves for the auditor as it is made
):
    for _epoch in range(2):
        for batch in loader:
            loss = recipe.model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(recipe.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")

# 4. Verify, with what the auditor holds.
verdict = verify_run(folder / "run", Trust.load([folder / "auditor" / "bank.vkey"], [folder / "auditor" / "run"]))
print(f"{verdict.status}: {verdict.records} records in {verdict.steps} steps, exit {verdict.exit_code}")
print(f"run folder: {folder / 'run'}")
