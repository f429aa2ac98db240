"""The ledger on its own thread, so that hashing, signing and disk do not hold up training.

The queue is bounded: when the disk cannot keep up, training waits (and ``blocked_s`` says for how long);
nothing is dropped. What happens when the log itself is in trouble is the caller's choice, ``on_error``.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal

from auditlog.errors import Error, StoreError
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger.ledger import BATCH_SECONDS, RunLedger, StepEntry

OnError = Literal["stop", "continue_and_mark"]
_LOST_STEPS_NAMED = 1_000


class LedgerTroubleWarning(UserWarning):
    """The log could not take something, and training goes on as ``continue_and_mark`` asks for."""


class LedgerWriter:
    """Owns a ``RunLedger`` on a thread. Use as a context manager: leaving it without a seal keeps the run unsealed.

    Args:
        ledger: Not to be touched by anybody else from now on.
        on_error: ``"stop"`` raises the error in the caller's next call. ``"continue_and_mark"`` warns once, lets
            training go on, and names the lost steps in the log as soon as it takes entries again.
        queue_steps: How many steps may wait before ``step`` blocks.

    Attributes:
        blocked_s: Seconds that callers have spent waiting for room in the queue.
        lost_steps: Steps that could not be recorded; empty under ``"stop"``.
    """

    def __init__(self, ledger: RunLedger, *, on_error: OnError = "stop", queue_steps: int = 64) -> None:
        self.blocked_s = 0.0
        self.lost_steps: list[int] = []
        self._ledger = ledger
        self._on_error = on_error
        self._queue: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(queue_steps)
        self._error: BaseException | None = None  # the first one; under "stop" nothing is written after it
        self._unmarked: list[dict[str, Any]] = []
        self._warned = False
        self._sealed = False
        self._thread = threading.Thread(target=self._work, name="gradtrail-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def step(self, entry: StepEntry) -> None:
        """Queue one optimizer step; blocks only while the queue is full.

        Raises:
            Error: Under ``"stop"``, whatever went wrong earlier on the thread.
        """
        self._submit(lambda: self._append_step(entry))

    def event(self, kind: EventKind, body: dict[str, Any]) -> None:
        """Queue one event."""
        self._submit(lambda: self._ledger.append_event(kind, body))

    def begin_attempt(
        self, from_step: int, body: dict[str, Any] | None = None, *, from_attempt: int | None = None
    ) -> int:
        """Open the next attempt behind everything queued so far (``RunLedger.begin_attempt``); returns its number.

        Raises:
            Error: If it could not be opened, whatever ``on_error`` says: later steps would belong to no attempt.
        """
        done = self._submit(lambda: self._ledger.begin_attempt(from_step, body, from_attempt=from_attempt))
        attempt: int = done.result()
        return attempt

    def flush(self, wait: bool = True) -> None:
        """Make everything queued so far durable and signed; with ``wait``, return only then."""
        done = self._submit(self._ledger.flush)
        if wait:
            self._result(done)

    def seal(self, body: dict[str, Any]) -> Note:
        """Seal the run behind everything queued so far, and end the thread.

        Raises:
            Error: If it cannot be sealed; the run then stays unsealed.
        """
        done = self._submit(lambda: self._seal(body))
        try:
            note: Note = done.result()
        finally:
            self.close()
        return note

    def close(self) -> None:
        """End the thread. What was queued is still written; an unsealed run stays unsealed. Never raises."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _submit(self, task: Callable[[], Any]) -> Future[Any]:
        self._raise_or_warn()
        if not self._thread.is_alive():
            raise StoreError("the ledger's writer is closed")
        done: Future[Any] = Future()
        started = time.perf_counter()
        self._queue.put((task, done))
        self.blocked_s += time.perf_counter() - started
        return done

    def _result(self, done: Future[Any]) -> Any:
        error = done.exception()
        if error is not None and self._on_error == "continue_and_mark" and isinstance(error, Error):
            self._raise_or_warn()
            return None
        return done.result()

    def _raise_or_warn(self) -> None:
        if self._error is None:
            return
        if self._on_error == "stop":
            raise self._error
        if not self._warned:
            self._warned = True
            warnings.warn(f"the audit log is in trouble: {self._error}", LedgerTroubleWarning, stacklevel=4)

    # --- on the thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=BATCH_SECONDS)
            except queue.Empty:
                self._run(self._flush_idle, Future())
                continue
            if item is None:
                break
            self._run(*item)
        if not self._sealed:
            self._leave()

    def _run(self, task: Callable[[], Any], done: Future[Any]) -> None:
        if self._error is not None and self._on_error == "stop":
            done.set_exception(self._error)
            return
        try:
            done.set_result(task())
        except BaseException as error:
            self._error = self._error or error
            self._unmarked.append({"notice": "log trouble", "message": str(error)})
            done.set_exception(error)
        else:
            self._mark()

    def _append_step(self, entry: StepEntry) -> None:
        before = self._ledger.steps
        try:
            self._ledger.append_step(entry)
        except BaseException:
            if self._ledger.steps == before:
                self.lost_steps.append(int(entry.body.get("step", 0)))
            raise

    def _flush_idle(self) -> None:
        if self._ledger.waiting:
            self._ledger.flush()

    def _mark(self) -> None:
        """Say in the log what it has missed, now that it takes entries again."""
        if not self._unmarked or self._sealed:
            return
        notice = {
            "notice": "log trouble",
            "failures": len(self._unmarked),
            "first": self._unmarked[0]["message"],
            "lost_steps": self.lost_steps[:_LOST_STEPS_NAMED],
            "lost_steps_count": len(self.lost_steps),
        }
        self._unmarked.clear()
        try:
            self._ledger.append_event(EventKind.NOTICE, notice)
        except Error:  # the notice waits in the ledger with everything else
            return

    def _seal(self, body: dict[str, Any]) -> Note:
        if self._unmarked:
            self._ledger.flush()
            self._mark()
        note = self._ledger.seal(body)
        self._sealed = True
        return note

    def _leave(self) -> None:
        """Store what can be stored and close; the reason is with the caller already, or there is none."""
        for last_act in (self._ledger.flush, self._ledger.close_unsealed):
            try:
                last_act()
            except Error as error:
                self._error = self._error or error
