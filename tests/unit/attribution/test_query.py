"""Questions put to a tiny model: signs checked by taking the step, sums by the change of the quantity itself."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny import VOCABULARY, tiny_lora

from attribution.errors import AttributionError, RecipeError, SketchMismatchError
from attribution.influence import query, show
from attribution.influence.query import Question
from attribution.influence.record import log_answer
from attribution.influence.result import InfluenceResult
from attribution.influence.session import answer
from attribution.influence.sources import open_sources, text_previews
from attribution.sketch.layout import SketchLayout
from attribution.training.audit_mode import AuditMode
from attribution.training.recipe import Recipe
from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError, ReadError
from auditlog.format.records import EventKind
from auditlog.ledger.custody import read_custody, read_result
from auditlog.ledger.erase import erase
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer

STEPS, BATCH = 10, 4
QUESTION = Question("file 0 row", " 3", " deny it", "case 7")  # the data's rows begin like the prompt
OTHERS = [Question(f"case {i} of the others", " 3", " deny it") for i in range(8)]


class WordTokenizer:
    """Splits at blanks; a word's id is a sum over its letters. Just enough of a tokenizer's interface."""

    pad_token_id, eos_token_id = 0, 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [2 + sum(map(ord, word)) % (VOCABULARY - 2) for word in text.split()]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"<{i}>" for i in ids)


def batch_of(data: DataManifest, tokenizer: WordTokenizer, index: list[int]) -> dict[str, torch.Tensor]:
    rows = [tokenizer(data.read_row(i)["text"])["input_ids"] for i in index]
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "sample_index": torch.tensor(index),
    }


def build(manifest: DataManifest | None = None) -> Recipe:
    return Recipe(model=tiny_lora().eval(), tokenizer=WordTokenizer())


def train(folder: Path, data: DataManifest, signer: Signer, lr: float) -> torch.nn.Module:
    """Plain SGD steps with audit mode on; in evaluation mode the model is deterministic."""
    model = tiny_lora()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order = np.random.default_rng(3)
    with AuditMode(
        model, optimizer, data, run=folder, signer=signer, on_head=folder.parent / "auditor", recipe=f"{__file__}:build"
    ):
        for _ in range(STEPS):
            batch = batch_of(data, WordTokenizer(), order.choice(data.rows, BATCH, replace=False).tolist())
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.fixture
def run(tmp_path: Path, data: DataManifest, signer: Signer) -> Path:
    train(tmp_path / "run", data, signer, lr=1e-3)
    return tmp_path / "run"


def ask(run: Path, question: Question = QUESTION, others: list[Question] | None = None) -> InfluenceResult:
    recipe = build()
    with RunReader.open(run) as reader:
        query.load_final(reader, recipe.model)
        return query.ask(reader, recipe.model, recipe.tokenizer, question, OTHERS if others is None else others)


def objective(model: torch.nn.Module, question: Question = QUESTION) -> float:
    """``F`` by torch's own cross-entropy, one answer at a time."""
    tokenizer, total = WordTokenizer(), 0.0
    for text, sign in ((question.target, 1.0), (question.contrast, -1.0)):
        prompt, word = tokenizer(question.prompt)["input_ids"], tokenizer(text)["input_ids"]
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([prompt + word])).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(word), reduction="sum")
        total -= sign * float(loss)
    return total


def test_scores_of_all_records_add_up_to_what_training_did(run: Path, data: DataManifest) -> None:
    """Under small plain gradient steps the total of all scores is the change of F itself, to first order."""
    trained = build().model
    with RunReader.open(run) as reader:
        query.load_final(reader, trained)
    change = objective(trained) - objective(tiny_lora())
    result = ask(run)
    total = sum(source.total for source in result.sources)
    se = sum(source.se for source in result.sources)
    assert total == pytest.approx(change, abs=4 * se)
    assert abs(change) > 8 * se  # otherwise the line above would say nothing


