"""Audit mode around a Hugging Face Trainer: one `with` more.

python examples/02_trainer.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from small_model import build, write_data
from transformers import Trainer, TrainingArguments

from attribution import AuditMode
from auditlog import DataManifest, Signer

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="gradtrail-"))
write_data(folder / "data")
manifest = DataManifest.build(folder / "data" / "*.jsonl")
recipe = build(manifest)

trainer = Trainer(
    model=recipe.model,
    args=TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=3e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=recipe.dataset,
    data_collator=recipe.collator,
)

with AuditMode.attach(
    trainer,
    manifest,
    run=folder / "run",
    signer=Signer.generate("bank.example/audit"),
    on_head=folder / "auditor",
) as audit:
    trainer.train()

print(f"{audit.recorder.records} records in {audit.recorder.steps} steps")
print(f"worst conservation residual {audit.recorder.worst_residual:.1e}")
print(f"run folder: {folder / 'run'}")
