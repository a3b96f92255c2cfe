"""Two processes write and learn what one does, and one without a prompt takes some of the other's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms.build import load_datasets, load_tokenizers
from limbeck.algorithms.dispatch import resolve_run
from limbeck.algorithms.rollouts import StepData, Written, balanced
from limbeck.data.continuations import ContinuationCollator
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.distributed.comm import Comm
from limbeck.models.generate import Sample
from limbeck.utils.metrics import Metrics
from tests.distributed.cases import together
from tests.helpers.runs import settings, write_data, write_tokenizers
from tests.helpers.tokenizers import TEXTS, tiny

pytestmark = pytest.mark.slow


def steps(
    folder: str, name: str, layout: dict[str, Any], silent: int | None = None, credit: str = "chunk"
) -> dict[str, Any]:
    """Two steps of a run; ``silent``: the rank that has no prompt in the second."""
    where = Path(folder)
    values = settings(where, where / name, policy={"dtensor_cfg": layout})
    values["checkpointing"]["enabled"] = False
    values["on_policy"] = {
        "max_new_tokens": 6,
        "prompt_tokens": 5,
        "fraction": 0.75,
        "policy_gradient": {"credit": credit},
    }
    config: Any = resolve_run({**values, "algorithm": "on_policy_distillation", "cluster": {"backend": "gloo"}})[0]
    parts = on_policy.setup(config, *load_tokenizers(config), *load_datasets(config))
    loop, batches = on_policy.OnPolicyLoop(parts), iter(parts.loader)
    out: dict[str, Any] = {"losses": [], "tokens": [], "written": []}
    for number in range(2):
        batch = next(batches)
        if number == 1 and silent == parts.student.dims.data.rank:
            batch = StepData([], batch.stored, Counter())
        result = loop.train_step(batch)
        parts.state.total_steps += 1
        assert loop.rollout is not None
        out["losses"].append(result["loss"])
        out["tokens"].append(result["metrics"]["sample/length"])
        rows = zip(loop.rollout.batch["idx"], loop.rollout.samples, strict=True)
        out["written"].append({idx: sample.ids_T.tolist() for idx, sample in rows})
    parts.logger.close()
    return out


def work(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {
        "data": steps(folder, "two", {}),
        "shards": steps(folder, "shards", {"fsdp": True}),
        "silent": steps(folder, "silent", {"fsdp": True}, silent=1),
        "tensor": steps(folder, "tensor", {"tensor_parallel_size": 2}),
        "context": steps(folder, "context", {"context_parallel_size": 2}),
        "answers": steps(folder, "answers", {"context_parallel_size": 2}, credit="answer"),
    }


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_data(tmp_path)
    write_tokenizers(tmp_path)
    alone = steps(str(tmp_path), "one", {})
    first, second = together(2, work, tmp_path, str(tmp_path))
    for layout in ("data", "shards"):
        assert first[layout]["losses"] == second[layout]["losses"]
        assert first[layout]["losses"] == pytest.approx(alone["losses"], rel=1e-3, abs=1e-5)
        assert first[layout]["tokens"] == alone["tokens"]
        # each rank writes behind its own prompts, what one process would have written there
        for step in range(2):
            assert first[layout]["written"][step] | second[layout]["written"][step] == alone["written"][step]
            assert not first[layout]["written"][step].keys() & second[layout]["written"][step].keys()
    # ranks that share rows write the same, and what one process writes
    answers = steps(str(tmp_path), "one_answers", {}, credit="answer")
    for layout, expected in (("tensor", alone), ("context", alone), ("answers", answers)):
        for found in (first[layout], second[layout]):
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
            assert (found["tokens"], found["written"]) == (expected["tokens"], expected["written"])
    # one without prompts is handed some of the other's, unless there is one alone
    silent = [found["silent"]["written"][1] for found in (first, second)]
    assert silent[0]
    assert not silent[0].keys() & silent[1].keys()
    written = first["shards"]["written"][1] | second["shards"]["written"][1]
    assert (silent[0] | silent[1]).items() <= written.items()
    assert first["silent"]["losses"] == second["silent"]["losses"]


def level(rank: int, world: int) -> dict[str, Any]:
    """What a rank has after levelling: the first has written twelve answers, the second one."""
    student = tiny(300)
    collator = CrossTokenizerCollator(
        student_tokenizer=student, teacher_tokenizer=None, ctx_length_student=64, ctx_length_teacher=64
    )
    rows = ContinuationCollator(collator, prompt_tokens=4, max_new_tokens=8)
    records: list[Any] = [{"text": TEXTS[i % 6], "idx": 10 * rank + i} for i in range(1 if rank else 6)]
    prompts, _ = rows.prompts(records)
    samples = [
        Sample(i, torch.full((3 + i,), p.idx), torch.full((3 + i,), -float(p.idx)), copy == 1)
        for i, p in enumerate(prompts)
        for copy in range(1 if rank else 2)
    ]
    found = balanced(
        Written(prompts, samples, [float(prompts[s.prompt].idx) for s in samples], Metrics()), Comm.world()
    )
    for sample, reward in zip(found.samples, found.rewards, strict=True):
        # everything of a prompt stays together
        idx = found.prompts[sample.prompt].idx
        assert set(sample.ids_T.tolist()) == {idx}
        assert set(sample.log_probs_T.tolist()) == {-float(idx)}
        assert reward == idx
    lengths = [len(found.prompts[s.prompt].student) + len(s.ids_T) for s in found.samples]
    return {"idx": [p.idx for p in found.prompts], "samples": len(found.samples), "tokens": sum(lengths)}


def test_ranks_level_what_they_learn_from(tmp_path: Path) -> None:
    first, second = together(2, level, tmp_path)
    assert sorted(first["idx"] + second["idx"]) == [0, 1, 2, 3, 4, 5, 10]
    assert first["samples"] + second["samples"] == 13
    assert abs(first["tokens"] - second["tokens"]) <= 18
