"""What the recorder wants to have said: the bodies of NOTICE events whose meaning is known here, and their words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from auditlog.errors import FormatError
from auditlog.format.records import Event


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the start-up self-check found.

    Attributes:
        samples: How many samples were compared with autograd; 0 if the check was switched off.
        modules_seen: Tracked modules that gradients reached.
        modules: All tracked modules.
        oracle_error: Largest relative error of a sample against autograd on it alone; ``None`` if only the sum was
            compared.
        sum_error: Relative error of the samples' sum against the batch's gradient.
        confirmed: Both lie within what rounding explains.
    """

    samples: int = 0
    modules_seen: int = 0
    modules: int = 0
    oracle_error: float | None = None
    sum_error: float = 0.0
    confirmed: bool = False

    @property
    def error(self) -> float:
        """The larger of the two errors."""
        return max(self.oracle_error or 0.0, self.sum_error)

    def sentence(self, number: Callable[[float], str] = "{:.1e}".format) -> str:
        """Say in words what was found.

        Args:
            number: How to write the error.
        """
        if not self.samples:
            return "switched off, so nothing confirms the sketches"
        how = "as a sum" if self.oracle_error is None else "one at a time"
        samples = f"{self.samples} sample{'' if self.samples == 1 else 's'} compared with autograd {how}"
        seen = f"{self.modules_seen} of {self.modules} modules seen"
        said = f"{samples}, largest relative error {number(self.error)}, {seen}"
        return said if self.confirmed else f"{said}; not confirmed: that is more than rounding explains"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Which samples of the data manifest a trainer's dataset lacked when training began.

    Attributes:
        absent: How many.
        named: The first of them, ascending; all of them unless there are many.
    """

    absent: int
    named: tuple[int, ...]


def parse_notice(event: Event) -> SelfCheck | Dataset | None:
    """Return what a NOTICE event says; ``None`` for every other kind of notice.

    Raises:
        FormatError: If it is one of these kinds and lacks a member.
    """
    body = event.json()
    try:
        match body.get("notice"):
            case "self-check" if body.get("skipped") is True:
                return SelfCheck()
            case "self-check":
                return _self_check(body)
            case "dataset":
                return _dataset(body)
            case _:
                return None
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"entry {event.seq}: a notice of kind {body['notice']!r} without a proper {error}") from error


def _self_check(body: dict[str, Any]) -> SelfCheck:
    seen, modules = body["modules"]
    oracle_error = body["oracle_error"]
    return SelfCheck(
        samples=int(body["samples"]),
        modules_seen=int(seen),
        modules=int(modules),
        oracle_error=None if oracle_error is None else float(oracle_error),
        sum_error=float(body["sum_error"]),
        confirmed=body["confirmed"] is True,
    )


def _dataset(body: dict[str, Any]) -> Dataset:
    absent, named = body["absent"], tuple(body["absent_first"])
    if type(absent) is not int or absent < len(named):
        raise ValueError("absent")
    if any(type(index) is not int or index < 0 for index in named) or list(named) != sorted(set(named)):
        raise ValueError("absent_first")
    return Dataset(absent, named)