def test_score_is_positive_where_a_step_on_the_record_pushes_the_answer_up(run: Path, data: DataManifest) -> None:
    """Take the step and look. The twelve clearest scores of either sign."""
    result, tokenizer = ask(run), WordTokenizer()
    model = build().model
    with RunReader.open(run) as reader:
        query.load_final(reader, model)
    before = objective(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [row for row in (*result.top_for[:6], *result.top_against[:6]) if abs(row.score) > 3 * row.score_se]
    assert {row.score > 0 for row in rows} == {True, False}
    for row in rows:
        batch = batch_of(data, tokenizer, [row.sample_index])
        del batch["sample_index"]
        model(**batch).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-4 * parameter.grad
        after = objective(model)
        assert (after > before) == (row.score > 0)
        model.load_state_dict(start, strict=False)
        model.zero_grad()


def test_the_query_sketch_is_the_sketch_of_autograds_gradient(data: DataManifest) -> None:
    model, tokenizer = build().model, WordTokenizer()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layout = SketchLayout({name: p.shape for name, p in parameters.items()}, 256)
    sketch, found = query.query_sketch(model, tokenizer, QUESTION, layout)
    prompt, target, contrast = (
        tokenizer(text)["input_ids"] for text in (QUESTION.prompt, QUESTION.target, QUESTION.contrast)
    )
    terms = []
    for words in (target, contrast):
        log_p = model(input_ids=torch.tensor([prompt + words])).logits[0].log_softmax(-1)
        terms.append(sum(log_p[len(prompt) - 1 + i, word] for i, word in enumerate(words)))
    gradients = torch.autograd.grad(terms[0] - terms[1], list(parameters.values()))
    expected = layout.sketch(dict(zip(parameters, gradients, strict=True)))
    np.testing.assert_allclose(sketch, expected.numpy(), rtol=1e-4, atol=1e-6)
    assert found.log_odds == pytest.approx(objective(model), abs=1e-5)
    assert np.log(found.p_target) - np.log(found.p_contrast) == pytest.approx(found.log_odds, abs=1e-4)


def test_asking_leaves_the_model_as_it_was(data: DataManifest) -> None:
    model = tiny_lora(dropout=0.1).train()
    model.base_model.eval()  # a mixture, to be restored module by module
    modes = [module.training for module in model.modules()]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    layout = SketchLayout({n: p.shape for n, p in model.named_parameters() if p.requires_grad}, 64)
    query.query_sketch(model, WordTokenizer(), QUESTION, layout)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None and torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_a_model_without_the_runs_adapters_is_refused_by_name() -> None:
    layout = SketchLayout({"nowhere.weight": (2, 2)}, 64)
    with pytest.raises(SketchMismatchError, match=r"nowhere\.weight"):
        query.query_sketch(build().model, WordTokenizer(), QUESTION, layout)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Question("what", " deny", " deny"), "same answer"),
        (Question("what", " ", " deny"), "target has no tokens"),
        (Question("", " approve", " deny"), "prompt has no tokens"),
    ],
)
def test_a_question_that_asks_nothing_is_refused(question: Question, message: str) -> None:
    model = build().model
    layout = SketchLayout({n: p.shape for n, p in model.named_parameters() if p.requires_grad}, 64)
    with pytest.raises(AttributionError, match=message):
        query.query_sketch(model, WordTokenizer(), question, layout)


def test_other_final_weights_than_the_logged_ones_are_refused(run: Path) -> None:
    snapshot = run / "snapshots" / "final" / "trainable.safetensors"
    content = bytearray(snapshot.read_bytes())
    content[-1] ^= 1
    snapshot.write_bytes(bytes(content))
    with RunReader.open(run) as reader, pytest.raises(ReadError, match=r"trainable\.safetensors is not the file"):
        query.load_final(reader, build().model)


def test_a_logged_answer_verifies_and_is_what_was_computed(run: Path, signer: Signer) -> None:
    result = ask(run)
    file, event = log_answer(run, result, signer)
    with RunReader.open(run) as reader:
        head = reader.final_note.checkpoint()
    assert read_result(run, Path(file).stem) == json.loads(json.dumps(result.to_document()))
    body = event.json()
    assert (body["tree_size"], body["root"]) == (head.size, head.root.hex())
    assert QUESTION.prompt not in json.dumps(body)  # commitments only
    assert [e.kind for e in read_custody(run)] == [EventKind.CUSTODY_OPENED, EventKind.QUERY]
    verdict = verify_run(run, Trust.load([str(signer.vkey)], [run.parent / "auditor" / "run"]))
    assert verdict.exit_code == 0


