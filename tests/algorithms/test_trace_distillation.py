"""Whole runs on shipped traces: what they move, that they resume to the same bits, and what they refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from limbeck.algorithms.dispatch import resolve_and_run, resolve_run
from limbeck.algorithms.trace_distillation import run, setup, train
from limbeck.errors import ConfigError, DataError, LossError, TraceError
from limbeck.losses.policy_gradient import PolicyLossConfig
from limbeck.traces.dataset import compute_advantages, load_traces
from limbeck.utils.logger import read_metrics
from tests.helpers.trace_runs import config, settings, short_traces, tokenizer_folder

SAVING = {"enabled": True, "save_period": 2, "keep_top_k": None}
VALIDATED = {"val_at_start": True, "val_at_end": True}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Figures of a run without those of the machine."""
    clocks = ("seconds", "tokens_per_s")
    return [
        {k: v for k, v in row.items() if not {"time", "memory"} & set(k.split("/")) and not k.endswith(clocks)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step}" / "policy" / "weights" / "model.safetensors")


def test_training_moves_both_probabilities(tmp_path: Path) -> None:
    """Rewards, hints and preferences together: the failed call becomes less probable, the preferred one more."""
    policy = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-3}}}
    more = {"max_num_steps": 10, **VALIDATED, "monitor": {"period": 5, "generate": 1, "max_new_tokens": 4}}
    folder = run(config(tmp_path, policy=policy, loss={"policy": {"weight": 0.1}}, distillation=more))
    start, *_, end = rows_of(folder)
    assert end["val/erroneous_logprob"] < start["val/erroneous_logprob"] - 5
    assert end["val/rejected_logprob"] < start["val/rejected_logprob"] - 5
    assert end["val/chosen_logprob"] > start["val/chosen_logprob"] + 2
    assert end["val/preference_accuracy"] == 1.0
    assert 1 <= end["val/response_length"] <= 4
    monitored = next(row for row in rows_of(folder) if row["step"] == 5)
    kinds = ("special", "format", "number", "word", "other")
    assert any(f"train/monitor/hint/kl_{kind}" in monitored for kind in kinds)
    for name in ("entropy", "format_mass", "early_end_mass"):
        assert monitored[f"train/monitor/policy/{name}"] >= 0
    assert monitored["train/count/sites"] == 2
    assert monitored["train/count/pairs"] == 2
    assert json.loads((folder / "skipped.json").read_text()) == {}
    samples = read_metrics(folder / "samples.jsonl")
    assert [(s["step"], s["writer"], s["number"]) for s in samples] == [(0, "student", 0), (10, "student", 0)]
    assert samples[-1]["tokens"] == end["val/response_length"]


def test_the_hint_alone_corrects_a_student_that_understands_hints(tmp_path: Path) -> None:
    """A model that errs without the hint and does not with it teaches itself to do without."""
    only = {"policy": False, "preference": False}
    made = setup(config(tmp_path, traces={"channels": only}, distillation={"num_prompts_per_step": 1}))
    traces = {trace.id: trace for trace in made.loader.dataset.traces}
    failing = [(i, t) for i, t in enumerate(traces.values()) if t.id == "store-count-2"]
    collate = made.validation.collate
    batch = collate(failing)
    student = made.student
    _teach_hints(student, batch)
    made.step.teachers[0].policy.model.load_state_dict(student.model.state_dict())
    for group in student.optimizer.param_groups:
        group["lr"] = 1e-3
    made.validation.dataset.traces = [failing[0][1]]
    before = made.validation.measure()
    first = None
    for _ in range(25):
        result = made.step(batch, {"policy": 0.0, "hint": 1.0, "preference": 0.0})
        first = result["metrics"]["hint/loss"][0] if first is None else first
    after = made.validation.measure()
    assert result["metrics"]["hint/loss"][0] < 0.2 * first
    assert after["erroneous_logprob"][0] < before["erroneous_logprob"][0] - 1
    assert after["chosen_logprob"][0] > before["chosen_logprob"][0] + 1


