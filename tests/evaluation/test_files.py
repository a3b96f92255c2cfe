"""Bits per byte against plain full-logit arithmetic, windows that count every byte once, run folders, choices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from limbeck.cli.evaluation_tables import bos_warnings
from limbeck.cli.traces import traces_app
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.readers import BadRecord
from limbeck.errors import CheckpointError, ConfigError, DataError, LossError
from limbeck.evaluation.bits import EvalModel, EvalOptions, counted_tokens, make_windows, score_windows
from limbeck.evaluation.choices import LAYOUTS, layout_of, question_of
from limbeck.evaluation.files import detect_mode, evaluate
from limbeck.evaluation.models import find_model
from limbeck.evaluation.pairs import pairs_of
from limbeck.tokens import ByteTokenizer, TokenizedText
from limbeck.tokens.classes import TEXT_CLASSES
from limbeck.traces.readers import read_traces
from tests.helpers import tiny
from tests.traces.material import EXAMPLES

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)


def _save(folder: Path, size: int, seed: int, *, bos: bool = False, template: bool = False) -> Path:
    tok = tiny.tokenizer(size)
    tok = type(tok)(tokenizer_object=tok.backend_tokenizer.__class__.from_str(tok.backend_tokenizer.to_str()))
    tok.add_special_tokens({"eos_token": "<eos>"})
    if template:
        tok.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tok.chat_template = CHATML
    if bos:
        from tokenizers.processors import TemplateProcessing

        tok.add_special_tokens({"bos_token": "<bos>"})
        tok.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tok.bos_token_id)]
        )
    overrides = {**tiny.LLAMA, "vocab_size": len(tok) + 5}
    policy = tiny.Policy(
        {"init": "random", "model_overrides": overrides}, tok, device="cpu", seed=seed, init_optimizer=False
    )
    policy.save_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "plain": str(_save(root / "plain", 300, 0, template=True)),
        "other": str(_save(root / "other", 340, 1)),
        "bos": str(_save(root / "bos", 300, 2, bos=True)),
    }


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "val.jsonl"
    rows = [{"text": text} for text in [*tiny.TEXTS, "日本語のテキスト、絵文字 👩‍🔬 も。", " ".join(tiny.TEXTS) * 3]]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _reference_bits(spec: str, texts: list[str], *, bos: bool) -> tuple[float, int]:
    """Bits and bytes by full logits of each whole document, cut to the tokenizer's ids."""
    model = EvalModel(find_model(spec), EvalOptions())
    encoder = ByteTokenizer.of(model.tokenizer)
    bits, size = 0.0, 0
    for text in texts:
        rendering = encoder.encode(text, bos=bos)
        ids = torch.from_numpy(rendering.ids)[None]
        logits = model.policy.model(input_ids=ids).logits[0, :, : encoder.vocab.size].double()
        logprobs = logits.log_softmax(-1)
        bits -= float(logprobs[:-1].gather(1, ids[0, 1:, None]).sum()) / math.log(2)
        size += int(rendering.byte_ends[-1] - rendering.byte_ends[0])
    return bits, size


@pytest.mark.parametrize("name", ["plain", "bos"])
def test_bits_per_byte_are_those_of_the_full_softmax(models: dict[str, str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in tiny.TEXTS), encoding="utf-8")
    bits, size = _reference_bits(models[name], tiny.TEXTS, bos=name == "bos")
    row = evaluate([models[name]], [str(path)])["models"][models[name]][str(path)]
    assert row["bytes"] == size
    assert row["documents"] == len(tiny.TEXTS)
    assert row["bpb"] == pytest.approx(bits / size, rel=1e-5)
    if name == "bos":
        assert size == sum(len(t.encode()) for t in tiny.TEXTS)


def test_the_classes_of_tokens_add_up_to_the_file(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"text": "x = f(12, 345)\n\n日本語 and words, 2026."}) + "\n", encoding="utf-8")
    row = evaluate([models["bos"]], [str(path)])["models"][models["bos"]][str(path)]
    assert set(row["classes"]) == set(TEXT_CLASSES)
    assert sum(own["bytes"] for own in row["classes"].values()) == row["bytes"]
    assert sum(own["tokens"] for own in row["classes"].values()) == row["tokens"]
    bits = sum(own["bpb"] * own["bytes"] for own in row["classes"].values())
    assert bits == pytest.approx(row["bpb"] * row["bytes"], rel=1e-9)


