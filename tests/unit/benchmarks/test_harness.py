"""The benchmarks' own arithmetic: medians, what is replaced, bars, and one failing group among others."""

from __future__ import annotations

import json
import math
import mmap
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import bars, fidelity, ledger, medians, memory, overhead, profiling, run, workloads
from benchmarks.audited import Audited, Seconds
from benchmarks.replaced import Stopwatch, timed
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from tiny import make_batch, tiny_gpt2, tiny_lora
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_fixtures import one_thread
from transformers.pytorch_utils import Conv1D

from auditlog.ledger.reader import RunReader
from auditlog.trust.keys import Signer
from tests.support import write_sources

__all__ = ["one_thread"]


class TestMedians:
    @given(st.integers(6, 60))
    def test_an_interval_misses_the_median_as_rarely_as_it_says_and_no_wider_one_is_taken(self, n: int) -> None:
        found = medians.of([float(i) for i in range(n)])
        below = int(found.low)  # values that must all lie on one side of the median for it to be missed on that side
        assert 2 * binom.cdf(below, n, 0.5) <= 0.05
        assert 2 * binom.cdf(below + 1, n, 0.5) > 0.05
        assert found.low + found.high == n - 1

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_few_values_give_their_whole_range(self, n: int) -> None:
        values = [float(i) for i in range(n)]
        random.Random(0).shuffle(values)
        assert medians.of(values) == medians.Median(float(np.median(values)), 0.0, n - 1.0)

    def test_a_figure_carries_its_interval(self) -> None:
        assert medians.Median(2.0, 1.0, 3.0).figures("a.b") == {"a.b": 2.0, "a.b.interval": [1.0, 3.0]}


