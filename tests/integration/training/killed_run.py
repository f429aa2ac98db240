"""Train with audit mode on, print how many entries were acknowledged, and die by SIGKILL in mid-training."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tiny import make_batch, tiny_lora, write_rows

from attribution import AuditMode
from auditlog import DataManifest, Signer

folder = Path(sys.argv[1])
write_rows(folder / "data")
data = DataManifest.build(folder / "data" / "*.jsonl")
signer = Signer.generate("bank.example/audit")
signer.save(folder / "key.p12", "correct horse")
model = tiny_lora().train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
heads: list[int] = []


def acknowledge(name: str, note: bytes) -> None:
    (folder / "auditor").mkdir(exist_ok=True)
    (folder / "auditor" / name).write_bytes(note)
    heads.append(int(name.removesuffix(".note")))


with AuditMode(model, optimizer, data, run=folder / "run", signer=signer, on_head=acknowledge) as audit:
    for step in range(40):
        model(**make_batch(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            audit.writer.flush()
    print(max(heads), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