def test_the_mass_of_a_class_is_the_probability_of_its_tokens_where_one_follows(
    models: dict[str, str], tmp_path: Path
) -> None:
    text = "x = f(12, 345)\n\n日本語 and words, 2026."
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    row = evaluate([models["bos"]], [str(path)])["models"][models["bos"]][str(path)]
    model = EvalModel(find_model(models["bos"]), EvalOptions())
    ids = torch.from_numpy(model.text(text).ids)
    size = model.encoder.vocab.size
    probs = model.policy.model(input_ids=ids[None]).logits[0, :-1, :size].double().softmax(-1)
    for number, name in enumerate(TEXT_CLASSES):
        members = torch.from_numpy(model.classes == number)
        expected = probs[members[ids[1:]]][:, members].sum(1).mean()
        assert row["classes"][name]["mass"] == pytest.approx(float(expected), rel=1e-5)


def test_the_first_token_is_left_out_of_both_counts(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "docs.txt"
    path.write_text(tiny.TEXTS[0], encoding="utf-8")
    row = evaluate([models["plain"]], [str(path)])["models"][models["plain"]][str(path)]
    rendering = ByteTokenizer.of(EvalModel(find_model(models["plain"]), EvalOptions()).tokenizer).encode(tiny.TEXTS[0])
    assert row["bytes"] == len(tiny.TEXTS[0]) - int(rendering.byte_ends[0])
    assert row["tokens"] == len(rendering) - 1


def test_batching_does_not_change_the_figures(models: dict[str, str], texts: str) -> None:
    rows = [
        evaluate([models["plain"]], [texts], EvalOptions(batch_tokens=n))["models"][models["plain"]][texts]
        for n in (1, 100, 8192)
    ]
    for row in rows[1:]:
        assert row["bpb"] == pytest.approx(rows[0]["bpb"], rel=1e-6)
        assert (row["bytes"], row["tokens"]) == (rows[0]["bytes"], rows[0]["tokens"])


def test_windows_cost_bits_but_never_bytes(models: dict[str, str], texts: str) -> None:
    wide, narrow = (
        evaluate([models["plain"]], [texts], EvalOptions(context=c, stride=s))["models"][models["plain"]][texts]
        for c, s in ((256, 200), (32, 16))
    )
    assert (wide["bytes"], wide["tokens"]) == (narrow["bytes"], narrow["tokens"])
    assert wide["bpb"] != narrow["bpb"]


def test_models_with_other_tokenizers_see_the_same_bytes(models: dict[str, str], texts: str) -> None:
    result = evaluate(list(models.values()), [texts], EvalOptions(max_bytes=700))
    sizes = {name: result["models"][spec][texts]["bytes"] for name, spec in models.items()}
    assert sizes["bos"] == 700
    assert all(700 - 12 * 8 < size <= 700 for size in sizes.values())


def _rendering(n: int, target: list[bool], lengths: list[int]) -> TokenizedText:
    ends = np.cumsum(lengths).astype(np.int64)
    ones = np.ones(n, bool)
    source = b"x" * int(ends[-1])
    return TokenizedText(np.arange(n), ends, source, ones, ~ones, np.array(target, bool))


@given(st.data())
def test_every_counted_token_is_scored_in_exactly_one_window(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    target = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    context = data.draw(st.integers(4, 20))
    stride = data.draw(st.integers(1, context - 2))
    bos = data.draw(st.sampled_from([None, 99]))
    rendering = _rendering(n, target, lengths)
    windows = make_windows(rendering, context, stride, bos_id=bos)
    seen = [int(i) for w in windows for i in w.ids[w.scored]]
    assert seen == np.flatnonzero(counted_tokens(rendering)).tolist()
    assert sum(w.size for w in windows) == sum(np.array(lengths)[counted_tokens(rendering)])
    assert all(len(w) <= context and not w.scored[0] for w in windows)
    for w in windows:
        body = w.ids[1:] if w.ids[0] == 99 else w.ids
        assert (np.diff(body) == 1).all()
        assert body[0] == 0 or bos is None or w.ids[0] == 99
    assert sum(w.share for w in windows) <= 1 + 1e-9


@pytest.mark.parametrize(("context", "stride"), [(3, 1), (8, 0), (8, 7)])
def test_windows_without_context_are_refused(context: int, stride: int) -> None:
    with pytest.raises(ConfigError, match="give"):
        make_windows(_rendering(4, [True] * 4, [1] * 4), context, stride)


class _Fixed:
    """A model whose log-probability of a token is minus its id."""

    vocab_size = 100
    name = "fixed"

    def __init__(self, worst: float = 0.0) -> None:
        self.worst, self.widths = worst, []  # type: ignore[var-annotated]

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        self.widths.append(tuple(data["input_ids"].shape))
        return BatchedDataDict({"logprobs": -data["input_ids"].float() - self.worst})


def test_batches_keep_to_the_budget_and_return_the_callers_key() -> None:
    model = _Fixed()
    windows = [make_windows(_rendering(n, [True] * n, [1] * n), 64, 32, key=n)[0] for n in (5, 30, 7, 12, 2)]
    scored = {w.key: nats for w, nats in score_windows(model, windows, 32)}
    assert scored == {n: -sum(range(1, n)) for n in (5, 30, 7, 12, 2)}
    assert all(rows * width <= 32 for rows, width in model.widths)


def test_a_token_outside_the_head_and_a_broken_model_stop() -> None:
    window = make_windows(_rendering(120, [True] * 120, [1] * 120), 128, 64)[0]
    with pytest.raises(DataError, match=r"token id 100 .* fixed "):
        list(score_windows(_Fixed(), [window], 128))
    short = make_windows(_rendering(5, [True] * 5, [1] * 5), 128, 64)
    with pytest.raises(LossError, match=r"fixed .*finite"):
        list(score_windows(_Fixed(float("nan")), short, 128))


def test_chat_counts_only_what_the_assistant_wrote(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    answers = ["It is 4.", "Nothing at all."]
    turns: list[Any] = [
        [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": answers[0]}],
        [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": answers[1]}],
    ]
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in turns), encoding="utf-8")
    result = evaluate([models["plain"]], [str(path)])
    row = result["models"][models["plain"]][str(path)]
    assert result["files"][str(path)] == "chat"
    assert row["bytes"] == sum(len(a) for a in answers)
    assert row["documents"] == 2


def _checkpoint(run: Path, step: int, source: str, bpb: float | None) -> None:
    folder = run / "checkpoints" / f"step_{step}"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "weights").symlink_to(source)
    info = {"step": step} if bpb is None else {"step": step, "val/bpb": bpb}
    (folder / "training_info.json").write_text(json.dumps(info))


def test_a_run_folder_stands_for_its_best_checkpoint(models: dict[str, str], tmp_path: Path, texts: str) -> None:
    run = tmp_path / "run"
    for step, (name, bpb) in enumerate([("plain", 2.0), ("other", 1.5), ("bos", 1.8)]):
        _checkpoint(run, 10 * step, models[name], bpb)
    (run / "checkpoints" / "tmp_step_30").mkdir()
    assert find_model(str(run)).step == 10
    assert find_model(str(run), "latest").step == 20
    assert find_model(str(run), "0").step == 0
    assert find_model(str(run / "checkpoints" / "step_20")).step == 20
    assert (run / "checkpoints" / "tmp_step_30").is_dir(), "another process may be writing it"
    options = EvalOptions(max_documents=2)
    by_run = evaluate([str(run)], [texts], options)["models"][str(run)][texts]
    assert by_run == evaluate([models["other"]], [texts], options)["models"][models["other"]][texts]
    with pytest.raises(CheckpointError, match=r"'15'.* 0, 10, 20"):
        find_model(str(run), "15")


def test_the_run_ranks_its_own_checkpoints(models: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        _checkpoint(run, step, models["plain"], None)
        info = run / "checkpoints" / f"step_{step}" / "training_info.json"
        info.write_text(json.dumps({"step": step, "val/accuracy": -step, "val/bpb": -step}))
    assert find_model(str(run)).step == 2
    (run / "config.yaml").write_text("checkpointing: {metric_name: 'val:accuracy', higher_is_better: true}\n")
    assert find_model(str(run)).step == 1


def test_what_is_no_model_is_refused_in_one_sentence(tmp_path: Path, models: dict[str, str], texts: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/checkpoints'"):
        find_model(str(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"/empty' .*config\.json"):
        find_model(str(empty))
    with pytest.raises(DataError, match=r"none\.jsonl.*exist"):
        evaluate([models["plain"]], [str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match="give at most 256"):
        evaluate([models["plain"]], [texts], EvalOptions(context=257))
    with pytest.raises(ConfigError, match="device 'nonsense'"):
        evaluate([models["plain"]], [texts], EvalOptions(device="nonsense"))


ROWS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        "activity_label": "Cooking",
        "ctx": "A man stirs. he [title]",
        "endings": ["stops [step].", "runs."],
        "label": "1",
    },
    "arc": {"question": "Which?", "choices": {"text": ["this", "that"], "label": ["A", "B"]}, "answerKey": "B"},
    "piqa": {"goal": "Boil water", "sol1": "heat it", "sol2": "cool it", "label": 0},
    "winogrande": {"sentence": "Ann gave Bo _ cup.", "option1": "her", "option2": "his", "answer": "2"},
    "mmlu": {"subject": "high_school", "question": "Pick", "choices": ["x", "y", "z"], "answer": 2},
    "choices": {"question": "Pick", "choices": ["x", "y"], "answer": 0},
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts_are_told_apart_and_read(name: str) -> None:
    assert layout_of(ROWS[name]) == name
    question = question_of(ROWS[name])
    expected = {
        "hellaswag": ("Cooking: A man stirs. he.", " runs.", 1),
        "arc": ("Question: Which?\nAnswer:", " that", 1),
        "piqa": ("Question: Boil water\nAnswer:", " heat it", 0),
        "winogrande": ("Ann gave Bo his", " cup.", 1),
        "choices": ("Question: Pick\nAnswer:", " x", 0),
    }
    if name == "mmlu":
        assert question.prompts[0].endswith("about high school.\n\nPick\nA. x\nB. y\nC. z\nAnswer:")
        assert question.continuations == (" A", " B", " C")
        return
    prompt, continuation, gold = expected[name]
    assert question.gold == gold
    assert (question.prompts[gold].rstrip(), question.continuations[gold]) == (prompt, continuation)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"label": "9"}, "does not exist"), ({"endings": 3}, "not complete"), ({"endings": ["", "b"]}, "empty")],
)
def test_bad_questions_are_named(change: dict[str, Any], reason: str) -> None:
    row = {**ROWS["hellaswag"], "ctx": "A man", **change}
    if change.get("endings") == ["", "b"]:
        row["activity_label"], row["ctx"] = "", ""
    with pytest.raises(BadRecord, match=reason):
        question_of(row)


def test_choices_by_hand(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "arc.jsonl"
    rows = [ROWS["arc"], {**ROWS["arc"], "choices": {"text": ["a much longer answer", "no"], "label": ["A", "B"]}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = evaluate([models["plain"]], [str(path)])
    row = result["models"][models["plain"]][str(path)]
    model = EvalModel(find_model(models["plain"]), EvalOptions())
    hits = norm_hits = 0
    for question in map(question_of, rows):
        nats = []
        for prompt, continuation in zip(question.prompts, question.continuations, strict=True):
            rendering = model.text(prompt + continuation)
            ids = torch.from_numpy(rendering.ids)[None]
            logits = model.policy.model(input_ids=ids).logits[0, :, : model.encoder.vocab.size]
            each = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            nats.append(float(each[torch.from_numpy(rendering.byte_ends[1:] > len(prompt))].sum()))
        per_byte = [n / question.size(a) for a, n in enumerate(nats)]
        hits += int(np.argmax(nats)) == question.gold
        norm_hits += int(np.argmax(per_byte)) == question.gold
    assert result["files"][str(path)] == "choice"
    assert (row["acc"], row["acc_norm"], row["documents"]) == (hits / 2, norm_hits / 2, 2)
    assert row["bytes"] == len(" that") + len(" no")


def test_a_bad_line_is_named_with_its_place(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_text(json.dumps(ROWS["piqa"]) + '\n{"goal": 3\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"piqa\.jsonl:2: .*JSON"):
        evaluate([models["plain"]], [str(path)])
    lacking = tmp_path / "lacking.jsonl"
    lacking.write_text('{"question": "a", "answer": "b"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="no 'text', only answer, question"):
        evaluate([models["plain"]], [str(lacking)])


def test_pairs_compare_two_messages(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    prompt = [{"role": "user", "content": "What is 2 + 2?"}]
    sides = {"chosen": "The quick brown fox", "rejected": "zzqx 77 ~~"}
    row = {"prompt": prompt, **{k: {"role": "assistant", "content": v} for k, v in sides.items()}}
    swapped = {"state_messages": prompt, "chosen": row["rejected"], "rejected": row["chosen"]}
    path.write_text(json.dumps(row) + "\n" + json.dumps(swapped) + "\n", encoding="utf-8")
    assert detect_mode(str(path), EvalOptions()) == "pairs"
    out = evaluate([models["plain"]], [str(path)])["models"][models["plain"]][str(path)]
    assert (out["accuracy"], out["documents"]) == (0.5, 2)
    assert out["margin"] == pytest.approx(0.0, abs=1e-5)
    assert out["chosen_logprob"] == pytest.approx(out["rejected_logprob"], abs=1e-5)
    assert out["bytes"] == sum(len(s) for s in sides.values())


def test_what_the_replay_writes_is_read_without_its_traces(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    arguments = ["pairs", str(EXAMPLES / "workshop.jsonl"), "-t", "py:tests.cli.test_traces:teacher", "-o", str(out)]
    assert CliRunner().invoke(traces_app, arguments).exit_code == 0
    traces = {trace.id: trace for trace in read_traces([EXAMPLES / "workshop.jsonl"])}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert detect_mode(str(out), EvalOptions()) == "pairs"
    for row in rows:
        (case,) = pairs_of(row)
        trace = traces[row["trace_id"]]
        assert case.prompt == trace.to_messages()[: row["message_index"]]
        assert case.tools == (trace.tools or None)
        assert case.chosen["content"] == "I would ask first."
    assert len(rows) == 13


def test_pairs_of_canonical_traces_are_read() -> None:
    call = {"id": "c1", "name": "read", "arguments": {"path": "a"}}
    pair = {"message_index": 1, "chosen": {"role": "assistant", "content": "yes"}}
    trace = {
        "schema_version": "limbeck.trace/1",
        "id": "t",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}],
        "preference_pairs": [{**pair, "rejected": {"role": "assistant", "tool_calls": [call]}}],
    }
    (case,) = pairs_of(trace)
    assert case.prompt == [{"role": "user", "content": "hi"}]
    assert case.rejected["tool_calls"][0]["function"]["name"] == "read"
    with pytest.raises(BadRecord, match="refers to message 1"):
        pairs_of({**pair, "rejected": {"role": "assistant", "content": "no"}})


def test_paragraphs_can_be_documents(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "docs.txt"
    path.write_text("\n\n".join(tiny.TEXTS[:3]), encoding="utf-8")
    split = EvalOptions(split_documents="blank_lines")
    row = evaluate([models["bos"]], [str(path)], split)["models"][models["bos"]][str(path)]
    bits, size = _reference_bits(models["bos"], tiny.TEXTS[:3], bos=True)
    assert row["documents"] == 3
    assert row["bytes"] <= size
    assert row["bpb"] == pytest.approx(bits / size, rel=0.05)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_model_whose_texts_begin_otherwise_than_it_expects(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    folder = str(_save(tmp_path / "model", 300, 1, bos=True))
    if wanted:  # the token is there, but is not put in front
        spec = json.loads((tmp_path / "model" / "tokenizer.json").read_text(encoding="utf-8"))
        spec["post_processor"] = None
        (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    begin = EvalModel(find_model(folder), EvalOptions()).encoder.bos_id
    rows: list[int] = []

    def lost_otherwise(self: tiny.Policy, data: BatchedDataDict, classes: Any = None) -> BatchedDataDict:
        rows.append(data.size)
        right = (data["input_ids"][:, :1] == begin) == wanted
        logprobs = torch.where(right, -1.0, -5.0).expand(data["input_ids"].shape)
        return BatchedDataDict({"logprobs": logprobs, "class_logprobs": logprobs})

    monkeypatch.setattr(tiny.Policy, "get_logprobs", lost_otherwise)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny.TEXTS), encoding="utf-8")
    plain = evaluate([folder], [str(path)])
    said = plain["loaded"][folder]["bos"]
    assert (said["expected"], said["followed"]) == (wanted, False)
    assert rows[0] == 2, "one short text, twice"
    (warning,) = bos_warnings(plain["loaded"])
    assert warning.startswith(f"warning: {folder} expects its texts {'behind' if wanted else 'without'}")
    assert "--bos expected" in warning
    right = evaluate([folder], [str(path)], EvalOptions(bos="expected"))
    old, new = (found["models"][folder][str(path)] for found in (plain, right))
    assert old["bpb"] / old["tokens"] * old["bytes"] == pytest.approx(5 * new["bpb"] / new["tokens"] * new["bytes"])
    # behind a BOS token a document's first token has a predictor
    assert new["tokens"] - old["tokens"] == (len(tiny.TEXTS) if wanted else -len(tiny.TEXTS))
    (note,) = bos_warnings(right["loaded"])
    assert "as its weights expect" in note


def test_a_chat_template_writes_its_own_beginning(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    path.write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    found = evaluate([models["plain"]], [str(path)])
    assert "bos" not in found["loaded"][models["plain"]]
