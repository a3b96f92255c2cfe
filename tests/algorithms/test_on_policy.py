"""On-policy runs: what is sampled is learnt from, the same every time; without it nothing of the loop changes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms.build import load_datasets, load_tokenizers
from limbeck.algorithms.dispatch import resolve_and_run, resolve_run
from limbeck.algorithms.observers.runaway import GuardConfig, RunawayGuard
from limbeck.algorithms.rollouts import (
    SLACK,
    StepData,
    Written,
    deal,
    is_prompt,
    measure,
    sample_seed,
)
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher
from limbeck.errors import ConfigError, DataError, LossError, ServerError
from limbeck.losses.chunk_policy import ChunkPolicyConfig
from limbeck.losses.objectives import OBJECTIVES
from limbeck.models import continuous
from limbeck.models.generate import Sample
from limbeck.tools.summary import summary
from tests.gates import Gate, Place
from tests.helpers.runs import (
    leftovers,
    limbeck,
    rows,
    settings,
    start,
    weight_bytes,
    write_data,
    write_run_file,
    write_tokenizers,
)
from tests.helpers.servers import ScoringServer, serving
from tests.helpers.trace_runs import MODEL, tokenizer_folder
from tests.losses.cases import directions_of

STEPS = 4
needs_engine = pytest.mark.skipif(not continuous.SUPPORTED, reason="the installed transformers has another engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("on_policy")
    write_data(made)
    write_tokenizers(made)
    return made


def run_file(folder: Path, run_dir: Path, own: dict[str, Any], **more: Any) -> dict[str, Any]:
    values = settings(folder, run_dir, **more)
    values["distillation"] |= {"max_num_steps": STEPS, "val_period": 0, "val_at_start": False, "val_at_end": False}
    values["checkpointing"] |= {"save_period": 2, "metric_name": None}
    sizes = {"max_new_tokens": 12, "prompt_tokens": 5}
    return {**values, "algorithm": "on_policy_distillation", "on_policy": {**sizes, **own}}


def train(folder: Path, run_dir: Path, own: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    resolve_and_run(run_file(folder, run_dir, own, **more))
    return rows(run_dir)


def test_a_fraction_of_0_is_the_loop_of_stored_text_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    found = train(folder, tmp_path / "none", {"fraction": 0})
    plain = run_file(folder, tmp_path / "plain", {})
    plain = {key: value for key, value in plain.items() if key not in ("algorithm", "on_policy")}
    resolve_and_run(plain)
    assert found == rows(tmp_path / "plain")
    assert weight_bytes(tmp_path / "none", STEPS) == weight_bytes(tmp_path / "plain", STEPS)


def without_the_first_end(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a run that ended at step 2 and went on: what was left out so far is told at the end of every run."""
    first, second, *others = found
    return [first, {name: value for name, value in second.items() if not name.startswith("train/skipped/")}, *others]


