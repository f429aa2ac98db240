"""Train with the Trainer and audit mode, and die by SIGKILL after step 8: two steps after the last checkpoint."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from test_resume import Training
from transformers import TrainerCallback

from auditlog import DataManifest, Signer


class Killing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8:
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
folder = Path(sys.argv[1])
signer = Signer.load(folder / "key.p12", passphrase="correct horse")
training = Training(folder, DataManifest.build(folder / "data" / "*.jsonl"), signer)
trainer = training.trainer()
trainer.add_callback(Killing())
with training.attach(trainer):
    trainer.train()
