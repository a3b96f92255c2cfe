"""Two processes write and learn what one does, and one without a prompt holds nobody up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms.build import load_datasets, load_tokenizers
from limbeck.algorithms.dispatch import resolve_run
from limbeck.algorithms.rollouts import StepData
from tests.distributed.cases import together
from tests.helpers.runs import settings, write_data, write_tokenizers

pytestmark = pytest.mark.slow


def steps(folder: str, name: str, layout: dict[str, Any], silent: int | None = None) -> dict[str, Any]:
    """Two steps of a run; ``silent``: the rank that has no prompt in the second."""
    where = Path(folder)
    values = settings(where, where / name, policy={"dtensor_cfg": layout})
    values["checkpointing"]["enabled"] = False
    values["on_policy"] = {"max_new_tokens": 6, "prompt_tokens": 5, "fraction": 0.75, "policy_gradient": {}}
    config: Any = resolve_run({**values, "algorithm": "on_policy_distillation", "cluster": {"backend": "gloo"}})[0]
    parts = on_policy.setup(config, *load_tokenizers(config), *load_datasets(config))
    loop, batches = on_policy.OnPolicyLoop(parts), iter(parts.loader)
    out: dict[str, Any] = {"losses": [], "tokens": [], "written": []}
    for number in range(2):
        batch = next(batches)
        if number == 1 and silent == parts.student.dims.data.rank:
            batch = StepData([], batch.stored, Counter())
        result = loop.train_step(batch)
        parts.state["total_steps"] += 1
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
    assert second["silent"]["written"][1] == {}
    assert first["silent"]["written"][1] == first["shards"]["written"][1]
    assert first["silent"]["losses"] == second["silent"]["losses"]
