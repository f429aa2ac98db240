"""Change one value in a run's database, as anybody with the file could, and verify.

python examples/04_catch_tampering.py
"""

import runpy
import sys
import tempfile
from pathlib import Path

import duckdb

from auditlog import Trust, verify_run

here, folder = Path(__file__).parent, Path(tempfile.mkdtemp(prefix="gradtrail-"))
sys.argv = ["01_plain_loop.py", str(folder)]
runpy.run_path(str(here / "01_plain_loop.py"))  # trains and seals FOLDER/run

# Without anything from outside the folder nobody is bound, and verify says so.
print(f"\nwith neither a pinned key nor a kept head: {verify_run(folder / 'run', Trust()).status}")

with duckdb.connect(str(folder / "run" / "ledger.duckdb")) as connection:
    connection.execute("UPDATE records SET source_id = 1 - source_id WHERE seq = 5")
print("record 5 is now said to come from the other source file")

trust = Trust.load([folder / "auditor" / "bank.vkey"], [folder / "auditor" / "run"])
verdict = verify_run(folder / "run", trust)
print(f"\n{verdict.status}, exit {verdict.exit_code}")
for finding in verdict.findings:
    print(f"  {finding.code}: {finding.message}")
