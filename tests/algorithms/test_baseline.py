"""What a run says before its first step: how good the teacher is, and whether texts begin as the models expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import build, validation, xtoken_off_policy_distillation
from limbeck.algorithms.validation import compared_bits
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.evaluation.bos import BosBits, bos_bits
from limbeck.models.policy import Policy
from limbeck.tokens import ByteTokenizer
from tests.helpers import runs, tiny
from tests.helpers.tokenizers import TEXTS, trained_bpe


def test_student_and_teachers_stand_beside_each_other() -> None:
    assert compared_bits({"bpb": 1.5, "teacher_bpb": 1.2}) == "1.5000 bits per byte, teacher 1.2000"
    worse = compared_bits({"bpb": 1.5, "teacher_bpb": 1.8})
    assert worse.splitlines()[1].startswith("warning: the teacher is worse than the student")
    several = compared_bits({"bpb": 1.5, "teacher_0_bpb": 1.2, "teacher_1_bpb": 1.8, "teacher_bpb": 1.2})
    assert "teacher 1.2000, teacher 1.8000" in several
    assert "warning: teacher 1 is worse" in several
    assert "warning" not in compared_bits({"bpb": 1.5})
    assert "warning" not in compared_bits({"bpb": 1.61670, "teacher_bpb": 1.61672})
    reached = compared_bits({"bpb": 1.5, "teacher_bpb": 1.2, "teacher_0/uncovered_mass": 0.231})
    assert reached == "1.5000 bits per byte, teacher 1.2000, 23.1% of its probability not covered by the loss"


def test_a_run_without_validation_compares_on_its_first_records(tmp_path: Path) -> None:
    run_file = runs.write_run(tmp_path, distillation={"max_num_steps": 1})
    code, _, err = runs.limbeck("train", run_file, "-q")
    assert code == 0, err
    assert "on the first 8 training records: " in err
    assert "teacher" in err


def test_a_run_that_starts_again_does_not_compare_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    scored: list[int] = []
    evaluate = validation.evaluate
    monkeypatch.setattr(validation, "evaluate", lambda *args, **more: scored.append(1) or evaluate(*args, **more))
    said = []
    for number, seed in enumerate((1, 1, 2)):
        run_file = runs.write_run(tmp_path / str(number), distillation={"max_num_steps": 1, "seed": seed})
        code, _, err = runs.limbeck("train", run_file, "-q")
        assert code == 0, err
        said.append(next(line for line in err.splitlines() if "bits per byte" in line))
    assert said[0] == said[1] != said[2]
    assert len(scored) == 2


def test_on_a_cpu_the_comparison_takes_as_many_records_as_it_may_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xtoken_off_policy_distillation, "WORK_AHEAD", 0.0)
    run_file = runs.write_run(tmp_path, distillation={"max_num_steps": 1})
    code, _, err = runs.limbeck("train", run_file, "-q")
    assert code == 0, err
    assert "on the first training record: " in err


def test_nothing_is_compiled_for_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "fit_to_device", lambda cfg, device: (cfg, []))  # a CPU would leave compilation out
    events: list[str] = []
    compile_layer, look = torch.nn.Module.compile, xtoken_off_policy_distillation.OffPolicyLoop.log_baseline

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        events.append("compiled")
        return graph.forward

    def looking(self: Any) -> None:
        look(self)
        events.append("looked")

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: compile_layer(self, backend=backend))
    monkeypatch.setattr(xtoken_off_policy_distillation.OffPolicyLoop, "log_baseline", looking)
    run_file = runs.write_run(tmp_path, policy={"compile": True}, distillation={"max_num_steps": 1})
    code, _, err = runs.limbeck("train", run_file, "-q")
    assert code == 0, err
    assert "on the first 8 training records: " in err
    assert events[:2] == ["looked", "compiled"]


def test_a_model_is_asked_once_how_texts_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path))
    tokenizer = ByteTokenizer.of(trained_bpe(TEXTS, 300, specials=["<s>"], bos_token="<s>"))
    asked: list[int] = []
    scored = Policy.get_logprobs

    def counted(self: Policy, data: BatchedDataDict, **more: Any) -> BatchedDataDict:
        asked.append(data.size)
        return scored(self, data, **more)

    monkeypatch.setattr(Policy, "get_logprobs", counted)
    first = bos_bits(tiny.student(), tokenizer)
    assert bos_bits(tiny.student(), tokenizer) == first
    assert len(asked) == 1
    bos_bits(tiny.student(seed=5), tokenizer)
    assert len(asked) == 2
    for path in tmp_path.rglob("*.json"):
        path.write_text('{"behind": "a"}', encoding="utf-8")
    assert bos_bits(tiny.student(), tokenizer) == first
    assert len(asked) == 3


class _Expects:
    """A model that is lost without its BOS token, or with it."""

    vocab_size, name = 300, "stand-in"

    def __init__(self, begin: int, wanted: bool) -> None:
        self.begin, self.wanted = begin, wanted

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        ids = data["input_ids"]
        right = (ids[:, :1] == self.begin) == self.wanted
        return BatchedDataDict({"logprobs": torch.where(right, -1.0, -5.0).expand(ids.shape)})


@pytest.mark.parametrize("wanted", [True, False])
def test_the_probe_tells_what_a_model_expects(wanted: bool) -> None:
    tokenizer = ByteTokenizer.of(trained_bpe(TEXTS, 300, specials=["<s>"], bos_token="<s>"))
    assert tokenizer.bos_id is not None
    bits = bos_bits(_Expects(tokenizer.bos_id, wanted), tokenizer)
    assert bits is not None
    assert bits.expected is wanted
    assert max(bits.behind, bits.without) == pytest.approx(5 * min(bits.behind, bits.without))
    assert bos_bits(_Expects(0, True), ByteTokenizer.of(tiny.tokenizer(300))) is None
    assert BosBits(1.0, 1.01).expected is None


def test_a_wrong_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.write_tokenizers(tmp_path)
    config: Any = runs.resolved(runs.settings(tmp_path, tmp_path / "run", teacher={"init": "random"}))
    config.policy.init = "pretrained"
    monkeypatch.setattr(validation, "bos_bits", lambda policy, tokenizer: BosBits(1.7, 5.2))
    (warning,) = validation.check_bos(tiny.student(), [], config.model_copy(update={"teacher": None}))
    assert warning.endswith("set policy.tokenizer.bos=true")
    assert "1.70 bits per byte behind the BOS token, 5.20 without" in warning
    config.policy.init = "random"
    assert validation.check_bos(tiny.student(), [], config.model_copy(update={"teacher": None})) == []
