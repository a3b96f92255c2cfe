"""Samples of fixed prompts: greedy, the same at every look, without a trace in what the run computes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from limbeck.algorithms.observers.samples import PromptSamples, SamplesConfig, Writer
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher, run
from limbeck.utils.logger import read_metrics
from tests.helpers import runs, tiny

ON = {"number": 2, "max_new_tokens": 5, "prompt_characters": 30}


def finished(stuff: Path, run_dir: Path, **distillation: Any) -> list[dict[str, Any]]:
    values = runs.settings(stuff, run_dir, distillation={"max_num_steps": 2, "val_period": 1, **distillation})
    run(runs.resolved(values))
    path = run_dir / "samples.jsonl"
    return read_metrics(path) if path.exists() else []


def test_a_run_writes_what_its_models_say_and_trains_to_the_same_bits(
    stuff: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = finished(stuff, tmp_path / "on", samples=ON)
    assert capsys.readouterr().err.count("writing samples ...") == 1
    assert finished(stuff, tmp_path / "off", samples={"number": 0}) == []
    assert runs.rows(tmp_path / "on") == runs.rows(tmp_path / "off")
    on, off = (runs.checkpoint(tmp_path / name, 2) / "policy" / "weights" for name in ("on", "off"))
    assert (on / "model.safetensors").read_bytes() == (off / "model.safetensors").read_bytes()

    found = [(row["step"], row["writer"], row["number"]) for row in rows]
    assert len(set(found)) == len(found)
    assert {(step, number) for step, writer, number in found if writer == "student"} == {
        (step, number) for step in (0, 1, 2) for number in (0, 1)
    }
    assert {(step, writer) for step, writer, _ in found if writer != "student"} == {(0, "teacher"), (0, "data")}

    texts = [json.loads(line)["text"] for line in (stuff / "val.jsonl").read_text(encoding="utf-8").splitlines()]
    reference = next(row for row in rows if row["writer"] == "data" and row["number"] == 0)
    assert texts[0].startswith(reference["prompt"] + reference["text"])
    assert len(reference["prompt"]) <= 30

    # greedy, by the book
    model, tokenizer = AutoModelForCausalLM.from_pretrained(on).eval(), AutoTokenizer.from_pretrained(on)
    last = next(row for row in rows if (row["step"], row["writer"], row["number"]) == (2, "student", 0))
    ids = tokenizer(last["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(last["tokens"]):
            best = model(input_ids=ids).logits[:, -1, : len(tokenizer)].argmax(-1, keepdim=True)
            ids = torch.cat((ids, best), 1)
    assert tokenizer.decode(ids[0, -last["tokens"] :], skip_special_tokens=True) == last["text"]


@pytest.mark.slow
def test_a_resumed_run_repeats_no_sample(stuff: Path, tmp_path: Path) -> None:
    whole = finished(stuff, tmp_path / "whole", samples=ON)
    finished(stuff, tmp_path / "parts", samples=ON, max_num_steps=1)
    assert finished(stuff, tmp_path / "parts", samples=ON) == whole


@pytest.fixture(scope="module")
def parts(stuff: Path) -> tuple[Any, Any]:
    config = runs.resolved(runs.settings(stuff, stuff / "none"))
    return config, live_teacher(config, 0, AutoTokenizer.from_pretrained(stuff / "teacher"))


def prompts_of(parts: tuple[Any, Any], records: list[dict[str, Any]], *, chat: bool = False, **more: Any) -> list[str]:
    config, policy = parts
    found = PromptSamples(SamplesConfig(**more), policy, [], records, sections=[config.teacher], chat=chat)
    return [prompt.shown for prompt in found.prompts]


def test_prompts_come_from_the_records_or_from_the_user(parts: tuple[Any, Any]) -> None:
    texts = [{"text": t} for t in ("", "word", "one two three four five six", tiny.TEXTS[0], tiny.TEXTS[1])]
    joined = [{"documents": texts}]
    for records in (texts, joined):
        assert prompts_of(parts, records, number=3, prompt_characters=12)[:2] == ["wo", "one two"]
    assert len(prompts_of(parts, texts)) == 2
    assert prompts_of(parts, texts, number=0) == []
    assert prompts_of(parts, texts, prompts=["a", "b", "c"]) == ["a", "b", "c"]
    assert prompts_of(parts, texts, prompts=["a", "b", "c"], number=1) == ["a"]


def test_a_teacher_without_a_model_here_writes_nothing(parts: tuple[Any, Any]) -> None:
    config, policy = parts
    cached: Any = SimpleNamespace(model=None)
    found = PromptSamples(
        SamplesConfig(prompts=["a"]), policy, [cached], [], sections=[config.policy, config.teacher], chat=False
    )
    assert found.teachers == []


def test_conversations_are_shown_up_to_their_last_answer(parts: tuple[Any, Any]) -> None:
    config, policy = parts
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    section = config.teacher.model_copy(
        update={"tokenizer": config.teacher.tokenizer.model_copy(update={"chat_template": template})}
    )
    talk = [{"role": r, "content": c} for r, c in (("user", "one?"), ("assistant", "1"), ("user", "two?"))]
    records = [
        {"messages": talk[:1]},
        {"messages": [talk[1]]},
        {"messages": [*talk, {"role": "assistant", "content": "2"}]},
    ]
    found = PromptSamples(SamplesConfig(), policy, [], records, sections=[section], chat=True)
    assert [(p.shown, p.reference, len(p.messages)) for p in found.prompts] == [("two?", "2", 3)]
    ids = Writer("student", policy, section).encode(found.prompts[0])
    assert found.student.tokenizer.vocab.join(ids.tolist()).decode().endswith("<user>two?</><assistant>")


@pytest.mark.parametrize("part", ["write", "__post_init__"])
def test_a_model_that_cannot_write_costs_a_line_and_not_the_run(
    part: str, stuff: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("this model has no cache")

    monkeypatch.setattr(Writer, part, refuse)
    assert finished(stuff, tmp_path / "auto", max_num_steps=1, samples={"number": None}) == []
    assert "".join(capsys.readouterr()).count("this run writes no samples (this model has no cache)") == 1
    with pytest.raises(RuntimeError, match="no cache"):
        finished(stuff, tmp_path / "asked", max_num_steps=1, samples={"number": 1})
