"""A teacher kind is one file: its settings, short forms, a kind of a user's own, and the student as its own teacher."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms import xtoken_off_policy_distillation as off_policy
from limbeck.algorithms.build import load_datasets, load_tokenizers
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.dispatch import resolve_run
from limbeck.config import load_config, merge, models_in, resolve
from limbeck.errors import ConfigError, DataError
from limbeck.models.policy import PolicyConfig
from limbeck.teachers.build import TeacherConfig
from limbeck.teachers.kinds import KINDS, OtherSource, find_kind
from limbeck.teachers.self_teacher import SelfTeacher
from limbeck.tools.dry_run import dry_run
from limbeck.tools.summary import summary
from limbeck.tools.workload import workload_of
from tests.helpers import runs, trace_runs

ROOT = Path(__file__).parents[2]
SERVER = {"url": "http://host/v1", "k": 7}


@pytest.mark.parametrize(
    ("short", "source"),
    [
        ({}, {"kind": "live"}),
        ({"cache_k": 9, "cache_kind": "hidden"}, {"kind": "live"}),
        ({"cache": "c"}, {"kind": "cache", "folder": "c"}),
        (
            {"cache": "c", "cache_k": 9, "cache_kind": "hidden"},
            {"kind": "cache", "folder": "c", "k": 9, "holds": "hidden"},
        ),
        ({"server": SERVER}, {"kind": "server", **SERVER}),
        (
            {"cache": "c", "server": SERVER},
            {"kind": "cache", "folder": "c", "filled_by": {"kind": "server", **SERVER}},
        ),
        ({"cache": None, "cache_k": 128, "cache_kind": "topk", "server": None}, {"kind": "live"}),
    ],
)
def test_short_forms_of_a_source(short: dict[str, Any], source: dict[str, Any]) -> None:
    found = resolve(TeacherConfig, {"model_name": "m", **short})
    assert found == resolve(TeacherConfig, {"model_name": "m", "source": source})
    assert resolve(TeacherConfig, found.model_dump(mode="json")) == found


def test_a_word_is_a_kind() -> None:
    assert resolve(TeacherConfig, {"source": "self"}) == resolve(TeacherConfig, {"source": {"kind": "self"}})


def test_a_name_of_a_remote_model_is_found() -> None:
    for source in (
        {"kind": "server", **SERVER},
        {"kind": "cache", "folder": "c", "filled_by": {"kind": "server", **SERVER}},
    ):
        assert resolve(TeacherConfig, {"source": source, "tokenizer": {"name": "tok"}}).model_name == "tok"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"source": {"kind": "cache", "folder": "c"}, "cache": "d"}, "'cache' is short for keys of 'source'"),
        ({"source": "chache"}, "source.kind is 'chache'; expected live, server, cache, self, or module:Class"),
        ({"source": {"kind": "cache", "folder": "c", "foldr": 1}}, "did you mean 'folder'"),
        ({"source": "no_such_module:Teacher"}, "cannot be had: No module named"),
        ({"source": "json:JSONDecoder"}, "is no subclass of limbeck.teachers.kinds.TeacherKind"),
        ({"server": 5}, "'server' is 5: expected a section"),
        *(({key: None}, f"a teacher is not trained, so it has no key '{key}'") for key in ("optimizer", "lora")),
        (
            {"source": {"kind": "self"}, "precision": "bfloat16"},
            "the student's model and tokenizer; leave out model_name, precision",
        ),
    ],
)
def test_what_a_teacher_refuses(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        resolve(TeacherConfig, {"model_name": "m", **section})
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_a_teacher_has_a_models_keys() -> None:
    of_training = set(PolicyConfig.model_fields) - set(TeacherConfig.model_fields)
    assert {"optimizer", "scheduler", "lora", "max_grad_norm", "train_micro_batch_size"} <= of_training


def test_the_union_holds_every_kind() -> None:
    members = models_in(TeacherConfig.model_fields["source"].annotation)
    assert {*members} == {kind.Config for kind in KINDS.values()} | {OtherSource}
    assert all(find_kind(name) is kind for name, kind in KINDS.items())


# -- a kind of a user's own --------------------------------------------------------------------------------------------


@pytest.fixture
def bigrams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run file whose teacher is examples/teacher.py, in the working folder."""
    shutil.copy(ROOT / "examples" / "teacher.py", tmp_path / "bigram_example.py")
    monkeypatch.chdir(tmp_path)
    path = runs.write_run(tmp_path, checkpointing={"save_period": 2, "keep_top_k": 2})
    texts = tmp_path / "counted.txt"
    texts.write_text(
        "\n".join(json.loads(line)["text"] for line in (tmp_path / "train.jsonl").open()), encoding="utf-8"
    )
    values = load_config(path)
    values["teacher"] = {
        "tokenizer": values["teacher"]["tokenizer"],
        "source": {"kind": "bigram_example:BigramTeacher", "texts": str(texts), "k": 12},
    }
    values["data"]["validation"] = values["data"]["train"]
    return merge(
        values,
        {"loss_fn": {"mode": "tree_kl"}, "distillation": {"max_num_steps": 4, "max_num_epochs": 9, "val_period": 4}},
    )


