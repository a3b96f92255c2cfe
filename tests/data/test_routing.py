"""A record's own teacher: it is asked about its rows alone, and the loss is the sum of what each says of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.data.continuations import Continuation, ContinuationCollator
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.errors import ConfigError, DataError
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.policy import Policy
from limbeck.models.trainer import StepInput, evaluate
from limbeck.teachers.live import LiveTeacher
from tests.helpers import runs
from tests.helpers.tiny import config, projection, student, teacher, tokenizer
from tests.helpers.tokenizers import TEXTS

NAMES = ["other", "same"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 160, "sequence_length_round": 4}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 160}},
}


def collator(teachers: list[Any], names: list[str | None] | None = None) -> CrossTokenizerCollator:
    return CrossTokenizerCollator(
        student_tokenizer=tokenizer(300),
        teacher_tokenizer=teachers,
        ctx_length_student=128,
        ctx_length_teacher=128,
        append_eos=True,
        chunks_as="layout",
        teacher_names=names or [],
    )


def records(routes: list[str | None]) -> list[Any]:
    return [{"text": TEXTS[i], "idx": i, "loss_multiplier": 1.0, "teacher": r} for i, r in enumerate(routes)]


class Counting(LiveTeacher):
    """Keeps the rows that its model reads."""

    def __init__(self, policy: Policy, **more: Any) -> None:
        super().__init__(policy, **more)
        self.rows: list[int] = []
        forward = policy.forward_hidden

        def counted(inputs: Any) -> Any:
            packed = inputs.document_ids
            self.rows.append(len(inputs.input_ids) if packed is None else int(packed.max()) + 1)
            return forward(inputs)

        policy.forward_hidden = counted  # type: ignore[method-assign]


class Pair:
    """A student and two teachers, one with its tokenizer, in one layout."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self.student = student(**layout)
        same = Policy(config(), tokenizer(300), name="teacher", device="cpu", seed=7, init_optimizer=False)
        self.policies = [teacher(), same]
        self.tokenizers, self.projections = [tokenizer(340), None], [projection(), None]

    def loss(self, chosen: list[int], batch: Any, **settings: Any) -> tuple[float, list[Counting]]:
        """Of a batch that was collated for these teachers."""
        kept = {"mode": "boundary_kl", "ce_loss_scale": 0.0, "gate": "none", "block_rows": 7, **settings}
        loss_fn = CrossTokenizerDistillationLossFn(kept, projections=[self.projections[i] for i in chosen])
        before = [self.policies[i].forward_hidden for i in chosen]
        asked = [Counting(self.policies[i], number=n) for n, i in enumerate(chosen)]
        result = evaluate(self.student, [StepInput(batch, loss_fn, asked)], micro_batch_size=2)
        for i, forward in zip(chosen, before, strict=True):
            self.policies[i].forward_hidden = forward  # type: ignore[method-assign]
        return float(result.loss), asked


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(LAYOUTS[request.param])


@settings(max_examples=3, deadline=None)
@given(routes=st.lists(st.sampled_from([None, *NAMES]), min_size=len(TEXTS), max_size=len(TEXTS)))
@pytest.mark.parametrize("scoring", ["static", "ce"])
def test_a_routed_batch_is_the_sum_of_what_each_teacher_says_of_its_own_rows(
    pair: Pair, scoring: str, routes: list[str | None]
) -> None:
    if scoring == "ce":  # where every row has one teacher, that one has all of the row's weight
        routes = [route or NAMES[0] for route in routes]
    whole, asked = pair.loss([0, 1], collator(pair.tokenizers, list(NAMES))(records(routes)), teacher_scoring=scoring)
    expected = 0.0
    for i, name in enumerate(NAMES):
        own = [record for record, route in zip(records(routes), routes, strict=True) if route in (None, name)]
        if own:
            alone, _ = pair.loss([i], collator([pair.tokenizers[i]])(own))
            expected += (0.5 if scoring == "static" else 1.0) * alone
        # none but its own rows pass through its model; a micro-batch without any has one that counts for nothing
        assert sum(asked[i].rows) <= len(own) + sum(size == 1 for size in asked[i].rows)
    assert whole == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_names_that_choose_nothing_change_nothing() -> None:
    plain = collator([tokenizer(340), None])(records([None] * len(TEXTS)))
    for made in (collator([tokenizer(340), None], list(NAMES)), collator([tokenizer(340), None])):
        batch = made(records([None] * len(TEXTS)))
        assert batch.keys() == plain.keys()
        assert all(torch.equal(batch[k], plain[k]) for k in plain if isinstance(plain[k], torch.Tensor))


