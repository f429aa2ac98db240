"""Keep other libraries' bars and notices out of the demo's own output, for as long as it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
import transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off progress bars and warnings of transformers and datasets; restore them afterwards.

    Our own warnings still show.
    """
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    had_bars = not datasets.are_progress_bars_disabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(transformers|peft|torch|datasets|accelerate)\b")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
        if had_bars:
            datasets.enable_progress_bars()
