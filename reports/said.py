"""What the recorder said while it recorded, in the logs of all processes: self-checks, losses, and everything else."""

from __future__ import annotations

from dataclasses import dataclass

from auditlog.format.notices import Dataset, SelfCheck, parse_notice
from auditlog.format.records import Event, EventKind
from auditlog.ledger.reader import RunReader
from reports.evidence import EvidenceRef, NoticeFacts, SelfCheckFacts, flatten


@dataclass(frozen=True)
class Said:
    """NOTICE and LOSS_ACCEPTED events, each with its place. What the dataset lacked is among the sample lists."""

    self_checks: tuple[SelfCheckFacts, ...]
    losses: tuple[NoticeFacts, ...]
    notices: tuple[NoticeFacts, ...]

    @classmethod
    def read(cls, reader: RunReader) -> Said:
        """Read the events of a run, rank by rank.

        Raises:
            FormatError: If a notice of a known kind is malformed.
        """
        self_checks: list[SelfCheckFacts] = []
        losses: list[NoticeFacts] = []
        notices: list[NoticeFacts] = []
        for rank in reader.ranks:
            for event in rank.events():
                place = EvidenceRef(log="run log", seq=event.seq, rank=rank.manifest.rank)
                if event.kind == EventKind.LOSS_ACCEPTED:
                    losses.append(NoticeFacts(ref=place, text=_text(event)))
                elif event.kind == EventKind.NOTICE:
                    match parse_notice(event):
                        case SelfCheck() as found:
                            self_checks.append(SelfCheckFacts(ref=place, found=found))
                        case Dataset():
                            pass
                        case None:
                            notices.append(NoticeFacts(ref=place, text=_text(event)))
        return cls(tuple(self_checks), tuple(losses), tuple(notices))


def _text(event: Event) -> str:
    return "; ".join(f"{name}: {value}" for name, value in flatten(event.json()))