def test_a_teacher_that_is_not_asked_has_neither_tokens_nor_chunks_nor_a_say_in_the_length() -> None:
    made = collator([tokenizer(340), tokenizer(340)], list(NAMES))
    assert made.teachers[1] is not None
    made.teachers[1].ctx_length = 4
    batch = made(records(["other", "same"]))
    assert batch["teacher_1_input_lengths"].tolist() == [0, 4]
    assert batch["teacher_0_input_lengths"].tolist()[1] == 0
    assert batch["teacher_0_sample_mask"].tolist() == [1.0, 0.0]
    assert batch["chunks_0"].chunks_B.tolist()[1] == batch["chunks_1"].chunks_B.tolist()[0] == 0
    assert int(batch["input_lengths"][0]) > int(batch["input_lengths"][1])
    assert "truncated" not in batch["skipped"][0]


def test_what_the_student_writes_is_read_by_its_records_teacher_alone() -> None:
    made = ContinuationCollator(
        collator([tokenizer(340), None], list(NAMES)), prompt_tokens=8, max_new_tokens=24, compare_stops=True
    )
    prompts, _ = made.prompts(records(["other", "same", None]))
    ids = tokenizer(300)(" and so on", add_special_tokens=False)["input_ids"]
    batch = made.batch([Continuation(prompt, torch.tensor(ids).numpy(), ended=False) for prompt in prompts])
    assert batch["teacher_0_sample_mask"].tolist() == [1.0, 0.0, 1.0]
    assert batch["teacher_1_sample_mask"].tolist() == [0.0, 1.0, 1.0]
    assert batch["teacher_0_input_lengths"].tolist()[1] == 0
    assert [n > 0 for n in batch["chunks_0"].chunks_B.tolist()] == [True, False, True]


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(DataError):
        collator([tokenizer(340), None], list(NAMES))(records(["nobody"]))


# -- whole runs --------------------------------------------------------------------------------------------------------


def routed_run(folder: Path, routes: list[str | None], names: list[str | None] | None = None) -> dict[str, Any]:
    runs.write_tokenizers(folder)
    runs.write_data(folder)
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    lines = [
        json.dumps({"text": text, **({} if (r := routes[i % len(routes)]) is None else {"teacher": r})})
        for i, text in enumerate(texts)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    values = runs.settings(folder, folder / "run")
    del values["teacher"]
    two = [runs.model(folder, "teacher"), runs.model(folder, "student")]
    values["teachers"] = [
        section | ({} if name is None else {"name": name}) for section, name in zip(two, names or NAMES, strict=True)
    ]
    values["data"]["max_teacher_seq_length"] = [64, 64]
    values["distillation"] |= {"max_num_steps": 2, "val_period": 0, "val_at_start": False, "val_at_end": False}
    values["checkpointing"] |= {"metric_name": None}
    return values


def test_a_run_takes_each_records_teacher(tmp_path: Path) -> None:
    resolve_and_run(routed_run(tmp_path, ["other", "same", None]))
    rows = runs.rows(tmp_path / "run")
    # a step has the rows that it happens to have, but not every step has none of one teacher's
    for number in range(2):
        assert any(row.get(f"train/teacher_{number}/kl_loss", 0.0) > 0 for row in rows)


@pytest.mark.parametrize(
    ("routes", "change"),
    [
        (["other", "nobody"], {}),
        ([None], {"names": ["one", "one"]}),
        ([None], {"names": [None, None], "data": {"teacher_key": "by"}}),
        ([None], {"data": {"teacher_key": None}}),
        ([None], {"loss_fn": {"teacher_combination": "averaged_logits"}}),
    ],
    ids=["unknown", "twice", "no names", "no key", "averaged"],
)
def test_routes_that_cannot_be_are_refused_before_the_first_step(
    tmp_path: Path, routes: list[str | None], change: dict[str, Any]
) -> None:
    values = routed_run(tmp_path, routes, change.pop("names", None))
    for section, keys in change.items():
        values[section] |= keys
    with pytest.raises((ConfigError, DataError)):
        resolve_and_run(values)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not runs.rows(tmp_path / "run")
