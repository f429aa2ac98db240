"""A finished run to attack, and one method for each way of spoiling it. No model is trained.

The run is written through our own ledger: 1,024 records of 50 samples in two data versions, 8 to a step, 64 to a
batch, a sketch to each record, and a custody log with a query and a report. Every batch is signed, because our writer
signs each batch it stores; so heads lie at sizes 1, 73, 145, …, 1,153, 1,154 and 1,155. The head of 865 entries (768
records) is the one that an auditor has kept, with the session certificate that was handed over beside it.

What the attacker may use: everything in the folder. Methods that need a private key say so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from auditlog.format.notes import Note
from auditlog.format.records import record_leaves
from auditlog.ledger.columns import TABLES
from auditlog.trust.anchors import Revocation, Trust
from auditlog.trust.keys import Signer
from tests import support
from tests.attacks.rewriting import DATABASE, Rewriter
from tests.support import ORIGIN, Plan, simulated_steps

FULL = Plan(steps=128, per_step=8, steps_per_head=8, rows_per_file=(30, 20))
KEPT = 865
ENTRIES = 1_155


@dataclass(frozen=True)
class Others:
    """Other runs, written once, that an attacker puts in this one's place."""

    own_key: Path  # all of it by somebody else's key of the same name
    rerun: Path  # the same key and origin, other data
    short: Path  # the same key and origin, 512 records, sealed
    elsewhere: Path  # the same key, another origin