@pytest.mark.parametrize("fraction", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_the_same_seed_writes_the_same_and_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, fraction: float
) -> None:
    own = {"fraction": fraction, "samples_per_prompt": 2}
    whole = train(folder, tmp_path / "whole", own)
    parts = run_file(folder, tmp_path / "parts", own)
    resolve_and_run({**parts, "distillation": {**parts["distillation"], "max_num_steps": 2}})
    resolve_and_run(parts)
    assert without_the_first_end(rows(tmp_path / "parts")) == whole
    assert weight_bytes(tmp_path / "parts", STEPS) == weight_bytes(tmp_path / "whole", STEPS)
    last = whole[-1]
    assert ("train/kl_loss" in last) == (fraction < 1)
    figures = ("length", "ended", "cut", "repeated", "log_prob", "white_space")
    for name in ("on_policy/kl_loss", "on_policy/entropy", *(f"sample/{figure}" for figure in figures)):
        assert f"train/{name}" in last
    timed = rows(tmp_path / "whole", clocks=True)[-1]
    # of sampling, of the step, and what of it was training
    assert timed["train/sample/tokens_per_s"] > 0
    assert timed["train/tokens_per_s"] > 0
    assert {"train/time/sample", "train/time/forward", "train/time/backward"} <= timed.keys()
    told = {name.removeprefix("train/on_policy/teacher_0/") for name in last}
    assert told >= {"log_prob", "reverse_kl", "reverse_kl_1_1"}
    other = run_file(folder, tmp_path / "other", own)
    other["distillation"]["seed"] = 6
    resolve_and_run(other)
    assert rows(tmp_path / "other")[-1]["train/on_policy/kl_loss"] != last["train/on_policy/kl_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"policy_gradient": {}, "samples_per_prompt": 2}], ids=["divergence", "gradient"])
def test_what_is_learnt_lowers_the_divergence_on_own_text(folder: Path, tmp_path: Path, own: dict[str, Any]) -> None:
    values = run_file(folder, tmp_path / "run", own, policy={"scheduler": None})
    values["distillation"]["max_num_steps"] = 40
    values["checkpointing"]["save_period"] = 0
    resolve_and_run(values)
    assert rows(tmp_path / "run")[-1]["train/on_policy/entropy"] > 0
    found = [row["train/on_policy/teacher_0/reverse_kl"] for row in rows(tmp_path / "run")]
    assert sum(found[-8:]) < sum(found[:8])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "direction"),
    [
        (mode, direction)
        for mode in OBJECTIVES
        for direction in [None, *(one for one in directions_of(mode) if one not in ("forward", "reverse"))]
    ],
)
def test_every_loss_reads_sampled_text(folder: Path, tmp_path: Path, mode: str, direction: str | None) -> None:
    loss = {"mode": mode} if direction is None else {"mode": mode, "direction": direction}
    values = run_file(folder, tmp_path / "run", {"loss_fn": loss})
    values["distillation"]["max_num_steps"] = 1
    values["checkpointing"]["enabled"] = False
    resolve_and_run(values)
    (step,) = rows(tmp_path / "run")
    assert step["train/on_policy/kl_loss"] > 0
    assert step["train/grad_norm"] > 0


CALM = {"sample/length": 20.0, "sample/ended": 0.5, "sample/repeated": 0.1}


class TestGuard:
    def guard(self, **more: Any) -> RunawayGuard:
        found = RunawayGuard(GuardConfig(window=2, patience=3, **more))
        for _ in range(4):
            found.observe(CALM)
        return found

    @pytest.mark.parametrize(
        ("sign", "line"),
        [
            ({"sample/length": 90.0}, r"4\.5 times .* 3 steps"),
            ({"sample/ended": 0.1}, "20% .* ended"),
            ({"sample/repeated": 0.9}, "90% .* repetitions"),
        ],
    )
    def test_a_sign_that_stays_ends_the_run(self, sign: dict[str, float], line: str) -> None:
        guard, bad = self.guard(), {**CALM, **sign}
        guard.observe(bad)
        guard.observe(bad)
        guard.observe(CALM)
        guard.observe(bad)
        # a stored guard knows what it has seen
        resumed = RunawayGuard(guard.config)
        resumed.load_state_dict(guard.state_dict())
        resumed.observe(bad)
        with pytest.raises(LossError, match=line):
            resumed.observe(bad)

    def test_ratios_are_those_to_the_start(self) -> None:
        found = self.guard().observe({"sample/length": 30.0, "sample/ended": 0.25, "sample/repeated": 0.0})
        assert found == {"guard/length_growth": 1.5, "guard/ended_ratio": 0.5}

    def test_it_can_be_switched_off_and_a_step_without_samples_is_none(self) -> None:
        guard = self.guard(max_length_growth=None, min_ended_ratio=None, max_repeated=None)
        for _ in range(9):
            guard.observe({"sample/length": 900.0, "sample/ended": 0.0, "sample/repeated": 1.0})
        assert guard.observe({}) == {}


def test_a_run_that_repeats_itself_is_ended_in_one_line_and_its_checkpoint_stays(folder: Path, tmp_path: Path) -> None:
    # whatever is likeliest, again and again
    own = {"temperature": 0, "guard": {"window": 1, "patience": 3, "max_repeated": 0.05}}
    with pytest.raises(LossError, match=r"step [34]: \d+% .*allows 0\.05") as found:
        train(folder, tmp_path / "run", own)
    assert "\n" not in str(found.value)
    assert "set on_policy.anchor" in str(found.value)
    assert weight_bytes(tmp_path / "run", 2)
    assert rows(tmp_path / "run")[-1]["train/sample/repeated"] > 0.05