class Products(TorchDispatchMode):
    """Counts matrix products by the shapes and strides of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in {"aten::mm", "aten::addmm"}:
            factors = args[-2:]
            self.of[tuple((tuple(t.shape), t.stride()) for t in factors)] += 1
        return func(*args, **(kwargs or {}))


class TestReplaced:
    """The stopwatch's steps are plain steps, bit for bit, and only the products are on its clock."""

    @pytest.mark.parametrize("make", [tiny_lora, tiny_gpt2])
    def test_gradients_are_torchs_own(self, make: Callable[[], nn.Module]) -> None:
        model, batch = make().train(), workloads.without_ids(make_batch())
        linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m.weight.requires_grad]

        def gradients() -> list[torch.Tensor]:
            model.zero_grad()
            model(**batch).loss.backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        want = gradients()
        watch = Stopwatch(lambda: 0.0)
        with timed(linear, watch):
            found = gradients()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert not any("forward" in vars(module) for module in linear)

    @pytest.mark.parametrize("make", [tiny_lora, tiny_gpt2])
    def test_its_products_have_the_shapes_and_layouts_of_torchs_own(self, make: Callable[[], nn.Module]) -> None:
        model, batch = make().train(), workloads.without_ids(make_batch())
        linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m.weight.requires_grad]

        def products() -> Counter[Any]:
            with Products() as seen:
                model(**batch).loss.backward()
            return seen.of

        want = products()
        with timed(linear, Stopwatch(lambda: 0.0)):
            assert products() == want
        assert want.total() > 3 * len(linear)

    @pytest.mark.parametrize("module", [nn.Linear(6, 3), nn.Linear(6, 3, bias=False), Conv1D(3, 6)])
    def test_the_clock_is_read_once_before_and_once_after_each_product(self, module: nn.Module) -> None:
        ticks = iter([10.0, 10.5, 20.0, 20.25])
        watch = Stopwatch(lambda: next(ticks))
        with timed([module], watch):
            for _ in range(2):
                module(torch.randn(2, 5, 6, requires_grad=True)).sum().backward()
        assert watch.seconds == 0.75

    def test_the_product_for_the_input_is_not_on_the_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = list[str]()
        plain_mm = torch.Tensor.mm
        monkeypatch.setattr(torch.Tensor, "mm", lambda a, b: seen.append(f"mm{tuple(b.shape)}") or plain_mm(a, b))
        watch = Stopwatch(lambda: float(seen.append("clock") or 0))
        with timed([module := nn.Linear(6, 3, bias=False)], watch):
            module(torch.randn(4, 6, requires_grad=True)).sum().backward()
        assert seen == ["mm(3, 6)", "clock", "mm(4, 6)", "clock"]

    def test_it_covers_just_those_modules_that_fused_mode_takes_over(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        adapters = {m for name, m in workload.model.named_modules() if name.endswith("default")}
        linear = {m for m in adapters if isinstance(m, nn.Linear)}
        with Audited.open(workload, tmp_path / "runs", ("fused",)) as audited:
            assert set(audited.fused) == linear
        with Audited.open(workload, tmp_path / "others", ("observe",)) as audited:
            assert audited.fused == []


class TestSteps:
    def test_hooks_are_there_in_audited_steps_only(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        batch = workload.batches[0]
        with Audited.open(workload, tmp_path / "runs", ("fused", "observe")) as audited:
            for mode, audit in audited.audits.items():
                assert audited.plain(batch).inside == 0
                assert audit.recorder.steps == 0
                taken = audited.audited(mode, batch)
                assert 0 < taken.inside < taken.wall
                assert 0 < taken.writer < taken.cpu
                assert audit.recorder.steps == 1
            assert audited.with_stopwatch(batch).inside > 0
            assert [audit.recorder.steps for audit in audited.audits.values()] == [1, 1]

    def test_passes_leave_no_gradient_and_no_record(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        batch = workload.batches[0]
        with Audited.open(workload, tmp_path / "runs", ("fused",)) as audited:
            assert audited.plain_passes(batch).inside == 0
            assert audited.passes_with_stopwatch(batch).inside > 0
            assert audited.audited_passes("fused", batch).inside > 0
            assert all(p.grad is None for p in workload.parameters)
            assert audited.audits["fused"].hooks.unconsumed() == audited.audits["fused"].recorder.steps == 0

    def test_weights_stay_as_they_are(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        before = [p.detach().clone() for p in workload.parameters]
        with Audited.open(workload, tmp_path / "runs", ("fused",)) as audited:
            audited.audited("fused", workload.batches[0])
            audited.plain(workload.batches[0])
        assert all(torch.equal(a, b) for a, b in zip(before, workload.parameters, strict=True))

    def test_time_in_our_code_can_be_told_by_another_clock(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        reads = iter(range(0, 10**9, 1000))
        with Audited.open(workload, tmp_path / "runs", ("observe",)) as audited:
            taken = audited.audited("observe", workload.batches[0], lambda: float(next(reads)))
            thousands, rest = divmod(taken.inside, 1000)  # the wait for the writer is in seconds
            assert thousands > 10
            assert rest < 60
            assert audited.audited("observe", workload.batches[0]).inside < 60  # seconds again


def made_up(plain: list[float], fused: list[float], inside: list[float], replaced: list[float]) -> overhead.Rounds:
    """Rounds as if measured, every second one by the CPU clock."""
    rounds = overhead.Rounds()
    rounds.steps["plain"] = [Seconds(wall, 2 * wall, wall / 2) for wall in plain]
    rounds.steps["fused"] = [
        Seconds(wall, 2 * wall, wall, part, 0.25) for wall, part in zip(fused, inside, strict=True)
    ]
    rounds.steps["stopwatch"] = [Seconds(1.0, 1.0, 1.0, part) for part in replaced]
    rounds.has_cpu_clock = [number % 2 == 1 for number in range(len(plain))]
    rounds.dispatch["fused"] = medians.Median(0.5, 0.4, 0.6)
    return rounds


class TestShares:
    SET_UP = overhead.SetUp("gpt2", "t8", workloads.smollm2, ("fused",))

    def test_net_is_gross_and_dispatch_less_what_is_replaced_round_by_round(self) -> None:
        rounds = made_up(
            plain=[10.0] * 6,
            fused=[11.0, 12.0] * 3,
            inside=[3.0, 9.0, 4.0, 9.0, 8.0, 9.0],
            replaced=[1.0, 7.0, 1.0, 7.0, 7.0, 7.0],
        )
        found = overhead.shares(self.SET_UP, "fused", rounds, "a model", on_gpu=False)
        name = "overhead.gpt2.fused.t8"
        assert found[f"{name}.net"] == pytest.approx(0.25)  # rounds 2.5, 3.5 and 1.5 of 10
        assert found[f"{name}.net.interval"] == pytest.approx([0.15, 0.35])
        assert found[f"{name}.net_cpu"] == pytest.approx(0.5)  # of half the seconds
        assert found[f"{name}.gross"] == pytest.approx(0.4)
        assert found[f"{name}.replaced"] == pytest.approx(0.1)
        assert found[f"{name}.dispatch"] == pytest.approx(0.05)
        assert found[f"{name}.added"] == pytest.approx(0.15)
        assert found[f"{name}.cpu_added"] == pytest.approx(0.15)
        assert found[f"{name}.writer_cpu"] == pytest.approx(0.025)
        assert found[f"tables.{name}"]["net_ms"] == pytest.approx(2500)

    def test_on_a_gpu_the_whole_steps_difference_is_the_figure(self) -> None:
        rounds = made_up(plain=[10.0] * 6, fused=[11.0] * 6, inside=[3.0] * 6, replaced=[1.0] * 6)
        found = overhead.shares(self.SET_UP, "fused", rounds, "a model", on_gpu=True)
        assert found["overhead.gpt2.fused.t8.net"] == pytest.approx(0.1)

    def test_figures_have_the_names_that_bars_are_set_for(self) -> None:
        names = set()
        for set_up in overhead.CPU:
            names |= {set_up.figure(mode) + (".net" if mode == "fused" else "") for mode in set_up.modes}
        assert {bar.name for bar in bars.BARS if bar.name.startswith("overhead.")} <= names
        gpu = [set_up.figure("fused") for set_up in overhead.cuda()]
        assert gpu == ["overhead.pythia1b.fused.t512", "overhead.pythia2_8b.fused.t512"]

    def test_each_kind_of_step_comes_first_in_its_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        order = list[str]()

        def noted(kind: str) -> Callable[..., Seconds]:
            return lambda batch, clock: order.append(kind) or Seconds(1.0, 1.0, 1.0)

        monkeypatch.setattr(overhead, "_kinds", lambda audited: {kind: noted(kind) for kind in "abc"})
        overhead.take(SimpleNamespace(workload=SimpleNamespace(batches=[{}])), 3)  # type: ignore[arg-type]
        assert "".join(order) == "abc" + "abc" + "bca" + "cab"


class TestDispatch:
    def test_it_is_what_a_step_on_two_tokens_takes_beyond_our_clocks_and_the_replaced_products(self) -> None:
        seen = list[dict[str, torch.Tensor]]()
        batch = {"input_ids": torch.arange(12).view(3, 4), "sample_index": torch.tensor([7, 8, 9])}
        stand_in = SimpleNamespace(
            workload=SimpleNamespace(batches=[batch]),
            plain_passes=lambda batch: seen.append(batch) or Seconds(9.0, 9.0, 1.0),
            audited_passes=lambda mode, batch: Seconds(9.0, 9.0, 2.0, 0.6),
            passes_with_stopwatch=lambda batch: Seconds(9.0, 9.0, 9.0, 0.1),
        )
        found = overhead.dispatch(stand_in, "fused", 6)  # type: ignore[arg-type]
        assert found.value == pytest.approx((2.0 - 0.6) - (1.0 - 0.1))
        assert overhead.dispatch(stand_in, "observe", 6).value == pytest.approx((2.0 - 0.6) - 1.0)  # type: ignore[arg-type]
        assert seen[0]["input_ids"].tolist() == [[2, 3]]
        assert seen[0]["sample_index"].tolist() == [7]


class TestMemory:
    MB = 2**20

    def test_the_larger_difference_counts(self) -> None:
        plain = memory.Peaks(step=100 * self.MB, blocks=40 * self.MB)
        assert memory.Peaks(step=101 * self.MB, blocks=45 * self.MB).beyond(plain) == 5.0
        assert memory.Peaks(step=107 * self.MB, blocks=45 * self.MB).beyond(plain) == 7.0

    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_memory_is_seen_in_the_part_of_the_step_that_holds_it(self, where: str, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        block = workload.model.get_base_model().gpt_neox.layers[1]  # type: ignore[operator]

        def hold(*seen: Any) -> None:  # not by malloc, which may have that much left over from another test
            with mmap.mmap(-1, 64 * self.MB) as held:
                held.write(b"1" * self.MB * 64)

        def step() -> None:
            workload.model(**workloads.without_ids(workload.batches[0])).loss.backward()

        step()
        plain = memory.peaks(workload, step)
        if where == "forward":
            block.register_forward_hook(hold)
        else:
            block.register_full_backward_hook(hold)
        held = memory.peaks(workload, step)
        assert held.step - plain.step > 55 * self.MB
        assert (held.blocks - plain.blocks > 55 * self.MB) == (where == "backward")


class TestLedger:
    def test_the_log_it_writes_is_one_that_verifies(self, tmp_path: Path) -> None:
        data, signer = write_sources(tmp_path / "data", (40, 40)), Signer.generate("bank.example/audit")
        assert ledger.written(tmp_path / "run", data, signer, 300) > 0
        ledger.verified_log(tmp_path / "run", signer)
        with RunReader.open(tmp_path / "run") as reader:
            assert len(reader.records()) == 300
        with pytest.raises(AssertionError):
            ledger.verified_log(tmp_path / "run", Signer.generate("bank.example/audit"))


class TestBars:
    @pytest.mark.parametrize(
        ("sense", "measured", "met"),
        [("at most", 1.0, True), ("at most", 1.01, False), ("at least", 1.0, True), ("at least", 0.99, False)],
    )
    def test_a_bar_is_met_on_its_own_side(self, sense: bars.Sense, measured: float, met: bool) -> None:
        assert bars.Bar("a", "a", sense, 1.0).is_met(measured) is met

    def test_what_is_not_measured_is_not_met(self) -> None:
        verdicts = {each.bar.name: each.verdict for each in bars.held({"writer.samples_per_s": 6000.0})}
        assert verdicts.pop("writer.samples_per_s") == "met"
        assert set(verdicts.values()) == {"not measured"}

    def test_the_table_for_the_readme_says_figure_interval_bar_and_verdict(self) -> None:
        name = "overhead.gpt2.fused.t128.net"
        lines = bars.as_markdown({name: 0.0123, f"{name}.interval": [0.011, 0.013]}).splitlines()
        (line,) = [line for line in lines if name in line]
        assert line.endswith("| 1.23% | 1.10% to 1.30% | ≤ 1.00% | not met |")

    def test_each_bar_belongs_to_a_group(self) -> None:
        prefixes = {bar.name.partition(".")[0] for bar in bars.BARS}
        assert prefixes <= {*run.GROUPS, "ratio"}  # ratios are measured with the peers


class TestRun:
    @pytest.fixture
    def groups(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two groups in a folder of their own, of which one fails, in place of the real ones."""
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / "stand-ins" / "benchmarks"
        folder.mkdir(parents=True)
        real = Path(run.__file__).parent
        (folder / "child.py").write_text((real / "child.py").read_text())
        (folder / "good.py").write_text(
            "import os\n"
            "def measure(device):\n"
            "    return {'good.figure': 1.5, 'good.device': device, 'good.quick': os.environ.get('BENCH_QUICK', '')}\n"
        )
        (folder / "bad.py").write_text("def measure(device):\n    raise ValueError('no such thing')\n")
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))
        monkeypatch.setattr(run, "GROUPS", ("good", "bad"))

    @pytest.mark.usefixtures("groups")
    def test_one_failing_group_is_named_with_its_error_and_loses_no_other(self, capfd: Any) -> None:
        assert run.main(["--only", "bad,good", "--quick"]) == 1
        results = json.loads(run.RESULTS.read_text())
        assert results["good.figure"] == 1.5
        assert (results["good.device"], results["good.quick"]) == ("cpu", "1")
        assert results["groups"]["bad"]["error"] == "ValueError: no such thing"
        assert results["groups"]["good"]["error"] is None
        assert "bad failed: ValueError: no such thing" in capfd.readouterr().out

    @pytest.mark.usefixtures("groups")
    def test_figures_of_other_groups_stay_and_are_named_as_old(self, capfd: Any) -> None:
        old = {"other.figure": 7, "good.gone": 8, "stray": 9}
        notes = {"other": {"measured": "2026-01-01", "names": ["other.figure"], "error": None}}
        notes["good"] = {"measured": "2026-01-01", "names": ["good.gone"], "error": None}
        run.RESULTS.write_text(json.dumps(old | {"groups": notes}))
        assert run.main(["--only", "good"]) == 0
        results = json.loads(run.RESULTS.read_text())
        assert results["other.figure"] == 7
        assert not {"good.gone", "stray"} & results.keys()
        out = capfd.readouterr().out
        assert "other: old, measured 2026-01-01" in out
        assert "good: old" not in out

    @pytest.mark.usefixtures("groups")
    def test_the_readme_is_written_only_on_request(self) -> None:
        text = f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n"
        run.README.write_text(text)
        run.main(["--only", "good"])
        assert run.README.read_text() == text
        run.main(["--only", "good", "--write-readme"])
        found = run.README.read_text()
        assert found.startswith(f"before\n{run.BEGIN}\n| figure |")
        assert found.endswith(f"\n{run.END}\nafter\n")
        assert "old" not in found

    def test_a_readme_without_a_place_for_the_figures_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no place"):
            run.with_figures(f"{run.END} {run.BEGIN}", {})

    def test_an_unknown_group_is_refused_with_the_known_ones(self, capsys: Any) -> None:
        with pytest.raises(SystemExit):
            run.main(["--only", "overhead,overhaed"])
        assert "no such group: overhaed; there are overhead, memory" in capsys.readouterr().err

    def test_an_empty_choice_means_all(self) -> None:
        assert run._options(["--only", ""]).only == run.GROUPS

    def test_the_method_names_machine_versions_and_how_medians_are_made(self) -> None:
        found = run.method()
        assert found["versions"]["torch"] == torch.__version__
        assert found["machine"]["cores"] >= 1
        assert "order statistics" in found["how"]


class TestFidelity:
    def test_pearson_kappa_and_prediction_are_over_pairs_of_different_samples(self) -> None:
        exact = np.array([[4.0, 1.0, 2.0], [1.0, 9.0, 3.0], [2.0, 3.0, 16.0]])
        sketched = np.array([[0.0, 3.0, 5.0], [3.0, 0.0, 7.0], [5.0, 7.0, 0.0]])
        found = fidelity.compare(exact, sketched, 0.5, 100)
        assert found.pearson == pytest.approx(1.0)  # 1, 2, 3 against 3, 5, 7: the diagonals would spoil it
        kappa = ((36 + 1) + (64 + 4) + (144 + 9)) / 3 / (2 / 3)
        assert found.kappa == pytest.approx(kappa)
        assert found.predicted == pytest.approx(1 / math.sqrt(1 + kappa / 100))

    def test_the_law_holds_for_random_signs(self) -> None:
        rng = np.random.default_rng(0)
        vectors = rng.normal(size=(60, 300)) * rng.gamma(1, size=300)
        signs = rng.choice([-1.0, 1.0], size=(300, 64)) / 8
        found = fidelity.compare(vectors @ vectors.T, (vectors @ signs) @ (vectors @ signs).T, 0.0, 64)
        assert found.pearson == pytest.approx(found.predicted, abs=0.05)
        assert 0.1 < found.pearson < 0.9

    def test_exact_products_and_stored_sketches_belong_to_the_same_samples(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 3, 12, "tiny")
        for batch in workload.batches:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        found = fidelity.point(workload, tmp_path / "run")
        assert found.pearson > 0.9
        assert found.pearson == pytest.approx(found.predicted, abs=0.02)
        assert 0 < found.share_a < 1

    def test_training_stops_at_each_point_and_moves_the_weights(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        batches = iter(workload.batches)
        weights = []
        for step in fidelity.trained_to(workload, batches, (1, 3)):
            weights.append((step, torch.cat([p.detach().flatten() for p in workload.parameters])))
        assert [step for step, _ in weights] == [1, 3]
        assert not torch.equal(weights[0][1], weights[1][1])
        assert len(list(batches)) == workloads.BATCHES - 3


class TestProfile:
    def test_operations_count_for_the_function_of_ours_that_calls_them(self) -> None:
        ours, theirs = ("/x/attribution/a.py", 3, "fold"), ("/x/torch/b.py", 4, "call")
        operation = ("~", 0, "<built-in method torch.bmm>")
        entries = {
            ours: (2, 2, 1.0, 9.0, {}),
            theirs: (1, 1, 5.0, 5.0, {}),
            operation: (3, 3, 4.0, 4.0, {ours: (2, 2, 3.0, 3.0), theirs: (1, 1, 1.0, 1.0)}),
        }
        (cost,) = profiling.costs(SimpleNamespace(stats=entries), 2)  # type: ignore[arg-type]
        assert (cost.where, cost.calls, cost.own_s) == ("attribution/a.py:3 fold", 1.0, 2.0)
        assert cost.operations == {"<built-in method torch.bmm>": 1.5}
        table = profiling.as_markdown([cost], 4.0)
        assert "| attribution/a.py:3 fold | 1 | 2000.00 | 50.000% | built-in method torch.bmm 1500.00 |" in table

    def test_a_profile_names_where_the_time_goes(self, tmp_path: Path) -> None:
        workload = workloads.pythia_lora(tmp_path / "data", 2, 8, "tiny")
        with Audited.open(workload, tmp_path / "runs", ("fused",)) as audited:
            found, plain_s = profiling.profile(audited, "fused", steps=1)
        assert plain_s > 0
        assert any("recorder.py" in cost.where for cost in found)
        assert [cost.own_s for cost in found] == sorted((cost.own_s for cost in found), reverse=True)

    def test_an_unknown_set_up_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"gpt2\.t128, gpt2\.t512, smollm2"):
            profiling.report("gpt3.fused")
