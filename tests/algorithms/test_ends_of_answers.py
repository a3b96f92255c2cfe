"""Student and teacher of one tokenizer that end answers with different tokens of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.build import common_ends
from limbeck.algorithms.config import OnPolicyMasterConfig
from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.algorithms.xtoken_off_policy_distillation import foreign_tokenizers
from limbeck.config import resolve
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.chunk_policy import ChunkPolicyLossFn
from tests.algorithms.test_on_policy import run_file
from tests.helpers.runs import rows as metric_rows
from tests.helpers.tokenizers import TEXTS, TOOLS_TEMPLATE, trained_bpe
from tests.helpers.trace_runs import MODEL

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CHATML = TOOLS_TEMPLATE.read_text(encoding="utf-8")
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def speaker(template: str | None, eos: str, size: int = 300) -> Any:
    return trained_bpe(TEXTS, size, specials=SPECIALS, template=template, eos_token=eos)


BASE, INSTRUCT = speaker(PLAIN, "<|endoftext|>"), speaker(CHATML, "<|im_end|>")
IM_END, END_OF_TEXT = (BASE.convert_tokens_to_ids(token) for token in SPECIALS[1:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ends")
    talk = [{"role": "user", "content": "Which leap year?"}, {"role": "assistant", "content": "It is 2024."}]
    (made / "train.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    for name, tokenizer in (("base", BASE), ("instruct", INSTRUCT)):
        tokenizer.save_pretrained(made / name)
    return made


def settings(folder: Path, run_dir: Path, own: dict[str, Any] | None, teacher: str = "instruct") -> dict[str, Any]:
    values = run_file(folder, run_dir, own or {})
    for section, name in (("policy", "base"), ("teacher", teacher)):
        values[section] |= {"tokenizer": {"name": str(folder / name)}, "model_overrides": MODEL}
        values[section]["max_total_sequence_length"] = 128
    values["data"] = {"train": str(folder / "train.jsonl"), "mode": "chat"}
    values["distillation"] |= {"num_prompts_per_step": 2, "max_num_steps": 1}
    values["checkpointing"] = {"enabled": False}
    if own is None:
        values = {key: value for key, value in values.items() if key not in ("algorithm", "on_policy")}
    return values


BOTH = (IM_END, END_OF_TEXT)
PAIRS: list[tuple[Any, Any, tuple[int, ...]]] = [
    (BASE, INSTRUCT, BOTH),
    (BASE, BASE, ()),
    (INSTRUCT, INSTRUCT, ()),
    # a base model that is given the teacher's template goes on to end as it has learnt to
    (speaker(CHATML, "<|endoftext|>"), INSTRUCT, BOTH),
    (speaker(CHATML, "<|endoftext|>"), speaker(CHATML, "<|endoftext|>"), ()),
    # a teacher without a template has only one end
    (INSTRUCT, speaker(None, "<|endoftext|>"), BOTH),
    # another tokenizer is compared by its own tables
    (BASE, speaker(CHATML, "<|im_end|>", 320), ()),
]


@pytest.mark.parametrize(("student", "teacher", "want"), PAIRS)
def test_ends_are_one_event_where_they_differ(
    folder: Path, tmp_path: Path, student: Any, teacher: Any, want: tuple[int, ...]
) -> None:
    config = resolve(OnPolicyMasterConfig, settings(folder, tmp_path, {}))
    foreign = foreign_tokenizers(student, [teacher])
    assert common_ends(config, student, [teacher], foreign) == [want]
    of_texts = {"data": {"train": str(folder), "mode": "text"}}
    texts = resolve(OnPolicyMasterConfig, {**settings(folder, tmp_path, {}), **of_texts})
    assert common_ends(texts, student, [teacher], foreign) == [()]


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (None, CrossTokenizerDistillationLossFn),
        ({}, CrossTokenizerDistillationLossFn),
        ({"policy_gradient": {}, "samples_per_prompt": 2}, ChunkPolicyLossFn),
    ],
    ids=["stored", "divergence", "gradient"],
)
def test_every_run_on_conversations_compares_them_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any] | None, kind: Any
) -> None:
    seen: list[Any] = []
    prepare = kind.prepare_batch

    def watched(self: Any, batch: Any) -> Any:
        seen.append(self)
        return prepare(self, batch)

    monkeypatch.setattr(kind, "prepare_batch", watched)
    for teacher, want in (("instruct", BOTH), ("base", ())):
        seen.clear()
        resolve_and_run(settings(folder, tmp_path / teacher, own, teacher))
        loss_fn = seen[-1]
        found = loss_fn.ends if isinstance(loss_fn, ChunkPolicyLossFn) else [loss_fn.objectives[0].ends]
        assert found == [want]
        assert "train/loss" in metric_rows(tmp_path / teacher)[-1]