def loop_of(folder: Path, tmp_path: Path, own: dict[str, Any]) -> on_policy.OnPolicyLoop:
    config, _ = resolve_run(run_file(folder, tmp_path / "run", own))
    parts = on_policy.setup(config, *load_tokenizers(config), *load_datasets(config))  # type: ignore[arg-type]
    return on_policy.OnPolicyLoop(parts)


def test_reward_and_anchor_are_about_all_that_was_written(folder: Path, tmp_path: Path) -> None:
    own = {
        "samples_per_prompt": 2,
        "compare_stops": False,
        "anchor": {},
        "reward": {"function": f"{__name__}:shortest"},
    }
    loop = loop_of(folder, tmp_path, own)
    batch = next(iter(loop.run.loader))
    end = loop.rollouts.rows.end_ids[0]
    ids = [torch.tensor([5, 9, 7 + copy, end]) for _ in batch.prompts for copy in range(2)]
    samples = [Sample(i // 2, one, torch.full((4,), -1.0), ended=True) for i, one in enumerate(ids)]
    rollout = loop.rollouts.collate(Written(batch.prompts, samples, [0.5] * len(samples), measure(samples)))
    compared, rewarded, anchored = (channel.batch for channel in loop.step_inputs(batch, rollout))
    for found in (rewarded, anchored):
        assert int(found["token_mask"].sum()) == 4 * len(samples)
    assert torch.equal(rewarded["behavior_valid"], rewarded["token_mask"] > 0)
    assert int(compared["token_mask"].sum()) == 3 * len(samples)


def test_bits_per_byte_of_a_mixed_step_are_those_of_stored_text(folder: Path, tmp_path: Path) -> None:
    loop = loop_of(folder, tmp_path, {"fraction": 0.5})
    batch = next(iter(loop.run.loader))
    result = loop.train_step(batch)
    total, count = result["metrics"]["ce_loss"]
    assert float(count) == float((batch.stored["token_mask"][:, 1:] > 0).sum())
    expected = float(total) / math.log(2) / float(batch.stored["target_bytes"].sum())
    assert loop.bits_per_byte(batch, result) == pytest.approx(expected, rel=1e-6)
    assert loop.bits_per_byte(StepData(batch.prompts, None, Counter()), result) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen", "ema"])
def test_an_anchor_goes_on_where_it_stopped(folder: Path, tmp_path: Path, kind: str) -> None:
    own = {"anchor": {"kind": kind, "weight": 0.5, "ema_decay": 0.5}, "policy_gradient": {}}
    whole = train(folder, tmp_path / "whole", own)
    parts = run_file(folder, tmp_path / "parts", own)
    resolve_and_run({**parts, "distillation": {**parts["distillation"], "max_num_steps": 2}})
    resolve_and_run(parts)
    assert without_the_first_end(rows(tmp_path / "parts")) == whole
    # the student begins where its anchor is
    assert whole[0]["train/anchor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert whole[-1]["train/anchor/kl_loss"] > 1e-6


def test_a_step_without_a_single_prompt_changes_nothing(folder: Path, tmp_path: Path) -> None:
    loop = loop_of(folder, tmp_path, {})
    before = [p.detach().clone() for p in loop.run.student.model.parameters()]
    result = loop.train_step(StepData([], None, Counter()))
    assert (result["loss"], result["tokens"]) == (0.0, 0)
    for old, new in zip(before, loop.run.student.model.parameters(), strict=True):
        # weight decay alone
        torch.testing.assert_close(new.detach(), old, atol=1e-4, rtol=1e-3)


def test_records_are_prompts_by_seed_alone() -> None:
    chosen = [is_prompt(3, idx, 0.25) for idx in range(2000)]
    assert 400 < sum(chosen) < 600
    assert chosen[7:9] == [is_prompt(3, idx, 0.25) for idx in (7, 8)]
    assert chosen != [is_prompt(4, idx, 0.25) for idx in range(2000)]
    assert all(is_prompt(1, idx, 1.0) and not is_prompt(1, idx, 0.0) for idx in range(5))
    every = [(a, b, c, turn) for a in range(3) for b in range(3) for c in range(3) for turn in range(2)]
    assert len({sample_seed(*one) for one in every}) == 54


def test_loads_are_levelled_by_moving_few_parts() -> None:
    rng = random.Random(0)
    for ranks in (1, 2, 5):
        loads = [[rng.randint(1, 60) for _ in range(rng.randint(0, 40) if rank else 40)] for rank in range(ranks)]
        target = deal(loads)
        assert [len(own) for own in target] == [len(parts) for parts in loads]
        total = [0] * ranks
        for parts, own in zip(loads, target, strict=True):
            for size, to in zip(parts, own, strict=True):
                total[to] += size
        assert max(total) - min(total) <= max(60, SLACK * sum(total) / ranks)
    assert deal([[9, 9], [9, 9]]) == [[0, 0], [1, 1]]
    assert deal([[], []]) == [[], []]


def test_figures_of_samples() -> None:
    ids = [torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 9]), torch.tensor([5, 6])]
    samples = [Sample(i, t, torch.full((len(t),), -2.0), ended=bool(i)) for i, t in enumerate(ids)]
    found = measure(samples).means()
    assert found == {
        "sample/length": 5.5,
        "sample/ended": 0.5,
        "sample/cut": 0.5,
        "sample/log_prob": -2.0,
        "sample/repeated": pytest.approx(1 / 6),
    }
    assert measure([]).means() == {}


@pytest.mark.parametrize(
    ("own", "more", "line"),
    [
        ({"max_new_tokens": 48}, {}, "rows of 48 tokens"),
        ({}, {"teacher": {"cache": "x"}}, "a cache has no signals"),
        ({"temperature": 0, "samples_per_prompt": 2}, {}, "temperature 0 .*samples_per_prompt to 1"),
        ({"stop": [""]}, {}, "empty text"),
        ({"loss_fn": {"projection_matrix_path": "x"}}, {}, r"on_policy\.loss_fn .*projection"),
        ({"reward": {"function": "a:b"}}, {}, "set samples_per_prompt above 1"),
        ({"reward": {}, "samples_per_prompt": 2}, {}, "a verifier, a function"),
        ({"policy_gradient": {}, "loss_fn": {"mode": "alm"}}, {}, r"on_policy\.loss_fn and on_policy\.policy_gradient"),
        ({"fraction": 1.5}, {}, "less than or equal to 1"),
        ({"anchor": {"kind": "ema"}}, {"policy": {"param_dtype": "bfloat16"}}, "bfloat16 weights"),
        ({"max_tokens": 5}, {}, "max_tokens"),
        ({"turns": "first"}, {}, "turns"),
    ],
)
def test_settings_that_cannot_work(
    folder: Path, tmp_path: Path, own: dict[str, Any], more: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        resolve_run(run_file(folder, tmp_path, own, **more))


def test_a_run_says_what_is_its_own_text(folder: Path, tmp_path: Path) -> None:
    def told(own: dict[str, Any]) -> dict[str, str]:
        lines = summary(resolve_run(run_file(folder, tmp_path, own))[0])
        return {line[:11].strip(): line[11:].strip() for line in lines}

    mixed = told({"fraction": 0.5, "loss_fn": {"mode": "boundary_kl", "direction": "jsd"}, "anchor": {"kind": "ema"}})
    assert mixed["own text"] == "1 answer of at most 12 tokens to 50% of records; boundary_kl, jsd; anchor 0.1 x ema"
    assert "cross-entropy" in mixed["loss"]
    pure = told({"samples_per_prompt": 2, "policy_gradient": {}, "reward": {"function": "a:b", "weight": 0.5}})
    expected = "2 answers of at most 12 tokens to all records; policy gradient by chunk; reward 0.5 x a:b"
    assert pure["own text"] == expected
    assert "loss" not in pure
    assert "own text" not in told({"fraction": 0})


def test_the_defaults_correct_by_reverse_kl_and_do_not_teach_own_words() -> None:
    own = on_policy.OnPolicyConfig()
    assert {"direction": "reverse", "ce_loss_scale": 0.0}.items() <= own.loss_fn.model_dump().items()
    # a budget, ends and blanks as decided, and a guard that looks
    assert 100 <= own.max_new_tokens <= 256
    assert own.compare_stops
    assert own.mask_blanks
    assert None not in own.guard.model_dump().values()
    assert ChunkPolicyConfig().advantage_clip is not None


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["generate", pytest.param("continuous", marks=needs_engine)])
def test_kills_in_the_middle_of_a_step_do_not_change_a_bit(folder: Path, tmp_path: Path, sampler: str) -> None:
    own = {"fraction": 0.75, "samples_per_prompt": 2, "batch_size": 3, "anchor": {"kind": "ema"}, "sampler": sampler}
    values = run_file(folder, tmp_path / "whole", own, policy={"model_overrides": {"attention_dropout": 0.1}})
    path = write_run_file(tmp_path / "run.yaml", values)
    assert limbeck("train", path, "-q")[0] == 0
    moved = f"logger.log_dir={tmp_path / 'killed'}"
    places: list[tuple[Place, int]] = [("sampled", 2), ("row written", 2), ("sampled", 3), ("save filled", 4)]
    for number, (place, step) in enumerate(places):
        process = start("train", path, "-q", moved, hold=(Gate(tmp_path / f"gate_{number}"), place, step))
        process.kill()
        process.join()
    assert limbeck("train", path, "-q", moved)[0] == 0
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert weight_bytes(tmp_path / "killed", STEPS) == weight_bytes(tmp_path / "whole", STEPS)
    assert leftovers(tmp_path / "killed") == []


@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_run_answers_the_last_turn_or_all_of_them(tmp_path: Path, turns: str) -> None:
    talk = [
        {"role": role, "content": f"{role} says {n}."}
        for n, role in enumerate(("user", "assistant", "user", "assistant"))
    ]
    lines = [json.dumps({"messages": talk}) for _ in range(4)]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def model(size: int) -> dict[str, Any]:
        section = {"init": "random", "model_overrides": MODEL, "tokenizer": {"name": tokenizer_folder(tmp_path, size)}}
        return {**section, "max_total_sequence_length": 200}

    values = {
        "algorithm": "on_policy_distillation",
        "policy": model(400),
        "teacher": model(500),
        "data": {"mode": "chat", "train": str(tmp_path / "talks.jsonl")},
        "on_policy": {"max_new_tokens": 6, "turns": turns},
        "distillation": {"num_prompts_per_step": 4, "max_num_steps": 1, "val_at_start": False},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(tmp_path / "run"), "tensorboard_enabled": False, "progress": False},
    }
    config: Any = resolve_run(values)[0]
    parts = on_policy.setup(config, *load_tokenizers(config), *load_datasets(config))
    loop = on_policy.OnPolicyLoop(parts)
    metrics = loop.train_step(next(iter(loop.run.loader)))["metrics"]
    assert loop.rollout is not None
    total, count = metrics["sample/turn"]
    written = {tuple(sample.ids_T.tolist()) for sample in loop.rollout.samples}
    if turns == "last":
        assert (total, count) == (8.0, 4.0)
        assert len(written) == 4
    else:
        assert (total, count) == (4 * (1 + 2), 8.0)
        # each with chance of its own
        assert len(written) == 8
    parts.logger.close()


