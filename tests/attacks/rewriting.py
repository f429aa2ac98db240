"""What an attacker computes again after a change: numbers, hashes and chain without a key, signatures with the keys."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import duckdb

from auditlog.format.chain import LogState
from auditlog.format.merkle import Frontier
from auditlog.format.notes import LogCheckpoint, sign_note
from auditlog.format.records import EventKind, record_leaves
from auditlog.ledger.custody import CustodyLog
from auditlog.trust.keys import Signer
from tests import support

DATABASE = "ledger.duckdb"


class Rewriter(support.LedgerSimulator):
    """A simulated run whose stored values can be made to fit again."""

    def act(self) -> None:
        """Log a query and a report in the custody log."""
        custody = CustodyLog.open(self.run, self.signer)
        scores = [{"sample": 3, "score": 0.75}, {"sample": 4, "score": -0.25}]
        result = custody.write_result("query-1", {"scores": scores, "estimator": "dot"})
        custody.append(EventKind.QUERY, {"query": "why", "result": result})
        custody.append(EventKind.REPORT, {"kind": "art26", "sha256": "ab" * 32})

    def rewrite_unsigned(self) -> None:
        """Recompute every value that needs no key: ``seq`` without gaps, leaf hashes, chain values, batches."""
        with self._database() as con:
            _renumber(con)
            rows, events = support._load(con)
            leaves = dict(zip(rows["seq"].tolist(), record_leaves(rows), strict=True))
            leaves |= {event.seq: event.leaf() for event in events}
            _store_leaves(con, "records", [int(seq) for seq in rows["seq"]], leaves)
            _store_leaves(con, "events", [event.seq for event in events], leaves)
            state = LogState((self.run / "manifest.json").read_bytes())
            batches = con.execute("SELECT batch, first_seq, entries FROM batches ORDER BY batch").fetchall()
            for number, first, entries in batches:
                end = len(leaves) if number == len(batches) - 1 else min(first + entries, len(leaves))
                state.extend(leaves[seq] for seq in range(state.size, end))
                change = [state.chain, end - first, number]
                con.execute("UPDATE batches SET chain = ?, entries = ? WHERE batch = ?", change)

    def sign_anew(self, session: Signer) -> None:
        """Sign every checkpoint again over the entries as they stand; the long-lived key joins in the last."""
        with self._database() as con:
            rows, events = support._load(con)
            leaves = dict(zip(rows["seq"].tolist(), record_leaves(rows), strict=True))
            leaves |= {event.seq: event.leaf() for event in events}
            sizes = [size for (size,) in con.execute("SELECT size FROM checkpoints ORDER BY size").fetchall()]
        tree = Frontier()
        for size in sizes:
            tree.extend(leaves[seq] for seq in range(tree.size, size))
            signers = [session, self.signer] if size == sizes[-1] else [session]
            text = LogCheckpoint(self.plan.origin, size, tree.root()).text()
            self.put_note(size, sign_note(text, *signers).to_bytes())
        if (self.run / "custody").exists():  # it would start from another final note
            shutil.rmtree(self.run / "custody")
            self.act()

    def put_note(self, size: int, note: bytes) -> None:
        """Put a log checkpoint in the place of the one of that size, in the table and in ``heads/``."""
        with self._database() as con:
            con.execute("UPDATE checkpoints SET note = ? WHERE size = ?", [note, size])
        (self.run / "heads" / f"{size:08d}.note").write_bytes(note)

    def _database(self) -> duckdb.DuckDBPyConnection:
        return duckdb.connect(str(self.run / DATABASE))


def _renumber(con: duckdb.DuckDBPyConnection) -> None:
    """Give records and events, in the order in which they stand, numbers without gaps."""
    con.execute(
        "CREATE TEMP TABLE places AS SELECT kind, id, row_number() OVER (ORDER BY seq, kind) - 1 AS place FROM ("
        "SELECT 0 AS kind, rowid AS id, seq FROM records UNION ALL SELECT 1, rowid, seq FROM events)"
    )
    for kind, table in enumerate(("records", "events")):
        con.execute(
            f"UPDATE {table} SET seq = place FROM places "
            f"WHERE places.kind = {kind} AND places.id = {table}.rowid AND {table}.seq <> place"
        )


def _store_leaves(con: duckdb.DuckDBPyConnection, table: str, seqs: Sequence[int], leaves: dict[int, bytes]) -> None:
    values = ", ".join(f"({seq}, '{leaves[seq].hex()}')" for seq in seqs)
    con.execute(
        f"UPDATE {table} SET leaf = unhex(new.leaf) FROM (VALUES {values}) AS new (seq, leaf) "
        f"WHERE new.seq = {table}.seq AND {table}.leaf <> unhex(new.leaf)"
    )
