"""One of several processes under ``torchrun``: ``python -m setups.rank GROUP NAME MODE FOLDER DATA``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
from setups import ranks
from setups.measure import compare
from setups.registry import SETUPS

from auditlog import DataManifest, Signer


def main(group: str, name: str, mode: str, folder: Path, data: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    (setup,) = [setup for setup in SETUPS if (setup.group, setup.name) == (group, name)]
    signer = Signer.load(folder / ranks.KEY, passphrase=ranks.PASSPHRASE)
    found = compare(setup, mode, folder, DataManifest.build(data / "*.jsonl"), signer)
    ranks.result(folder, torch.distributed.get_rank()).write_text(json.dumps(dataclasses.asdict(found)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(Path, sys.argv[4:]))