def write_digits_alone(folder: Path) -> str:
    """A tokenizer that knows nothing but digits; its folder."""
    made = Tokenizer(BPE({digit: i for i, digit in enumerate("0123456789")}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_teacher_that_can_read_none_of_the_students_bytes_ends_the_run(folder: Path, tmp_path: Path) -> None:
    teacher = {"tokenizer": {"name": write_digits_alone(tmp_path / "digits")}}
    values = run_file(folder, tmp_path / "run", {}, teacher=teacher)
    values["distillation"] |= {"max_num_epochs": 1, "max_num_steps": 1000}
    with pytest.raises(DataError, match=r"\d+ prompts \(.*unspelled_bytes"):
        resolve_and_run(values)
    assert (tmp_path / "run" / "skipped.json").exists()


@pytest.mark.slow
def test_a_teacher_behind_a_server_scores_what_was_sampled(folder: Path, tmp_path: Path) -> None:
    gradient: dict[str, Any] = {"samples_per_prompt": 2, "policy_gradient": {}}
    config: Any = resolve_run(run_file(folder, tmp_path / "near", {}))[0]
    policy = live_teacher(config, 0, load_tokenizers(config)[1][0])
    with serving(ScoringServer(policy, max_k=1000)) as server:
        server.max_model_len = 5000

        def far(name: str, own: dict[str, Any], k: int) -> list[dict[str, Any]]:
            return train(folder, tmp_path / name, own, teacher={"server": {"url": server.url, "k": k}})

        # all of a distribution, or the tokens that the student chose and no other: what the model here says
        for name, own, k, figure in (
            ("whole", {}, policy.vocab_size, "kl_loss"),
            ("chosen", gradient, 1, "teacher_0/reverse_kl"),
        ):
            here = train(folder, tmp_path / f"{name}_near", own)
            there = far(f"{name}_far", own, k)
            for one, other in zip(here, there, strict=True):
                assert other[f"train/on_policy/{figure}"] == pytest.approx(one[f"train/on_policy/{figure}"], rel=1e-3)
        # the likeliest, and a tail
        few = far("few", {}, 5)
        assert all(math.isfinite(row["train/on_policy/kl_loss"]) for row in few)
        count = 0

        def drift(number: int, body: dict[str, Any], answer: Any) -> Any:
            """Every answer another one."""
            nonlocal count
            count += 1
            status, made = answer
            for choice in made.get("choices", []):
                for place in choice["prompt_logprobs"][1:]:
                    for value in place.values():
                        value["logprob"] -= 0.1 * count
            return status, made

        server.lie = drift
        with pytest.raises(ServerError, match="scored the same text twice"):
            far("drifting", {}, 5)


def shortest(asked: Any, answer: str) -> float:
    """A reward for few characters."""
    return -float(len(answer))


@pytest.mark.slow
def starts_as_told(answer: str, record: Any) -> float:
    if record["best"] == "none":
        raise KeyError("nothing to compare with")
    return float(ord(answer[0]) % 2 == int(record["best"]) % 2) if answer else 0.0


@pytest.mark.parametrize("mode", ["text", "chat", "parquet"])
def test_a_verifier_compares_what_is_written_with_the_record(folder: Path, tmp_path: Path, mode: str) -> None:
    text = "The store counts flasks and parts."
    kinds = {"text": {"text": text}, "parquet": {"text": text}, "chat": {"question": "How many?", "answer": "Two."}}
    stored = [{**kinds[mode], "best": "none" if i == 3 else str(i)} for i in range(8)]
    path = tmp_path / f"own.{'parquet' if mode == 'parquet' else 'jsonl'}"
    if mode == "parquet":
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(stored), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in stored), encoding="utf-8")
    verifier = f"{__name__}:starts_as_told"
    own = {"samples_per_prompt": 2, "reward": {"verifier": verifier}}
    values = run_file(folder, tmp_path / "run", own)
    values["data"] |= {"train": str(path), "validation": None, "cache_dir": str(tmp_path / "cache")}
    values["distillation"] |= {"num_prompts_per_step": 8, "max_num_steps": 2, "max_num_epochs": 2}
    if mode == "chat":
        template = "{% for m in messages %}{{ m.content }} {% endfor %}"
        for section in ("policy", "teacher"):
            values[section]["tokenizer"]["chat_template"] = template
    resolve_and_run(values)
    for row in rows(tmp_path / "run"):
        assert row["train/sample/failed"] == pytest.approx(1 / 8)
        assert row["train/sample/right"] == row["train/sample/reward"]
    assert 0 < sum(row["train/sample/right"] for row in rows(tmp_path / "run")) < 2
    if mode == "text":
        values["on_policy"]["reward"] = {"verifier": {"name": "number", "answer_key": "nowhere"}}
        values["logger"] = {"log_dir": str(tmp_path / "no")}
        with pytest.raises(ConfigError, match="nowhere"):
            resolve_and_run(values)


def test_a_reward_is_learnt_from_and_one_that_fails_loses_nothing(folder: Path, tmp_path: Path) -> None:
    own = {"samples_per_prompt": 4, "policy_gradient": {}, "reward": {"function": f"{__name__}:shortest"}}
    last = train(folder, tmp_path / "run", own)[-1]
    assert last["train/sample/reward"] < 0
    assert last["train/reward/policy/ratio"] == pytest.approx(1, abs=1e-3)
    own["reward"] = {"function": f"{__name__}:run_file"}
    with pytest.raises(DataError, match=r":run_file' .*TypeError"):
        train(folder, tmp_path / "broken", own)
    assert (tmp_path / "broken" / "config.yaml").exists()
