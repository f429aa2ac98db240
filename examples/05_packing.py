"""Several documents in one row, and still one gradient per document.

python examples/05_packing.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from small_model import build, write_data

from attribution import AuditMode, PackingCollator
from auditlog import DataManifest, RunReader, Signer
from auditlog.format.records import EventKind

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="gradtrail-"))
write_data(folder / "data")
manifest = DataManifest.build(folder / "data" / "*.jsonl")
signer = Signer.generate("bank.example/audit")

recipe = build(manifest)
optimizer = torch.optim.AdamW(recipe.model.parameters(), lr=3e-3)

# Eight documents a batch, end to end in one row, no padding. Positions restart, so documents do not see each other;
# audit mode tries that out on the first batch and refuses rows where they do.
loader = torch.utils.data.DataLoader(recipe.dataset, batch_size=8, shuffle=True, collate_fn=PackingCollator())

with AuditMode(recipe.model, optimizer, manifest, run=folder / "run", signer=signer, on_head=folder / "auditor"):
    for batch in loader:
        recipe.model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with RunReader.open(folder / "run") as run:
    records = run.records()
    check = next(e.json() for e in run.events(EventKind.NOTICE) if e.json()["notice"] == "self-check")
print(f"{len(records)} records from {len(loader)} rows; first row: documents {records['row'][:8].tolist()}")
print(f"self-check: {check['samples']} documents against autograd one at a time, error below 1e-5: ", end="")
print(check["oracle_error"] < 1e-5)
print(f"gradtrail show {folder / 'run'} --step 1")
