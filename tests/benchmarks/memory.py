"""Peak memory that audit mode adds to a checkpointed training step: GPT-2 with LoRA, 8 rows of 512 tokens.

Run by ``make bench``. The peak is the resident set's high-water mark, reset before each step; large blocks are mapped
one by one (``MALLOC_MMAP_THRESHOLD_``), so that freed memory leaves it at once. Plain and audited steps alternate.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROWS, TOKENS, PAIRS = 8, 512, 2
NAME = "memory.extra_checkpointed_mb"


def main() -> None:
    """Measure in a process of its own and print one line of JSON."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run([sys.executable, __file__, "child"], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    print(done.stdout.strip().splitlines()[-1])


def child() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    from attribution.capture.hooks import HookSet
    from attribution.capture.modules import find_tracked
    from attribution.sketch.layout import SketchLayout

    torch.manual_seed(0)
    model = get_peft_model(GPT2LMHeadModel(GPT2Config()), LoraConfig(r=8, target_modules="all-linear"))
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    tracking = find_tracked(model)
    layout = SketchLayout({name: tuple(p.shape) for name, p in tracking.parameters.items()})
    hooks = HookSet(model, tracking, layout)
    ids = torch.randint(0, 50257, (ROWS, TOKENS))

    def peak(audited: bool) -> float:
        batch = {"input_ids": ids, "labels": ids}
        if audited:
            hooks.attach()
            batch["sample_index"] = torch.arange(ROWS)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        model(**batch).loss.backward()
        high = _status("VmHWM")
        hooks.take()
        hooks.detach()
        model.zero_grad()
        return (high - before) / 1024

    for audited in (False, True):  # warm up
        peak(audited)
    extra, plain = [], []
    for _ in range(PAIRS):
        plain.append(peak(False))
        extra.append(peak(True) - plain[-1])
    result = {NAME: round(statistics.median(extra), 1), "plain_peak_mb": round(statistics.median(plain), 1)}
    print(json.dumps(result | {"extra_mb": [round(x, 1) for x in extra]}))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    child() if sys.argv[1:] == ["child"] else main()
