"""What the measured figures are held to, and the tables that show them. Two CPU cores, float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

Sense = Literal["at most", "at least"]
Form = Literal["share", "ratio", "count"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure's bar.

    Attributes:
        name: The figure's name in ``results.json``.
        what: The figure in words.
        sense: On which side of the bar it must be.
        value: The bar.
        form: How both are written.
    """

    name: str
    what: str
    sense: Sense
    value: float
    form: Form = "ratio"

    def is_met(self, measured: float) -> bool:
        """Tell whether a measured value is on the right side."""
        return measured <= self.value if self.sense == "at most" else measured >= self.value

    def text(self) -> str:
        """Return the bar in words."""
        return f"{'≤' if self.sense == 'at most' else '≥'} {written(self.value, self.form)}"


BARS = (
    Bar("overhead.gpt2.fused.t128.net", "GPT-2 LoRA, T=128, fused, net", "at most", 0.010, "share"),
    Bar("overhead.gpt2.fused.t512.net", "GPT-2 LoRA, T=512, fused, net", "at most", 0.004, "share"),
    Bar("overhead.gpt2.observe.t128", "GPT-2 LoRA, T=128, observe", "at most", 0.025, "share"),
    Bar("overhead.smollm2.fused.net", "SmolLM2-135M LoRA, the demo's set-up, fused, net", "at most", 0.015, "share"),
    Bar("overhead.pythia160m.fused.t256.net", "Pythia-160M LoRA, T=256, fused, net", "at most", 0.008, "share"),
    Bar("overhead.gpt2_full.t256", "GPT-2 fully fine-tuned, T=256, factored", "at most", 0.020, "share"),
    Bar("ratio.dattri_llm", "our added time ÷ dattri-llm's", "at most", 0.15),
    Bar("ratio.logra_baseline", "our added time ÷ a two-sided Kronecker sketch's of equal bytes", "at most", 0.5),
    Bar("ratio.posthoc", "one post-hoc pass ÷ our added time, same samples", "at least", 100, "count"),
    Bar("fidelity.smollm2.pearson", "Pearson with exact gradient inner products, SmolLM2-135M LoRA", "at least", 0.975),
    Bar("fidelity.law.max_dev", "correlation law, largest deviation over operators", "at most", 0.03),
    Bar("memory.extra_mb", "peak extra memory, MB, GPT-2 LoRA, B=8, T=512", "at most", 64, "count"),
    Bar("memory.extra_checkpointed_mb", "the same with gradient checkpointing, MB", "at most", 16, "count"),
    Bar("scan.bandwidth_share", "top-10 of 1,000,000 × 8,192 int8, share of read bandwidth", "at least", 0.8),
    Bar("writer.samples_per_s", "writer, sealed and signed, samples/s", "at least", 5_000, "count"),
    Bar("ledger.append_per_s", "log without sketches, sealed and signed, records/s", "at least", 100_000, "count"),
    Bar("ledger.verify_per_s", "verify without sketches, records/s", "at least", 200_000, "count"),
    Bar("ledger.verify_full_per_s", "verify with salts and sketches, records/s", "at least", 50_000, "count"),
    Bar("ledger.bytes_per_record", "bytes per record, without sketches", "at most", 220, "count"),
    Bar("ledger.verify_10m_mb", "verify 10,000,000 records, peak memory, MB", "at most", 400, "count"),
    Bar("ledger.attacks_wrong", "attack matrix, both verifiers, wrong verdicts", "at most", 0, "count"),
    Bar("ledger.kill_lost", "kill -9, 200 rounds, with a lost acknowledged batch", "at most", 0, "count"),
)


@dataclass(frozen=True, slots=True)
class Held:
    """A figure beside its bar.

    Attributes:
        bar: The bar.
        measured: The figure, ``None`` where it was not measured.
        interval: Its interval, where it has one.
        why: Why there is no figure although it was measured.
    """

    bar: Bar
    measured: float | None
    interval: tuple[float, float] | None
    why: str = ""

    @property
    def verdict(self) -> str:
        """``met``, ``not met``, ``not measured``, or why there is no figure."""
        if self.measured is None:
            return self.why or "not measured"
        return "met" if self.bar.is_met(self.measured) else "not met"

    def cells(self) -> tuple[str, str, str, str]:
        """Return the figure, its interval, the bar and the verdict as text."""
        form = self.bar.form
        figure = "" if self.measured is None else written(self.measured, form)
        spread = (
            "" if self.interval is None else f"{written(self.interval[0], form)} to {written(self.interval[1], form)}"
        )
        return figure, spread, self.bar.text(), self.verdict


def held(results: Mapping[str, Any]) -> Iterator[Held]:
    """Yield every bar with what ``results.json`` says about it."""
    for bar in BARS:
        interval = results.get(f"{bar.name}.interval")
        spread = None if interval is None else (interval[0], interval[1])
        yield Held(bar, results.get(bar.name), spread, results.get(f"{bar.name}.why", ""))


def written(value: float, form: Form) -> str:
    """Return a value as its table shows it."""
    match form:
        case "share":
            return f"{value:.2%}"
        case "ratio":
            return f"{value:.3g}"
        case "count":
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def as_table(results: Mapping[str, Any]) -> Table:
    """Return all bars as a table for the terminal."""
    table = Table(title="measured against the bars", title_justify="left")
    for column, justify in (
        ("name", "left"),
        ("measured", "right"),
        ("95 % interval", "right"),
        ("bar", "right"),
        ("", "left"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for each in held(results):
        style = {"met": "", "not met": "bold red"}.get(each.verdict, "dim")
        table.add_row(each.bar.name, *each.cells(), style=style)
    return table


def as_markdown(results: Mapping[str, Any]) -> str:
    """Return what was measured of it as a table for the README."""
    lines = ["| figure | name | measured | 95 % interval | bar | |", "|---|---|---:|---:|---:|---|"]
    lines += [f"| {each.bar.what} | `{each.bar.name}` | {' | '.join(each.cells())} |" for each in held(results)]
    return "\n".join(lines)
