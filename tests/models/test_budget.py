"""Batches that nobody has chosen: the same numbers under every budget, also where memory runs out on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data.microbatch import plan_microbatches
from limbeck.distributed.comm import Comm
from limbeck.distributed.planner import Layout, MeshShape, ModelShape, Workload
from limbeck.errors import ConfigError
from limbeck.losses.preference import PreferenceLossFn
from limbeck.models import budget as budgets
from limbeck.models import trainer
from limbeck.models.budget import Budget, Measured, ran_out, settled
from limbeck.models.policy import Policy
from limbeck.models.trainer import StepInput
from limbeck.teachers.live import LiveTeacher
from tests.helpers.tiny import batch, loss_fn, student, teacher

SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}
FOUND = {"train_micro_batch_size": None, "logprob_batch_size": None, "optimizer": SGD}
NO_ROOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def found_student(tokens: int | None = None, *, packed: bool = False, **more: Any) -> Policy:
    """A student that finds its own batches, within so many tokens."""
    policy = student(**{**FOUND, **more})
    if tokens is not None:
        policy.budget._found = {True: tokens, False: tokens}
    if packed:
        policy.unpacked = ""
    return policy


def found_teacher(tokens: int | None = None, *, packed: bool = False) -> Policy:
    policy = teacher(train_micro_batch_size=None, logprob_batch_size=None)
    if tokens is not None:
        policy.budget._found = {False: tokens}
    if packed:
        policy.unpacked = ""
    return policy


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    # other sums of float32, a step long
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-6), name


def two_steps(policy: Policy, taught: Policy) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    loss = loss_fn()
    results = [policy.train(batch(), loss, teachers=[LiveTeacher(taught)]) for _ in range(2)]
    return results, weights(policy)


@pytest.fixture(scope="module")
def expected() -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Two steps of which each is one micro-batch."""
    return two_steps(student(optimizer=SGD, train_micro_batch_size=99), teacher())


@settings(max_examples=8, deadline=None)
@given(own=st.integers(1, 400), theirs=st.integers(1, 400), packed=st.booleans())
def test_the_same_numbers_under_every_budget(expected: Any, own: int, theirs: int, packed: bool) -> None:
    results, after = two_steps(found_student(own, packed=packed), found_teacher(theirs, packed=packed))
    for result, wanted in zip(results, expected[0], strict=True):
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert result["tokens"] == wanted["tokens"]
        for name, pair in wanted["metrics"].items():
            assert result["metrics"][name] == pytest.approx(pair, rel=1e-5, abs=1e-6), name
    same(after, expected[1])


