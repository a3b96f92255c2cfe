"""Processes that sample ahead take the steps of one that does, and pay for each row once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms.build import load_datasets, load_tokenizers
from limbeck.algorithms.dispatch import resolve_run
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher
from tests.distributed.cases import together
from tests.helpers.runs import rows, settings, write_data, write_tokenizers
from tests.helpers.servers import ScoringServer, WritingServer, serving, writing
from tests.helpers.tiny import tokenizer
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.slow

STEPS, PER_STEP = 4, 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "shards": {"fsdp": True},
    "tensor": {"tensor_parallel_size": 2},
}


def whole_run(folder: str, name: str, layout: dict[str, Any], engine: str, scorer: str) -> dict[str, Any]:
    """A run that samples ahead: of each step its loss and what this process learnt from."""
    where = Path(folder)
    values = settings(where, where / name, policy={"dtensor_cfg": layout})
    loop = {"num_prompts_per_step": PER_STEP, "max_num_steps": STEPS, "val_at_start": False, "val_at_end": False}
    values["distillation"] |= {**loop, "val_period": 0}
    values["checkpointing"]["enabled"] = False
    values["teacher"] = {
        "tokenizer": values["teacher"]["tokenizer"],
        "server": {"url": scorer, "k": 16, "retries": 0, "timeout": WAIT_SECONDS},
    }
    values["on_policy"] = {
        "max_new_tokens": 16,
        "prompt_tokens": 5,
        "policy_gradient": {},
        "overlap": 1,
        "engine": {
            "server": {"url": engine, "retries": 0, "timeout": WAIT_SECONDS},
            "weights": str(where / f"{name}_weights"),
            "max_gap": None,
        },
    }
    config: Any = resolve_run({**values, "algorithm": "on_policy_distillation", "cluster": {"backend": "gloo"}})[0]
    parts = on_policy.setup(config, *load_tokenizers(config), *load_datasets(config))
    learnt: list[dict[int, list[int]]] = []

    class Loop(on_policy.OnPolicyLoop):
        def step_inputs(self, batch: Any, rollout: Any) -> Any:
            written = zip(rollout.batch["idx"], rollout.samples, strict=True)
            learnt.append({idx: sample.ids_T.tolist() for idx, sample in written})
            return super().step_inputs(batch, rollout)

    Loop(parts).train()
    told = rows(where / name) if parts.student.dims.data.rank == 0 else []
    return {"learnt": learnt, "rows": [{k: float(v) for k, v in row.items()} for row in told]}


def work(rank: int, world: int, folder: str, layout: str, engine: str, scorer: str) -> dict[str, Any]:
    return whole_run(folder, layout, LAYOUTS[layout], engine, scorer)


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_data(tmp_path, train=40)
    write_tokenizers(tmp_path)
    config: Any = resolve_run(settings(tmp_path, tmp_path / "none"))[0]
    asked: list[int] = []

    def rows_asked(scorer: ScoringServer) -> int:
        return sum(len(body["prompt"]) for body in scorer.requests if isinstance(body["prompt"], list))

    with serving(ScoringServer(live_teacher(config, 0, tokenizer(340)))) as scorer:
        for layout in (None, *LAYOUTS):
            before = len(asked)
            with writing(WritingServer()) as engine:

                def first(body: dict[str, Any], before: int = before) -> None:
                    if len(asked) == before:
                        asked.append(rows_asked(scorer))

                engine.before = first
                where = str(tmp_path), engine.url, scorer.url
                if layout is None:
                    alone = whole_run(where[0], "one", {}, *where[1:])
                else:
                    one, two = together(2, work, tmp_path / layout, where[0], layout, *where[1:])
            assert engine.version == STEPS - 1
            assert len(engine.asked) == PER_STEP * STEPS
            # also of rows that have moved to the other process
            assert rows_asked(scorer) - asked[-1] == PER_STEP * STEPS
            if layout is None:
                continue
            for name in ("train/loss", "train/grad_norm", "train/sample/length", "train/sample/staleness"):
                expected = [row[name] for row in alone["rows"]]
                assert [row[name] for row in one["rows"]] == pytest.approx(expected, rel=1e-3, abs=1e-5)
            for step in range(STEPS):
                mine, others = one["learnt"][step], two["learnt"][step]
                assert mine | others == alone["learnt"][step]
                assert (mine == others) if layout == "tensor" else not mine.keys() & others.keys()
            sizes = {len(found["learnt"][step]) for found in (one, two) for step in range(STEPS)}
            # some rows have moved, or nothing is said about them
            assert sizes == {PER_STEP} if layout == "tensor" else sizes != {PER_STEP // 2}