def test_a_teacher_of_a_users_own_teaches(bigrams: dict[str, Any], tmp_path: Path) -> None:
    config: Any = runs.resolved(bigrams)
    assert resolve(MasterConfig, config.model_dump(mode="json")) == config
    assert config.all_teachers[0].shown_name == "(bigram_example:BigramTeacher)"
    off_policy.run(config)
    rows = runs.rows(tmp_path / "run")
    losses = [row["train/kl_loss"] for row in rows if "train/kl_loss" in row]
    assert len(losses) == 4
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    (held_out,) = {row["val/teacher_bpb"] for row in rows if "val/teacher_bpb" in row}
    assert 0 < held_out < 4.5, "a bigram model of the very text knows more than chance"
    longer = merge(bigrams, {"distillation": {"max_num_steps": 6}})
    off_policy.run(runs.resolved(longer))
    assert runs.rows(tmp_path / "run")[-1]["step"] == 6
    (tmp_path / "counted.txt").write_text("other text", encoding="utf-8")
    with pytest.raises(DataError, match="teacher_0 is no longer"):
        off_policy.run(runs.resolved(merge(longer, {"distillation": {"max_num_steps": 8}})))


def test_what_looks_at_a_run_file_knows_it(bigrams: dict[str, Any]) -> None:
    config: Any = runs.resolved(bigrams)
    said: list[str] = []
    assert dry_run(config, said.append) == []
    assert "teacher 0: 340 tokens" in said
    assert any("(bigram_example:BigramTeacher)" in line for line in summary(config))
    assert workload_of(config).teachers[0].weight_bytes == 0


def test_its_settings_are_its_own(bigrams: dict[str, Any]) -> None:
    bigrams["teacher"]["source"]["smoothin"] = 2
    with pytest.raises(ConfigError, match="'smoothin': did you mean 'smoothing'"):
        runs.resolved(bigrams)


def test_log_probabilities_and_signal_agree(bigrams: dict[str, Any]) -> None:
    config: Any = runs.resolved(bigrams)
    student, teachers = load_tokenizers(config)
    parts = off_policy.setup(config, student, teachers, *load_datasets(config))
    (teacher,) = off_policy.as_teachers(parts[1])
    for rows in parts[2]:
        scored = teacher.log_probs(rows)
        assert bool((scored <= 0).all())
        parts[0].train(rows, parts[4], teachers=[teacher], eval_mode=True)
        break


# -- the student as its own teacher ------------------------------------------------------------------------------------


def own(folder: Path, name: str, weights: str, **more: Any) -> dict[str, Any]:
    if not (folder / "run.yaml").exists():
        runs.write_run(folder, checkpointing={"save_period": 1, "keep_top_k": 9})
    values = load_config(folder / "run.yaml")
    values["teacher"] = {"source": {"kind": "self", "weights": weights, "ema_decay": 0.5}}
    values["policy"]["lr"] = 0.01
    return merge(values, {"logger": {"log_dir": str(folder / name)}, **more})


def losses(folder: Path) -> list[float]:
    return [row["train/kl_loss"] for row in runs.rows(folder) if "train/kl_loss" in row]


