"""Collated traces through a real (tiny) model and the losses: what a trainer will do with each channel."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from limbeck.losses.hint import HintDistillationLossFn, HintLossConfig, ema_update
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.preference import PreferenceLossFn
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher
from limbeck.traces import CollatorConfig, ComposerDataCollator, HintTarget
from limbeck.traces.schema import PreferencePair, Trace
from tests.helpers import tiny
from tests.helpers.chats import asked, long_trace, numbered, result, said
from tests.helpers.tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


@functools.cache
def tokenizer() -> Any:
    """Bytes and three special tokens, with a chat template that knows tools."""
    return byte_level(
        specials=["<start>", "<end>", "<call>"],
        split_words=False,
        template=TEMPLATE,
        eos_token="<end>",
        bos_token="<start>",
    )


def policy(seed: int = 0, **more: Any) -> Policy:
    arch = {**tiny.LLAMA, "max_position_embeddings": 2048}
    settings = tiny.config(arch, **more)
    settings["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-3}}
    return Policy(settings, tokenizer(), name="tiny", device="cpu", seed=seed)


def traces() -> list[Trace]:
    pair = PreferencePair(chosen=said("Good choice."), rejected=said("Bad choice."), message_index=2)
    good = Trace(id="g", group_id="x", messages=[asked("Hello?"), said("JJJJJJ QQQQ")], final_reward=1.0)
    bad = long_trace(2, failed=(0,), words=1).model_copy(
        update={"id": "b", "group_id": "x", "final_reward": 0.0, "preference_pairs": [pair]}
    )
    other = Trace(
        id="o", group_id="x", messages=[asked("Hi"), said("", numbered(0)), result(0, failed=True)], final_reward=0.2
    )
    return [good, bad, other]


def collate(sites: Any = None) -> Any:
    return ComposerDataCollator(tokenizer(), CollatorConfig(max_seq_len=512), failed_calls=sites)(traces())


HINTS = [
    HintLossConfig(divergence="reverse"),
    HintLossConfig(divergence="forward", entry_clip=0.1),
    HintLossConfig(divergence="jsd"),
    HintLossConfig(divergence="reverse", topk=8, topk_by="student"),
]


@pytest.mark.parametrize("hint", HINTS, ids=lambda h: f"{h.divergence}-{h.topk}")
def test_an_empty_hint_gives_loss_zero_exactly(hint: HintLossConfig) -> None:
    student = policy()
    batch = collate({"b": [HintTarget(2, ""), HintTarget(4, "")], "o": [HintTarget(1, "")]})
    assert len(batch["site_target"]) == 3
    loss_fn = HintDistillationLossFn(hint)
    done = student.train(batch.channel("hint"), loss_fn, teachers=[LiveTeacher(student)], eval_mode=True)
    assert done["loss"] == 0.0


def test_the_hint_loss_moves_the_student_towards_the_hinted_teacher() -> None:
    channel = collate().channel("hint")
    assert channel.size == 2
    loss_fn = HintDistillationLossFn({"divergence": "forward"})
    teacher = policy(seed=1)
    curves = []
    for more in ({}, {"sequence_packing": {"enabled": True, "train_mb_tokens": 1024}}):
        student = policy(**more)
        curves.append([student.train(channel, loss_fn, teachers=[LiveTeacher(teacher)])["loss"] for _ in range(8)])
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def test_an_averaged_teacher_follows_the_student() -> None:
    student, teacher = policy(), policy()
    channel = collate().channel("hint")
    student.train(channel, HintDistillationLossFn(), teachers=[LiveTeacher(teacher)])
    distance = [_distance(student, teacher)]
    ema_update(student.model.parameters(), teacher.model.parameters(), 0.75)
    distance.append(_distance(student, teacher))
    assert distance[1] == pytest.approx(0.75 * distance[0], rel=1e-3)


def _distance(one: Policy, two: Policy) -> float:
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    return sum((a - b).abs().sum().item() for a, b in pairs)


def test_reward_weighted_training_raises_what_was_rewarded() -> None:
    student = policy()
    channel = collate().channel("policy")
    loss_fn = PolicyGradientLossFn()
    loss_fn.prepare_batch(channel)
    assert loss_fn.active.mode == "reward_weighted"
    mask = channel["token_mask"].bool()

    def likelihood() -> torch.Tensor:
        log_p = student.get_logprobs(channel)["logprobs"].cpu()
        return torch.stack([log_p[i][mask[i]].mean() for i in range(3)])

    before = likelihood()
    for _ in range(6):
        student.train(channel, loss_fn)
    change = likelihood() - before
    assert change[0] > change[1]


def test_preference_training_widens_the_margin() -> None:
    student = policy()
    channel = collate().channel("preference")
    log_p = student.get_logprobs(channel)["logprobs"].cpu()
    channel["reference_logprobs"] = (log_p * channel["token_mask"]).sum(1)
    loss_fn = PreferenceLossFn({"kind": "dpo", "beta": 0.5})
    first = student.train(channel, loss_fn)
    assert first["loss"] == pytest.approx(0.693147, abs=1e-4)
    last = [student.train(channel, loss_fn) for _ in range(5)][-1]
    assert last["loss"] < 0.6
    margin = last["metrics"]["preference/margin"]
    assert margin[0] / margin[1] > 0