def test_an_answer_names_every_sample_by_file_row_and_version(run: Path, data: DataManifest) -> None:
    result = ask(run)
    version = data.block.versions[0].revision
    for row in (*result.top_for, *result.top_against):
        source, place, _ = data.locate(np.array([row.sample_index]))
        assert (row.source_id, row.row) == (source[0], place[0])
        assert (row.path, row.data_version) == (data.block.sources[row.source_id].path, version)
    towards, away = ([row.cosine for row in rows] for rows in (result.top_for, result.top_against))
    assert towards == sorted(towards, reverse=True)
    assert away == sorted(away)
    assert min(towards) > 0 > max(away)  # a list never names a record that pushed the other way
    assert sum(source.samples for source in result.sources) == result.n_samples
    assert sum(result.histogram[1]) == result.n_samples


def test_too_few_other_cases_leave_specificity_open(run: Path) -> None:
    result = ask(run, others=OTHERS[:3])
    assert result.specificity.specific is None
    assert result.top_for[0].cosine_centred is None


def test_the_recorded_recipe_answers_again_without_a_key(run: Path, data: DataManifest) -> None:
    others = [{"prompt": other.prompt} for other in OTHERS]
    result, logged = answer(run, QUESTION.prompt, "3", "deny it", others=others, data=data.base)
    direct = ask(run)
    assert logged is None
    assert not (run / "custody").exists()
    assert [row.sample_index for row in result.top_for] == [row.sample_index for row in direct.top_for]
    assert result.top_for[0].preview == data.read_row(result.top_for[0].sample_index)["text"]


def test_no_recipe_is_said_with_its_remedy(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with AuditMode(model, optimizer, data, run=tmp_path / "bare", signer=signer, on_head=tmp_path / "heads"):
        model(**batch_of(data, WordTokenizer(), [0, 1])).loss.backward()
        optimizer.step()
    with pytest.raises(RecipeError, match="no recipe recorded"):
        answer(tmp_path / "bare", "a prompt", "deny", "approve")


def test_previews_come_only_from_the_recorded_files(run: Path, data: DataManifest) -> None:
    with RunReader.open(run) as reader:
        manifest = reader.manifest
    assert text_previews(open_sources(manifest, data.base))(3) == data.read_row(3)["text"]
    path = data.base / manifest.data.sources[1].path
    path.write_text(path.read_text().replace("row", "ROW"))
    with pytest.raises(DataError, match="not the file that the run recorded"):
        open_sources(manifest, data.base)
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        open_sources(manifest, data.base)


def test_what_is_shown_has_every_figure_and_no_markup_of_others(run: Path, data: DataManifest) -> None:
    recipe = build()
    question = Question("file 0 row", " 3", " deny it", "[red]case\x1b[31m")
    with RunReader.open(run) as reader:
        result = query.ask(reader, recipe.model, recipe.tokenizer, question, OTHERS, preview=lambda index: "[bold]x")
    text = io.StringIO()
    Console(file=text, width=120, force_terminal=False).print(show.render(result), show.limits(result))
    shown = text.getvalue()
    assert "[red]case\\x1b[31m" in shown
    assert "[bold]x" in shown
    for row in (*result.top_for, *result.top_against):
        assert f"{row.path}: {row.row}" in shown
        assert f"{row.cosine:+.4f} ± {row.cosine_se:.4f}" in shown
    assert f"passes {result.floor:.3f} one time in twenty" in shown
    assert result.specificity.statement.split(":")[0] in shown


@pytest.mark.parametrize(("prompt", "given", "joined"), [("a.", "b", " b"), ("a ", "b", "b"), ("a.", "\nb", "\nb")])
def test_an_answer_follows_its_prompt_by_one_space_at_most(prompt: str, given: str, joined: str) -> None:
    assert query.follow_on(prompt, given) == joined


def test_an_erased_sample_leads_no_list_and_its_absence_is_said(run: Path, signer: Signer) -> None:
    first = ask(run).top_for[0]
    assert not any("erased" in limit for limit in ask(run).limits)
    erase(run, [(first.path, first.row)], "GDPR Art. 17(1)(a)", signer)
    result = ask(run)
    assert (first.path, first.row) not in [(row.path, row.row) for row in (*result.top_for, *result.top_against)]
    assert [
        limit for limit in result.limits if limit.startswith(f"{first.uses} records are of samples that were erased")
    ]