@pytest.mark.parametrize("weights", ["frozen", "ema"])
def test_a_student_held_near_its_past(tmp_path: Path, weights: str) -> None:
    off_policy.run(runs.resolved(own(tmp_path, "whole", weights)))
    whole = losses(tmp_path / "whole")
    assert len(whole) == 6
    assert whole[0] == pytest.approx(0, abs=1e-6), "at first both say the same"
    assert whole[-1] > 1e-8
    for steps in (3, 6):
        off_policy.run(runs.resolved(own(tmp_path, "parts", weights, distillation={"max_num_steps": steps})))
    assert losses(tmp_path / "parts") == whole
    assert runs.weight_bytes(tmp_path / "parts", 6) == runs.weight_bytes(tmp_path / "whole", 6)


def test_the_base_is_the_start_without_a_copy(tmp_path: Path) -> None:
    adapted = {"policy": {"lora": {"r": 2, "target_modules": ["q_proj", "down_proj"]}}}
    for weights in ("frozen", "base"):
        off_policy.run(runs.resolved(own(tmp_path, weights, weights, **adapted)))
    assert losses(tmp_path / "base") == pytest.approx(losses(tmp_path / "frozen"), rel=1e-4, abs=1e-7)
    assert losses(tmp_path / "base")[-1] > 1e-8


def test_base_leaves_the_adapters_to_training(tmp_path: Path) -> None:
    config: Any = runs.resolved(own(tmp_path, "run", "base", policy={"lora": {"r": 2, "target_modules": ["q_proj"]}}))
    student, teachers = load_tokenizers(config)
    parts = off_policy.setup(config, student, teachers, *load_datasets(config))
    policy, (teacher,) = parts[0], off_policy.as_teachers(parts[1])
    assert isinstance(teacher, SelfTeacher)
    assert teacher.policy is policy
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    rows = next(iter(parts[2]))
    here = policy.get_logprobs(rows)["logprobs"].cpu()
    assert not torch.allclose(teacher.log_probs(rows), here)
    assert torch.equal(policy.get_logprobs(rows)["logprobs"].cpu(), here)
    assert {name for name, p in policy.model.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize(
    ("weights", "more", "said"),
    [
        ("live", {}, "a student learns nothing from what it says itself at that moment"),
        ("base", {}, "the student has no adapters; set policy.lora"),
        ("frozen", {"loss_fn": {"ce_loss_scale": 0.0}}, "it would stay as it is"),
        ("ema", {"policy": {"param_dtype": "bfloat16"}}, "would stand still"),
    ],
)
def test_where_a_student_teaches_itself_nothing(tmp_path: Path, weights: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        resolve_run(own(tmp_path, "run", weights, **more))
    assert said in str(found.value)


def test_on_its_own_samples_a_student_that_reads_no_context_teaches_nothing(tmp_path: Path) -> None:
    sampled = {"on_policy": {"max_new_tokens": 8, "prompt_tokens": 4}, "algorithm": "on_policy_distillation"}
    config: Any = resolve_run(own(tmp_path, "run", "frozen", **sampled))[0]
    with pytest.raises(ConfigError) as found:
        on_policy.check_self_teachers(config, load_datasets(config)[0])
    assert "has a teacher_context" in str(found.value)
    assert str(found.value) in " ".join(dry_run(config, lambda line: None))
    on_policy.check_self_teachers(config, [{"text": "x", "teacher_context": "a hint"}])


def test_hints_are_read_by_the_student_where_no_teacher_is_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set loss\.hint\.self_teacher"):
        trace_runs.config(tmp_path, teacher={"source": "self"})


def test_an_average_moves_once_however_many_channels_it_teaches(tmp_path: Path) -> None:
    from limbeck.models.trainer import StepInput
    from limbeck.teachers.self_teacher import make_self_teacher

    config: Any = runs.resolved(own(tmp_path, "run", "ema"))
    student, teachers = load_tokenizers(config)
    parts = off_policy.setup(config, student, teachers, *load_datasets(config))
    policy, loss = parts[0], parts[4]
    teacher = make_self_teacher(policy, "ema", policy.cfg, seed=3, ema_decay=0.5)
    before = [p.detach().clone() for p in teacher.policy.model.parameters()]
    rows = next(iter(parts[2]))
    policy.trainer.step([StepInput(rows, loss, [teacher]), StepInput(rows, loss, [teacher], prefix="again/")])
    now = policy.model.parameters()
    for was, average, present in zip(before, teacher.policy.model.parameters(), now, strict=True):
        torch.testing.assert_close(average.detach(), 0.5 * was + 0.5 * present.detach())