class LedgerSimulator(Rewriter):
    """The run above, and ways to spoil it.

    Args:
        folder: Where everything goes.
        plan: Size and identity of the run.
        signer: The long-lived key; a fresh one unless given.
        session: The key of the run's one session, where an attacker has got hold of it.
        others: Other runs to put in its place.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan = FULL,
        *,
        signer: Signer | None = None,
        session: Signer | None = None,
        others: Others | None = None,
    ) -> None:
        super().__init__(folder, plan, signer=signer)
        self.session = session
        self.others = others

    def write(self, *, seal: bool = True, custody: bool = True) -> LedgerSimulator:
        """Write the whole run and its custody log."""
        ledger, data = self.start()
        self.session = ledger._session  # what memory would have to be read for
        for entry in simulated_steps(data, self.plan):
            ledger.append_step(entry)
            if entry.body["step"] % self.plan.steps_per_head == 0:
                ledger.flush()
        self._snapshot(ledger)
        if not seal:
            ledger.close_unsealed()
            return self
        ledger.seal({})
        if custody:
            self.act()
        return self

    def with_others(self, folder: Path) -> LedgerSimulator:
        """Write the runs that attackers put in this one's place."""
        plans = {
            "own_key": (self.plan, Signer.generate(self.signer.name)),
            "rerun": (replace(self.plan, seed=9, run_id="run-2"), self.signer),
            "short": (replace(self.plan, steps=64, seed=3), self.signer),
            "elsewhere": (replace(self.plan, steps=32, origin="bank.example/other", run_id="other"), self.signer),
        }
        for name, (plan, signer) in plans.items():
            LedgerSimulator(folder / name, plan, signer=signer).write(custody=False)
        self.others = Others(*(folder / name / "run" for name in plans))
        return self

    def copy_to(self, folder: Path) -> LedgerSimulator:
        """Return a copy to be spoiled."""
        folder.mkdir(parents=True)
        shutil.copytree(self.run, folder / "run")
        for name in ("data", "auditor"):
            (folder / name).symlink_to(self.folder / name)
        return LedgerSimulator(folder, self.plan, signer=self.signer, session=self.session, others=self.others)

    # --- trust ------------------------------------------------------------------------------------------------

    def trust(self, level: str) -> Trust:
        """Return what a verifier brings: ``none``, ``key`` (with origin) or ``head`` (what on_head gave, as well)."""
        if level == "none":
            return Trust()
        trust = Trust((self.signer.vkey,), origin=ORIGIN)
        if level == "key":
            return trust
        return replace(trust, heads=(self.kept_head(),), certificates=self.certificates())

    def kept_head(self, size: int = KEPT) -> Note:
        """Return a head as the auditor received it."""
        return Note.parse((self.auditor / "run" / f"{size:08d}.note").read_bytes())

    def revoked_from(self, size: int) -> Revocation:
        """Return the revocation of the long-lived key from a size on."""
        return Revocation(self.signer.vkey.fingerprint, size)

    # --- content ----------------------------------------------------------------------------------------------

    def edit_integer(self) -> None:
        self.sql("UPDATE records SET step = step + 1 WHERE seq = 500")

    def swap_source(self) -> None:
        self.sql("UPDATE records SET source_id = 1 - source_id WHERE seq = 501")

    def edit_with_leaf(self) -> None:
        """Edit a record and the hash stored beside it, but neither chain nor batch."""
        self.edit_integer()
        with self._database() as con:
            rows, _ = support._load(con)
            at = int((rows["seq"] == 500).argmax())
            con.execute("UPDATE records SET leaf = ? WHERE seq = 500", [record_leaves(rows[at : at + 1])[0]])

    def edit_and_rechain(self) -> None:
        """Edit and recompute all that needs no key."""
        self.edit_integer()
        self.rewrite_unsigned()

    def flip_sketch(self) -> None:
        ((row,),) = self.query("SELECT shard_row FROM records WHERE seq = 20")
        path = self.run / "sketches" / "000000.npy"
        content = bytearray(path.read_bytes())
        content[128 + row * self.plan.dim * 2 + 3] ^= 1
        path.write_bytes(content)

    def swap_two_sketches(self) -> None:
        self.swap_sketches(10, 20)

    def empty_a_cell(self) -> None:
        self.sql("UPDATE records SET sketch_commit = NULL WHERE seq = 5")

    def widen_a_column(self) -> None:
        self.sql("ALTER TABLE records ALTER step TYPE DOUBLE")

    def change_cell(self, table: str, column: str, row: int = 3) -> None:
        """Change one cell by its type: a number by one, the last bit of a blob."""
        with self._database() as con:
            query = f"SELECT rowid, {column} FROM {table} ORDER BY rowid LIMIT 1 OFFSET {row}"
            ((place, value),) = con.execute(query).fetchall()
            changed = value[:-1] + bytes([value[-1] ^ 1]) if isinstance(value, bytes) else value + 1
            con.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [changed, place])

    # --- order and count --------------------------------------------------------------------------------------

    def delete_row(self) -> None:
        self.sql("DELETE FROM records WHERE seq = 300")

    def delete_row_and_close_the_gap(self) -> None:
        self.delete_row()
        self.rewrite_unsigned()

    def delete_batch(self) -> None:
        ((first, entries),) = self.query("SELECT first_seq, entries FROM batches WHERE batch = 7")
        inside = f"seq >= {first} AND seq < {first + entries}"
        self.sql(
            f"DELETE FROM records WHERE {inside}",
            f"DELETE FROM events WHERE {inside}",
            "DELETE FROM batches WHERE batch = 7",
        )

    def reorder(self) -> None:
        self.sql("UPDATE records SET seq = 81 - seq WHERE seq IN (40, 41)")

    def duplicate(self) -> None:
        self.sql("INSERT INTO records SELECT * FROM records WHERE seq = 49")

    def append_forged(self) -> None:
        self.sql(f"INSERT INTO records SELECT * REPLACE ({ENTRIES} AS seq) FROM records WHERE seq = 49")
        self.rewrite_unsigned()

    def insert_in_the_middle(self) -> None:
        self.sql(
            "UPDATE records SET seq = seq + 1 WHERE seq >= 500",
            "UPDATE events SET seq = seq + 1 WHERE seq >= 500",
            "INSERT INTO records SELECT * REPLACE (500 AS seq) FROM records WHERE seq = 499",
        )
        self.rewrite_unsigned()

    def two_writers(self) -> None:
        """Two batches that both begin at one number, as a lost update would leave it."""
        self.sql("INSERT INTO records SELECT * REPLACE (512 AS seq) FROM records WHERE seq = 440")

    # --- completeness -----------------------------------------------------------------------------------------

    def cut_tail(self) -> None:
        self.truncate(1_000, checkpoints=False, head_files=False)

    def cut_to_a_checkpoint(self) -> None:
        self.truncate(577, checkpoints=True, head_files=True)

    def restore_backup(self) -> None:
        """Put back the database as it was after 289 entries, with the heads of then."""
        self.truncate(289, checkpoints=True, head_files=True)
        shutil.rmtree(self.run / "custody")

    def empty(self) -> None:
        self.sql(*(f"DELETE FROM {table}" for table in TABLES))
        shutil.rmtree(self.run / "heads")

    def drop_the_seals_checkpoint(self) -> None:
        self.sql(f"DELETE FROM checkpoints WHERE size = {ENTRIES}")
        self.head_files()[-1].unlink()

    def drop_all_checkpoints(self) -> None:
        self.sql("DELETE FROM checkpoints")
        shutil.rmtree(self.run / "heads")

    # --- keys -------------------------------------------------------------------------------------------------

    def flip_signature(self) -> None:
        note = self._note(145).decode()
        at = note.rindex("=") - 20
        spoiled = note[:at] + ("A" if note[at] != "A" else "B") + note[at + 1 :]
        self.put_note(145, spoiled.encode())

    def replace_manifest_key(self) -> None:
        self.edit_manifest({"vkey": str(Signer.generate(self.signer.name).vkey)})

    def replace_by_own_key(self) -> None:
        self._replace(self._others.own_key)

    def edit_and_sign_anew(self) -> None:
        """Change a record and sign everything again with both of the run's keys."""
        self.sql("UPDATE records SET loss = 0.5 WHERE seq = 500")
        self.rewrite_unsigned()
        self.sign_anew(self._session)

    def rewrite_under_a_new_session(self) -> None:
        """With the long-lived key alone, whose holder can certify a session key of his own."""
        self._replace(self._others.rerun)

    def cut_and_seal_again(self) -> None:
        self._replace(self._others.short)

    def downgrade_algorithm(self) -> None:
        """Name a key of another algorithm (0x02 instead of Ed25519's 0x01)."""
        name, material = self.signer.name, b"\x02" + b"k" * 32
        key_hash = hashlib.sha256(name.encode() + b"\n" + material).digest()[:4].hex()
        self.edit_manifest({"vkey": f"{name}+{key_hash}+{base64.b64encode(material).decode()}"})

    # --- binding ----------------------------------------------------------------------------------------------

    def replace_by_another_run(self) -> None:
        self._replace(self._others.elsewhere)

    def graft_checkpoints(self) -> None:
        other = self._others.elsewhere
        self.sql("DELETE FROM checkpoints")
        with self._database() as con:
            con.execute(f"ATTACH '{other / DATABASE}' AS other (READ_ONLY)")
            con.execute("INSERT INTO checkpoints SELECT * FROM other.checkpoints")
        shutil.rmtree(self.run / "heads")
        shutil.copytree(other / "heads", self.run / "heads")

    def replay_checkpoint(self) -> None:
        self.sql(
            "UPDATE checkpoints SET note = (SELECT note FROM checkpoints WHERE size = 73) WHERE size = 289",
            "UPDATE checkpoints SET size = 73 WHERE size = 289",
        )
        (self.run / "heads" / "00000289.note").unlink()

    def edit_the_manifest(self, block: str, change: dict[str, Any]) -> None:
        """Change members of one block of the manifest."""
        document = json.loads((self.run / "manifest.json").read_bytes())
        self.edit_manifest({block: document[block] | change})

    def relabel_data_version(self) -> None:
        document = json.loads((self.run / "manifest.json").read_bytes())["data"]
        first, second = document["versions"]
        self.edit_the_manifest("data", {"versions": [first | {"revision": "another"}, second]})

    def replace_weights(self) -> None:
        self.flip(support.SNAPSHOT, 0.5)

    def relabel_one_record(self) -> None:
        self.sql("UPDATE records SET data_version_id = 1 - data_version_id WHERE seq = 502")

    # --- payloads and results ---------------------------------------------------------------------------------

    def delete_salt(self) -> None:
        self.erase_salt(3)

    def exchange_salts(self) -> None:
        self.swap_salts(3, 4)

    def remove_shard(self) -> None:
        (self.run / "sketches" / "000000.npy").unlink()

    def swap_scores(self) -> None:
        path = self.run / "custody" / "results" / "query-1.json"
        document = json.loads(path.read_bytes())
        first, second = document["scores"]
        document["scores"] = [first | {"score": second["score"]}, second | {"score": first["score"]}]
        path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))

    # --- storage engine ---------------------------------------------------------------------------------------

    def replace_table_by_view(self) -> None:
        self.sql(
            "ALTER TABLE records RENAME TO hidden",
            "CREATE VIEW records AS SELECT * FROM hidden WHERE seq <> 5",
        )

    def shadow_functions(self) -> None:
        self.sql(
            "CREATE MACRO sha256(x) AS 'always the same'",
            "CREATE MACRO duckdb_functions() AS TABLE SELECT 'none' AS function_name, true AS internal",
        )

    def add_table(self) -> None:
        self.sql("CREATE TABLE smuggled (a INTEGER)")

    def add_column(self) -> None:
        self.sql("ALTER TABLE records ADD COLUMN note VARCHAR")

    def add_index(self) -> None:
        self.sql("CREATE INDEX smuggled ON batches (batch)")

    def damage_header(self) -> None:
        content = bytearray((self.run / DATABASE).read_bytes())
        content[5_000] ^= 0xFF
        (self.run / DATABASE).write_bytes(content)

    def remove_database(self) -> None:
        (self.run / DATABASE).unlink()

    def truncate_database(self) -> None:
        os.truncate(self.run / DATABASE, 70_000)

    def remove_manifest(self) -> None:
        (self.run / "manifest.json").unlink()

    def scramble_manifest(self) -> None:
        (self.run / "manifest.json").write_bytes(b"\xff\xfe not JSON")

    def remove_custody_database(self) -> None:
        (self.run / "custody" / DATABASE).unlink()

    # --- tools ------------------------------------------------------------------------------------------------

    @property
    def _others(self) -> Others:
        assert self.others is not None, "with_others first"
        return self.others

    @property
    def _session(self) -> Signer:
        assert self.session is not None
        return self.session

    def _replace(self, other: Path) -> None:
        shutil.rmtree(self.run)
        shutil.copytree(other, self.run)

    def _note(self, size: int) -> bytes:
        return bytes(self.query(f"SELECT note FROM checkpoints WHERE size = {size}")[0][0])
