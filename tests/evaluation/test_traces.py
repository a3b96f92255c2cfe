"""`limbeck eval --traces`: failed and better messages, before and after training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from limbeck.algorithms.trace_distillation import run
from limbeck.errors import ConfigError, TraceError
from limbeck.evaluation.bits import EvalOptions
from limbeck.evaluation.traces import evaluate_traces, with_better
from limbeck.traces.dataset import load_traces
from limbeck.traces.readers import read_traces
from tests.helpers.tokenizers import WORKSHOP
from tests.helpers.trace_runs import config

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """(start and end of a run, its traces)."""
    where = tmp_path_factory.mktemp("eval")
    made = config(
        where,
        policy={"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-3}}},
        loss={"policy": {"weight": 0.1}},
        distillation={"max_num_steps": 8, "save_start": True},
        checkpointing={"enabled": True, "keep_top_k": None},
    )
    folder = run(made)
    return [str(folder / "checkpoints" / "step_0"), str(folder)], str(made.traces.train)


def test_the_failed_call_falls_and_the_better_one_rises(trained: tuple[list[str], str]) -> None:
    models, traces = trained
    before, after = evaluate_traces(models, [traces], EvalOptions(context=1024)).values()
    assert before["sites"] == after["sites"] == 2
    assert after["failed_logprob"] < before["failed_logprob"] - 3
    assert after["better_logprob"] > before["better_logprob"] + 1
    assert after["better_above_worse"] == 1.0
    places = {(row["trace"], row["message"]) for row in after["rows"]}
    assert places == {("store-count-1", 2), ("store-count-2", 2)}
    # the same states, the same tokens: the pair's rejected side is the failed message
    assert after["worse_logprob"] == pytest.approx(after["failed_logprob"], rel=1e-5)


def test_the_command_prints_a_table_or_json(
    trained: tuple[list[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from limbeck.cli import main

    models, traces = trained
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--traces", traces, "--context", "1024", "--max-new-tokens", "4"]
    for command in (["eval", *models, *options], ["eval", models[0], *options, "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    for text in ("failed message", "better message", "makes the failed call again", "store-count-2", "unknown_tool"):
        assert any(text in line for line in shown)
    assert json.loads(shown[-1])["traces"][models[0]]["pairs"] == 2


def test_a_recovery_stands_in_where_there_is_no_pair(tmp_path: Path) -> None:
    section = config(tmp_path).traces.model_copy(update={"train": str(WORKSHOP)})
    traces = {trace.id: trace for trace in load_traces(section).traces}
    bare = traces["store-count-1"].model_copy(update={"preference_pairs": []})
    (pair,) = with_better(bare).preference_pairs
    assert pair.message_index == 2
    assert pair.chosen.tool_calls[0].name == "search_items"
    assert pair.rejected == bare.messages[2]
    assert with_better(traces["store-count-1"]).preference_pairs == traces["store-count-1"].preference_pairs
    assert with_better(traces["store-count-3"]).preference_pairs == []


def test_a_model_without_a_tool_template_reads_text_or_is_given_one(
    trained: tuple[list[str], str], tmp_path: Path
) -> None:
    import shutil

    from transformers import AutoTokenizer

    models, traces = trained
    folder = tmp_path / "plain"
    shutil.copytree(Path(models[0]) / "policy" / "weights", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer.chat_template
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    (as_text,) = evaluate_traces([str(folder)], [traces], EvalOptions(context=1024)).values()
    assert as_text["sites"] == 2
    assert as_text["skipped"]["written_text"] == 3
    (found,) = evaluate_traces([str(folder)], [traces], EvalOptions(context=1024), chat_template=given).values()
    (own,) = evaluate_traces(models[:1], [traces], EvalOptions(context=1024)).values()
    assert found["failed_logprob"] == own["failed_logprob"] != as_text["failed_logprob"]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(TraceError, match=r"empty\.jsonl"):
        evaluate_traces(models[:1], [empty])


class Scripted:
    """Stands in for the sampler: writes these answers."""

    def __init__(self, model, config, end_ids) -> None:
        self.model, self.end_ids = model, end_ids

    def sample(self, prompts, *, n=1, seed=0):
        from limbeck.models.generate import Sample

        found = []
        for number, text in zip(range(len(prompts)), ANSWERS, strict=False):
            ids = self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([*ids, self.end_ids[-1]])
            found.append(Sample(number, ids, torch.zeros(len(ids)), ended=number == 0))
        return found


ANSWERS: list[str] = []


def test_answers_at_failed_states_are_held_against_the_trace(
    trained: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, traces = trained
    (found,) = evaluate_traces(models[:1], [traces], EvalOptions(context=512), generate=5, max_new_tokens=4).values()
    assert found["behaviour"]["states"] == 2
    assert all(len(answer["text"].encode()) <= 4 * 16 for answer in found["behaviour"]["answers"])
    monkeypatch.setattr("limbeck.evaluation.traces.LocalSampler", Scripted)
    loaded = {trace.id: trace for trace in read_traces([Path(traces)])}
    first = loaded[found["behaviour"]["answers"][0]["trace"]]
    place = found["behaviour"]["answers"][0]["message"]
    wrong, right = first.messages[place].tool_calls[0], with_better(first).preference_pairs[0].chosen.tool_calls[0]
    written = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in (wrong, right)]
    for answers, expected in (
        ((f"<tool_call>{written[0]}</tool_call>", "I give up."), {"calls": 0.5, "repeated": 0.5, "known_tool": 0.0}),
        ((f"Well. {written[1]}", written[1]), {"calls": 1.0, "repeated": 0.0, "known_tool": 1.0, "unended": 0.5}),
    ):
        ANSWERS[:] = answers
        (found,) = evaluate_traces(models[:1], [traces], EvalOptions(context=512), generate=5).values()
        assert {name: found["behaviour"][name] for name in expected} == expected


def test_answers_that_leave_no_room_are_refused(trained: tuple[list[str], str]) -> None:
    models, traces = trained
    with pytest.raises(ConfigError, match="100000 tokens"):
        evaluate_traces(models[:1], [traces], EvalOptions(context=512), generate=1, max_new_tokens=100_000)
