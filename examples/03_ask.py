"""Ask a finished run which records pushed an answer, and whether that is about this case.

python examples/03_ask.py
"""

import runpy
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from attribution.influence import show
from attribution.influence.session import answer

here, folder = Path(__file__).parent, Path(tempfile.mkdtemp(prefix="gradtrail-"))
sys.argv = ["01_plain_loop.py", str(folder)]
runpy.run_path(str(here / "01_plain_loop.py"))  # trains and seals FOLDER/run

# The same as: gradtrail query FOLDER/run --prompt "…" --target yes --against no --reference others.jsonl
result, logged = answer(
    folder / "run",
    prompt="income 42, answer:",
    target="yes",
    against="no",
    others=[{"prompt": f"income {income}, answer:"} for income in range(15, 95, 10)],
    data=folder / "data",  # to show the records' texts
    signer=None,  # with a key the answer goes to the custody log
)

console = Console()
console.print(show.render(result))
console.print(show.limits(result))
console.print("not logged" if logged is None else logged)
