"""What is published of the policy, the loss and the utilities that the loop is given."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from limbeck.errors import ConfigError
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig, CrossTokenizerDistillationLossFn
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.teachers.live import LiveTeacher
from limbeck.utils import CheckpointManager, Logger, Timer
from limbeck.utils.logger import read_metrics
from tests.helpers import tiny

# ---- Policy ----------------------------------------------------------------------------------------------------------


def test_the_arguments_of_train_and_their_defaults() -> None:
    parameters = inspect.signature(Policy.train).parameters
    defaults = {name: parameters[name].default for name in ("eval_mode", "gbs", "mbs", "timer")}
    assert defaults == {"eval_mode": False, "gbs": None, "mbs": None, "timer": None}
    assert list(parameters)[1:3] == ["data", "loss_fn"]


def test_training_takes_a_step_and_gives_loss_norm_and_metrics() -> None:
    student, timer = tiny.student(), Timer()
    result = student.train(tiny.batch(), tiny.loss_fn(), teachers=[LiveTeacher(tiny.teacher())], timer=timer)
    assert student.steps == 1
    assert result["loss"] > 0
    assert result["grad_norm"] > 0
    assert {"kl_loss", "ce_loss"} <= result["metrics"].keys()
    assert float(result["global_valid_seqs"]) == tiny.batch().size
    assert float(result["global_valid_toks"]) == float(tiny.batch()["token_mask"][:, 1:].sum())
    assert timer.get_elapsed("forward")


@pytest.mark.parametrize("mbs", [1, 2, 6])
def test_the_loss_does_not_depend_on_the_microbatch(mbs: int) -> None:
    teacher = LiveTeacher(tiny.teacher())
    result = tiny.student().train(tiny.batch(), tiny.loss_fn(), teachers=[teacher], mbs=mbs, eval_mode=True)
    whole = tiny.student().train(tiny.batch(), tiny.loss_fn(), teachers=[teacher], mbs=3, eval_mode=True)
    assert result["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert result["microbatches"] == 6 // mbs


def test_a_global_batch_of_fewer_rows_is_several_steps() -> None:
    student = tiny.student()
    student.train(tiny.batch(), tiny.loss_fn(), teachers=[LiveTeacher(tiny.teacher())], gbs=2)
    assert student.steps == tiny.batch().size / 2


def test_the_most_likely_logits_of_a_teacher_at_its_own_positions() -> None:
    teacher, data = tiny.teacher(), tiny.batch()
    top = teacher.get_topk_logits(data, 4, prefix="teacher_")
    shape = (*data["teacher_input_ids"].shape, 4)
    assert top["topk_logits"].shape == top["topk_indices"].shape == shape
    row, last = 0, int(data["teacher_input_lengths"][0])
    with torch.no_grad():
        logits = teacher.model(input_ids=data["teacher_input_ids"][row : row + 1, :last]).logits[0]
    values, ids = logits.topk(4, -1)
    assert torch.allclose(top["topk_logits"][row, :last], values, atol=1e-5)
    assert torch.equal(top["topk_indices"][row, :last], ids)


def test_log_probabilities_of_the_tokens_themselves() -> None:
    student, data = tiny.student(), tiny.batch()
    found = student.get_logprobs(data)["logprobs"]
    assert found.shape == data["input_ids"].shape
    assert bool((found[:, 0] == 0).all()), "nothing predicts the first token"
    last = int(data["input_lengths"][0])
    with torch.no_grad():
        logp = student.model(input_ids=data["input_ids"][:1, :last]).logits[0].log_softmax(-1)
    own = logp[:-1].gather(1, data["input_ids"][0, 1:last, None])[:, 0]
    assert torch.allclose(found[0, 1:last], own, atol=1e-5)


def test_a_policy_that_was_put_aside_is_made_ready_again() -> None:
    student = tiny.student()
    student.train(tiny.batch(), tiny.loss_fn(), teachers=[LiveTeacher(tiny.teacher())])
    student.offload()
    student.prepare_for_training()
    assert student.model.training
    student.train(tiny.batch(), tiny.loss_fn(), teachers=[LiveTeacher(tiny.teacher())])
    assert student.steps == 2


def test_a_checkpoint_is_a_folder_of_transformers(tmp_path: Path) -> None:
    student = tiny.student()
    student.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer", tmp_path / "tokenizer")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    for name, p in student.model.named_parameters():
        assert torch.equal(p, again.state_dict()[name])
    text = tiny.TEXTS[0]
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(text) == tiny.tokenizer(300)(text)
    assert any((tmp_path / "optimizer").iterdir())


def test_the_published_keys_of_a_policy() -> None:
    keys = (
        "model_name tokenizer train_global_batch_size train_micro_batch_size logprob_batch_size dtensor_cfg precision "
        "max_total_sequence_length make_sequence_length_divisible_by max_grad_norm dynamic_batching sequence_packing "
        "optimizer scheduler"
    )
    assert set(keys.split()) <= PolicyConfig.model_fields.keys()


# ---- loss ------------------------------------------------------------------------------------------------------------


def test_the_published_settings_of_the_loss() -> None:
    given: dict[str, Any] = {
        "gold_loss": False,
        "xtoken_loss": False,
        "temperature": 2.0,
        "vocab_topk": 64,
        "reverse_kl": True,
        "exact_token_match_only": True,
        "kl_loss_weight": 0.5,
        "ce_loss_scale": 0.1,
        "dynamic_loss_scaling": True,
    }
    found = CrossTokenizerDistillationLossConfig(**given)
    assert {name: found.model_dump()[name] for name in given} == given
    gold = CrossTokenizerDistillationLossConfig(gold_loss=True, uncommon_topk=32)
    assert (gold.mode, gold.model_dump()["uncommon_topk"]) == ("gold", 32)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [((False, False), "p_kl"), ((True, False), "gold"), ((True, True), "h_kl")],
    ids=["p_kl", "gold", "h_kl"],
)
def test_the_flags_select_the_published_losses(flags: tuple[bool, bool], mode: str) -> None:
    settings = {"gold_loss": flags[0], "xtoken_loss": flags[1]}
    loss = CrossTokenizerDistillationLossFn(settings, projections=[tiny.projection()])
    assert loss.cfg.mode == mode
    assert loss.num_teachers == 1


def test_the_relaxed_common_set_without_gold_is_refused() -> None:
    with pytest.raises(ConfigError, match="gold_loss"):
        CrossTokenizerDistillationLossFn({"gold_loss": False, "xtoken_loss": True}, projections=[tiny.projection()])


@pytest.mark.parametrize("mode", ["p_kl", "gold", "h_kl"])
def test_the_total_is_the_weighted_sum_of_its_parts(mode: str) -> None:
    loss = tiny.loss_fn(mode=mode, kl_loss_weight=0.5, ce_loss_scale=0.25)
    teacher = LiveTeacher(tiny.teacher())
    result = tiny.student().train(tiny.batch(), loss, teachers=[teacher], eval_mode=True)
    kl, ce = (result["metrics"][name][0] / result["metrics"][name][1] for name in ("kl_loss", "ce_loss"))
    assert result["loss"] == pytest.approx(0.5 * float(kl) + 0.25 * float(ce), rel=1e-5)


def test_dynamic_scaling_brings_the_kl_to_the_cross_entropy() -> None:
    """The factors are then without effect, as published."""
    teacher, losses = LiveTeacher(tiny.teacher()), []
    for weight in (1.0, 0.01):
        loss = tiny.loss_fn(mode="p_kl", dynamic_loss_scaling=True, kl_loss_weight=weight, ce_loss_scale=weight)
        student = tiny.student()
        student.train(tiny.batch(), loss, teachers=[teacher])
        result = student.train(tiny.batch(), loss, teachers=[teacher], eval_mode=True)
        losses.append(result["loss"])
        assert loss.scale.ratio() != 1.0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ---- utilities -------------------------------------------------------------------------------------------------------


def test_the_timer_measures_named_parts() -> None:
    timer = Timer()
    with timer.time("wait"):
        time.sleep(0)
    timer.start("more")
    assert timer.stop("more") >= 0
    assert set(timer.get_timing_metrics()) == {"wait", "more"}
    assert len(timer.get_elapsed("wait")) == 1
    assert timer.reduce("wait", "sum") == timer.get_elapsed("wait")[0]
    timer.reset()
    assert timer.get_timing_metrics() == {}


def test_the_logger_writes_metrics_under_a_prefix(tmp_path: Path) -> None:
    with Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False, "progress": False}) as logger:
        logger.log_metrics({"loss": 1.5, "kl_loss": (3.0, 4.0)}, 1, "train")
        logger.log_hyperparams({"a": {"b": 1}})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["step"], row["train/loss"], row["train/kl_loss"]) == (1, 1.5, 0.75)


def test_the_checkpoint_manager_keeps_the_best_and_the_latest(tmp_path: Path) -> None:
    settings = {"metric_name": "val/loss", "higher_is_better": False, "keep_top_k": 1, "save_period": 1}
    manager = CheckpointManager({**settings, "enabled": True}, run_dir=tmp_path)
    for step, value in ((1, 3.0), (2, 1.0), (3, 2.0)):
        folder = manager.init_tmp_checkpoint(step, {"total_steps": step, "val/loss": value})
        manager.finalize_checkpoint(folder)
    best, latest = manager.best(), manager.latest()
    assert best is not None
    assert latest is not None
    assert (best.name, latest.name) == ("step_2", "step_3")
    assert len(manager.checkpoints()) == 2
    assert (manager.load_training_info() or {})["total_steps"] == 3