def _teach_hints(student: Any, batch: Any) -> None:
    """Likelihood training: the failed message in front of the plain state, the chosen one behind the hint."""
    failed = batch.channel("hint")
    pair = batch.channel("preference")
    prompt = int((pair["token_mask"][0] > 0).nonzero()[0])
    hinted_prompt = failed["teacher_input_ids"][0, : int((failed["teacher_token_mask"][0] > 0).nonzero()[0])]
    chosen = pair["input_ids"][0, prompt : int(pair["input_lengths"][0])]
    good = torch.cat((hinted_prompt, chosen))
    bad = failed["input_ids"][0, : int(failed["input_lengths"][0])]
    starts = len(hinted_prompt), int((failed["token_mask"][0] > 0).nonzero()[0])
    optimizer = torch.optim.AdamW(student.model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.zeros(())
        for ids, start in zip((good, bad), starts, strict=True):
            logits = student.model(input_ids=ids[None]).logits[0, start - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[start:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("teacher", ["ema", pytest.param("trust_region", marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, teacher: str) -> None:
    loss = {"hint": {"self_teacher": teacher, "divergence": "jsd"}, "alpha": {"value": 1.0, "warmup_steps": 2}}
    more: dict[str, Any] = {"loss": loss, "checkpointing": SAVING}
    steps = {"num_prompts_per_step": 2, "val_period": 2}
    names = ("store-count-1", "store-count-2", "store-count-3", "files-todo-2", "store-order-2")
    traces = {"train": short_traces(tmp_path, names)}

    def go(name: str, length: int) -> Path:
        place = {"log_dir": str(tmp_path / name)}
        return run(
            config(tmp_path, traces=traces, logger=place, distillation={**steps, "max_num_steps": length}, **more)
        )

    whole = go("whole", 5)
    go("parts", 3)
    parts = go("parts", 5)
    assert rows_of(parts) == rows_of(whole)
    for name, value in weights_of(whole, 5).items():
        assert torch.equal(value, weights_of(parts, 5)[name])
    assert (whole / "skipped.json").read_text() == (parts / "skipped.json").read_text()
    if teacher == "ema":
        shared = [f / "checkpoints/step_5/train_state/shared" for f in (whole, parts)]
        from limbeck.utils.state import load_state

        states = [load_state(folder) for folder in shared]
        for name, value in states[0]["teacher_0"]["ema"].items():
            assert torch.equal(value, states[1]["teacher_0"]["ema"][name])
        assert torch.equal(states[0]["reference"]["values"], states[1]["reference"]["values"])
        assert len(states[0]["reference"]["values"]) == 2


def test_the_start_is_saved_where_asked(tmp_path: Path) -> None:
    made = config(tmp_path, checkpointing=SAVING, distillation={"max_num_steps": 1, "save_start": True})
    folder = run(made)
    assert (folder / "checkpoints" / "step_0" / "policy" / "weights" / "config.json").is_file()
    assert not torch.equal(*(weights_of(folder, step)["lm_head.weight"] for step in (0, 1)))


def test_a_teacher_of_another_family_reads_the_hints(tmp_path: Path) -> None:
    other = settings(tmp_path)["policy"]
    teacher = {**other, "tokenizer": {"name": tokenizer_folder(tmp_path, 330)}}
    del teacher["optimizer"], teacher["train_micro_batch_size"]
    more = {"max_num_steps": 2, "num_prompts_per_step": 3}
    folder = run(config(tmp_path, teacher=teacher, distillation=more, traces={"channels": {"preference": False}}))
    rows = rows_of(folder)
    assert all(row["train/hint/loss"] > 0 for row in rows)
    assert "train/monitor/hint/jsd" not in rows[0]
    assert rows[0]["train/count/sites"] == 2


def test_disjoint_sides_stop_a_run_and_keep_the_batch(tmp_path: Path) -> None:
    made = setup(config(tmp_path, loss={"hint": {"divergence": "jsd"}}))
    with torch.no_grad():
        head = made.student.model.lm_head.weight.mul_(300)
        made.step.teachers[0].policy.model.lm_head.weight.copy_(-head)
    with pytest.raises(LossError, match=r"step 1: .*maximum.*shifted.*no checkpoint"):
        train(made)
    kept = load_file(tmp_path / "run" / "failed_batch_step_1" / "batch.safetensors")
    assert kept["ctx_teacher_input_ids"].shape[0] == 2


# -- groups and behaviour ----------------------------------------------------------------------------------------------


def test_advantages_are_taken_over_the_data_set(tmp_path: Path) -> None:
    data = load_traces(config(tmp_path).traces)
    plan = compute_advantages(data.traces, PolicyLossConfig(), config(tmp_path).traces)
    assert plan.cfg.mode == "reward_weighted"
    torch.testing.assert_close(plan.values, torch.tensor([1 / 3, -2 / 3, 1 / 3]))
    alone = compute_advantages(data.traces, PolicyLossConfig(), config(tmp_path, traces={"groups": "none"}).traces)
    assert alone.values.tolist() == [1.0, 0.0, 1.0]
    large = compute_advantages(data.traces, PolicyLossConfig(), config(tmp_path, traces={"min_group_size": 4}).traces)
    assert not large.counted.any()


def test_grpo_needs_what_it_divides_by(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="behaviour log-probs"):
        setup(config(tmp_path, loss={"policy": {"mode": "dr_grpo"}}))


def test_grpo_with_behaviour_log_probs_starts_at_ratio_one(tmp_path: Path) -> None:
    made = setup(config(tmp_path, traces={"channels": {"hint": False, "preference": False}}))
    batch = made.loader.collate_fn([made.loader.dataset[i] for i in range(3)])
    logprobs = made.student.get_logprobs(batch.channel("policy"))["logprobs"]
    lines = []
    for row, trace in enumerate(made.loader.dataset.traces):
        places = (batch["response_mask"][row] > 0).nonzero().squeeze(1)
        # consecutive supervised tokens belong to one message
        cuts = [0, *((places.diff() > 1).nonzero().squeeze(1) + 1).tolist(), len(places)]
        spans = iter(places[a:b] for a, b in itertools.pairwise(cuts))
        messages = []
        for message in trace.messages:
            if message.role == "assistant":
                where = next(spans)
                update = {
                    "sampled_ids": batch["input_ids"][row, where].tolist(),
                    "logprobs": logprobs[row, where].tolist(),
                }
                message = message.model_copy(update=update)
            messages.append(message)
        lines.append(trace.model_copy(update={"messages": messages}).to_json())
    path = tmp_path / "sampled.jsonl"
    path.write_text("\n".join(lines) + "\n")
    channels = {"hint": False, "preference": False}
    folder = run(config(tmp_path, traces={"train": str(path), "channels": channels}, distillation={"max_num_steps": 2}))
    first, second = rows_of(folder)
    assert first["train/policy/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["train/policy/behavior_kl"] == pytest.approx(0.0, abs=1e-4)
    assert second["train/policy/ratio"] != pytest.approx(1.0, abs=1e-4)
    assert first["train/count/policy"] == 3 * 1024


# -- run files ---------------------------------------------------------------------------------------------------------


def test_the_algorithm_key_picks_the_trainer(tmp_path: Path) -> None:
    raw = {"algorithm": "trace_distillation", **settings(tmp_path, distillation={"max_num_steps": 1})}
    folder = resolve_and_run(raw)
    assert (folder / "config.yaml").read_text().startswith("algorithm: trace_distillation\n")
    plain = {"policy": raw["policy"], "data": {"train": "x.txt"}}
    assert type(resolve_run(plain)[0]).__name__ == "MasterConfig"
    assert type(resolve_run({**plain, "algorithm": "xtoken_off_policy_distillation"})[0]).__name__ == "MasterConfig"
    with pytest.raises(ConfigError, match="did you mean 'trace_distillation'"):
        resolve_run({**raw, "algorithm": "trace_distilation"})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"traces": {"channels": {"policy": False, "hint": False, "preference": False}}}, "all three channels"),
        ({"loss": {"policy": {"weight": 0}, "alpha": 0, "beta": 0}}, "nothing to train"),
        ({"loss": {"alpha": {"value": 1, "decay": "linear"}}}, "decay_steps"),
        ({"loss": {"hint": {"divergence": "jsd", "jsd_beta": 0.01}}}, "JSD almost vanishes"),
        ({"policy": {"train_global_batch_size": 7}}, "leave it out"),
        ({"policy": {"param_dtype": "bfloat16"}, "loss": {"hint": {"self_teacher": "ema"}}}, "stand still"),
        ({"loss": {"self_teacher": "ema"}}, "unknown key 'loss.self_teacher'"),
    ],
)
def test_run_files_that_cannot_mean_what_they_say(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **more)


def test_bad_traces_are_refused_or_counted(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing\*\.jsonl"):
        load_traces(config(tmp_path, traces={"train": str(tmp_path / "nothing*.jsonl")}).traces)
    section = config(tmp_path).traces
    path = Path(str(section.train))
    path.write_text(path.read_text() + "{broken\n")
    data = load_traces(section)
    assert data.skipped == {"malformed_line": 1}
    assert len(data) == 3
    with pytest.raises(DataError, match=r"3 records .* 8;"):
        setup(config(tmp_path, distillation={"num_prompts_per_step": 8}))


def test_pair_and_site_files_take_part(tmp_path: Path) -> None:
    from limbeck.traces.failed_calls import FailedCallFinder

    data = load_traces(config(tmp_path).traces)
    pair = data.traces[0].preference_pairs[0]
    lines = [pair, pair.model_copy(update={"trace_id": "nobody"})]
    (tmp_path / "pairs.jsonl").write_text("".join(p.model_dump_json() + "\n" for p in lines))
    sites = FailedCallFinder().find(data.traces[0])
    (tmp_path / "sites.jsonl").write_text("".join(s.model_dump_json() + "\n" for s in sites))
    files = {"pairs": str(tmp_path / "pairs.jsonl"), "sites": str(tmp_path / "sites.jsonl")}
    folder = run(config(tmp_path, traces=files, distillation={"max_num_steps": 1}))
    (row,) = rows_of(folder)
    assert row["train/count/pairs"] == 3
    assert row["train/count/sites"] == 1
    assert json.loads((folder / "skipped.json").read_text())["pair_without_trace"] == 1


def test_traces_that_changed_or_teach_nothing_end_the_run(tmp_path: Path) -> None:
    steps = {"num_prompts_per_step": 2, "max_num_steps": 1}
    made = config(tmp_path, distillation=steps, checkpointing=SAVING)
    run(made)
    path = Path(str(made.traces.train))
    path.write_text(path.read_text().replace("340", "341"))
    with pytest.raises(DataError, match=r"traces\.train"):
        setup(config(tmp_path, distillation={**steps, "max_num_steps": 2}, checkpointing=SAVING))
    lone = short_traces(tmp_path, ("store-count-3", "files-rename-3"))
    only = {"policy": False, "hint": False}
    with pytest.raises(DataError) as refused:
        run(config(tmp_path, traces={"train": lone, "channels": only}, distillation=steps))
    assert "traces.train" in str(refused.value)


def test_a_warm_up_that_no_step_leaves_is_named_and_a_shorter_run_goes_on(tmp_path: Path) -> None:
    """A warm-up begins at weight 0: an epoch of one step learns nothing, which is no lack of failed calls."""
    traces = {"train": short_traces(tmp_path), "channels": {"policy": False, "preference": False}}
    loss = {"alpha": {"value": 1.0, "warmup_steps": 3}}
    steps = {"num_prompts_per_step": 3, "max_num_steps": 10}
    folder = run(config(tmp_path, traces=traces, loss=loss, distillation={**steps, "max_num_epochs": 3}))
    assert [row["train/alpha"] for row in rows_of(folder) if "train/alpha" in row] == [0, 1 / 3, 2 / 3]
    logger = {"log_dir": str(tmp_path / "short")}
    with pytest.raises(DataError) as refused:
        run(config(tmp_path, traces=traces, loss=loss, logger=logger, distillation={**steps, "max_num_epochs": 1}))
    assert "loss.alpha" in str(refused.value)
    assert "failed call" not in str(refused.value)


def test_a_template_without_tool_calls_reads_them_as_text(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    policy = {"tokenizer": {"name": tokenizer_folder(tmp_path), "chat_template": plain}}
    run_file = config(tmp_path, policy=policy)
    train(setup(run_file))
    counted = json.loads((Path(run_file.logger.log_dir) / "skipped.json").read_text())
    assert counted["written_text"] > 0