@settings(max_examples=30, deadline=None)
@given(own=st.integers(1, 200), theirs=st.integers(1, 200), packed=st.booleans(), together=st.sampled_from([1, 2]))
def test_a_budget_is_kept_and_a_longer_row_goes_alone(own: int, theirs: int, packed: bool, together: int) -> None:
    data = batch()
    data = data.select_indices(list(range(data.size // 2 * 2)))
    cfg = settled(student().cfg, data, {"": own, "teacher_": theirs}, packed=packed, rounding=1)
    plan = plan_microbatches(data, cfg, 1, group_size=together, longer_alone=True)
    assert sorted(row for items in plan for row in items) == list(range(data.size))
    for items in plan:
        for key, room in (("input_lengths", own), ("teacher_input_lengths", theirs)):
            rows = data[key][items]
            size = int(rows.sum()) if packed else len(rows) * int(rows.max())
            assert size <= room or len(items) == together


# ---- memory runs out -------------------------------------------------------------------------------------------------


class Tight:
    """A machine without room for passes of more than ``most`` tokens, which shows at one point of a micro-batch."""

    def __init__(self, policy: Policy, taught: Policy, point: str, most: int) -> None:
        self.point, self.most, self.failed = point, most, 0
        real = {model: model.forward_hidden for model in (policy, taught)}

        def student_forward(inputs: Any) -> torch.Tensor:
            hidden = real[policy](inputs)
            if point == "student forward":
                self.check(inputs)
            elif point == "loss's own backward" and hidden.requires_grad:
                hidden.register_hook(lambda grad: self.check(inputs))
            return hidden

        def teacher_forward(inputs: Any) -> torch.Tensor:
            if point == "teacher forward":
                self.check(inputs)
            return real[taught](inputs)

        policy.forward_hidden, taught.forward_hidden = student_forward, teacher_forward  # type: ignore[method-assign]
        if point == "backward":
            # the head and the last layer have their gradients by then, the first layer and the embedding do not
            policy.body.layers[1].register_full_backward_hook(self._on_layer)

    def _on_layer(self, module: Any, before: Any, after: Any) -> None:
        self._refuse(after[0].shape[0] * after[0].shape[1])

    def check(self, inputs: Any) -> None:
        self._refuse(inputs.input_ids.numel())

    def _refuse(self, tokens: int) -> None:
        if tokens > self.most:
            self.failed += 1
            raise torch.OutOfMemoryError(NO_ROOM)


POINTS = ("teacher forward", "student forward", "loss's own backward", "backward")


@pytest.mark.parametrize("packed", [False, True], ids=["by length", "packed"])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_whose_memory_runs_out_ends_with_the_same_weights(
    expected: Any, point: str, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, taught = found_student(400, packed=packed), found_teacher(400, packed=packed)
    tight = Tight(policy, taught, point, 100)
    results, after = two_steps(policy, taught)
    assert tight.failed > 0
    same(after, expected[1])
    for result, wanted in zip(results, expected[0], strict=True):
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert result["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert result["metrics"].keys() == wanted["metrics"].keys()
        assert result["tokens"] == wanted["tokens"]
    whose = taught if point == "teacher forward" else policy
    assert whose.budget.tokens(point != "teacher forward") <= 100
    assert whose.name in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Full backward hook")
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_memory_may_run_out_anywhere_and_as_often_as_it_likes(expected: Any, data: st.DataObject) -> None:
    policy, taught = found_student(400, packed=data.draw(st.booleans())), found_teacher(400)
    left = data.draw(st.integers(1, 4))

    def strike(module: Any, *_: Any) -> None:
        nonlocal left
        if left and data.draw(st.integers(0, 6)) == 0:
            left -= 1
            raise torch.OutOfMemoryError(NO_ROOM)

    for module in (*policy.body.modules(), *taught.body.modules()):
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(strike)
            module.register_full_backward_hook(strike)
    try:
        _, after = two_steps(policy, taught)
    except ConfigError as error:
        assert "a single row" in str(error)  # noqa: PT017
        return
    same(after, expected[1])


def test_pairs_stay_together_where_memory_runs_out() -> None:
    def step(policy: Policy) -> dict[str, torch.Tensor]:
        rows = batch(cross=False)
        pairs = rows.select_indices(list(range(rows.size // 2 * 2)))
        pairs["pair_side"] = torch.tensor([1.0, -1.0] * (pairs.size // 2))
        pairs["pair_weight"] = torch.ones(pairs.size)
        pairs["reference_logprobs"] = torch.zeros(pairs.size, dtype=torch.float64)
        assert policy.trainer is not None
        policy.trainer.step([StepInput(pairs, PreferenceLossFn(), group_size=2)])
        return weights(policy)

    policy = found_student(400)
    tight = Tight(policy, teacher(), "student forward", 130)
    found = step(policy)
    assert tight.failed > 0
    same(found, step(student(optimizer=SGD, train_micro_batch_size=99)))


def test_a_row_without_room_says_what_to_do() -> None:
    policy, taught = found_student(400), found_teacher()
    Tight(policy, taught, "student forward", 3)
    before = weights(policy)
    with pytest.raises(ConfigError, match="max_total_sequence_length"):
        policy.train(batch(), loss_fn(), teachers=[LiveTeacher(taught)])
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())


def test_rows_that_are_named_stay_what_they_are() -> None:
    policy, taught = student(), teacher()
    Tight(policy, taught, "student forward", 3)
    with pytest.raises(torch.OutOfMemoryError):
        policy.train(batch(), loss_fn(), teachers=[LiveTeacher(taught)])


def test_other_errors_are_not_taken_for_it() -> None:
    policy, taught = found_student(), found_teacher()

    def broken(inputs: Any) -> torch.Tensor:
        raise RuntimeError("shape mismatch")

    policy.forward_hidden = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shape mismatch"):
        policy.train(batch(), loss_fn(), teachers=[LiveTeacher(taught)])
    assert ran_out(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"))
    assert ran_out(MemoryError())


@pytest.mark.parametrize("prefix", ["", "teacher_"])
@pytest.mark.parametrize("most", [None, 130])
def test_scores_are_the_same_under_every_budget(prefix: str, most: int | None) -> None:
    policy = found_student(200) if not prefix else found_teacher(200)
    tight = None if most is None else Tight(policy, policy, "teacher forward", most)
    scorer = student() if not prefix else teacher()
    found, wanted = (model.get_logprobs(batch(), prefix=prefix)["logprobs"] for model in (policy, scorer))
    assert torch.allclose(found, wanted, atol=1e-6)
    hidden, plain = (model.get_hidden(batch(), prefix=prefix) for model in (policy, scorer))
    assert torch.allclose(hidden, plain, atol=1e-6)
    assert tight is None or tight.failed > 0


# ---- how much -------------------------------------------------------------------------------------------------------


SHAPE = ModelShape(parameters=135_000_000, layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64,
                   vocab=49_152, tied=True)  # fmt: skip


def made(room: float, held: float, monkeypatch: pytest.MonkeyPatch, device: str = "cuda", **more: Any) -> Budget:
    monkeypatch.setattr(budgets, "memory_room", lambda device: (int(room * 2**30), int(held * 2**30)))
    work = Workload(SHAPE, kernels=device == "cuda", compute_bytes=2, **more)
    return Budget(work, Layout(MeshShape(), False), torch.device(device), Comm.alone())


def test_a_large_device_is_filled_and_a_small_one_is_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(139, 4, monkeypatch).tokens(True) == budgets.FULL["cuda"]
    assert made(139, 4, monkeypatch).tokens(False) == 2 * budgets.FULL["cuda"]
    small = [made(room, 4, monkeypatch).tokens(True) for room in (8, 12, 24)]
    assert budgets.LEAST <= small[0] < small[1] < small[2] <= budgets.FULL["cuda"]
    assert made(2, 4, monkeypatch).tokens(True) == budgets.LEAST
    assert made(24, 4, monkeypatch, "cpu").tokens(True) == budgets.FULL["cpu"]


def test_steps_that_were_measured_correct_the_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    one = 2**30
    crowded = made(24, 4, monkeypatch)
    before = crowded.tokens(True)
    assert crowded.learn(Measured(4 * one, 23 * one, one // 2, before, 3)) == (before, crowded.tokens(True))
    assert crowded.tokens(True) < before
    cautious = made(12, 4, monkeypatch)
    before = cautious.tokens(True)
    cautious.learn(Measured(4 * one, 5 * one, one // 2, before, 3))
    assert before < cautious.tokens(True) <= budgets.FULL["cuda"]
    # a step of a single pass needs no larger one
    single = made(12, 4, monkeypatch)
    before = single.tokens(True)
    assert single.learn(Measured(4 * one, 5 * one, one // 2, before // 2, 1)) is None
    assert single.tokens(True) == before


def test_what_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = made(139, 4, monkeypatch)
    assert budget.lower(True, 8_000) == 3_072
    assert budget.learn(Measured(0, 2**20, 0, 3_072, 9)) is None
    assert budget.tokens(True) == 3_072


def test_a_resumed_run_goes_on_with_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(139, 4, monkeypatch, "cpu")
    first.lower(True, 1_024)
    second = made(2, 4, monkeypatch, "cpu")
    second.restore(first.state())
    assert second.tokens(True) == first.tokens(True) == 512
    assert second.state() == first.state()
    elsewhere = made(139, 4, monkeypatch, "cpu")
    elsewhere.restore({**first.state(), "memory": 1})
    assert elsewhere.tokens(True) == budgets.FULL["cpu"]
    elsewhere.restore({})


def test_the_second_and_third_step_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    policy, taught, loss = found_student(), LiveTeacher(found_teacher()), loss_fn()
    monkeypatch.setattr(trainer, "memory_peak", lambda device: 1 << 60)
    for step in range(4):
        policy.train(batch(), loss, teachers=[taught])
        assert policy.budget.steps == min(step, 2)
    assert policy.budget.tokens(True) == budgets.LEAST
    assert "what a step took" in capsys.readouterr().err
