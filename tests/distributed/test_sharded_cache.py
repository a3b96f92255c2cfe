"""``limbeck cache`` with a teacher that is split over processes: each stores its own records, all compute together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limbeck.algorithms.caching import cache_teachers
from limbeck.algorithms.config import MasterConfig
from limbeck.config import load_config, resolve
from limbeck.teachers.cache import CacheReader
from tests.distributed.cases import together
from tests.helpers import runs

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, list[str]] = {
    "tensor": ["tensor_parallel_size=2"],
    "fsdp": ["fsdp=true"],
    "context": ["context_parallel_size=2"],
}


def fill(rank: int, world: int, path: str, names: list[str], kind: str) -> list[dict[str, Any]]:
    out = []
    for name in names:
        overrides = [f"teacher.dtensor_cfg.{setting}" for setting in LAYOUTS.get(name, [])]
        overrides += [f"teacher.cache={Path(path).parent / name}", f"teacher.cache_kind={kind}"]
        out += cache_teachers(resolve(MasterConfig, load_config(Path(path), overrides)), say=lambda line: None)
    return out


@pytest.mark.parametrize(("kind", "names"), [("topk", list(LAYOUTS)), ("hidden", ["tensor"])])
def test_the_cache_of_one_process(tmp_path: Path, kind: str, names: list[str]) -> None:
    path = runs.write_run(
        tmp_path, teacher={"cache_k": 16}, distillation={"num_prompts_per_step": 4, "val_batch_size": 10}
    )
    # ranks of 11 and 10 records: one has a batch more
    records = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(records[:21]))
    (alone,) = fill(0, 1, str(path), ["alone"], kind)
    assert alone["documents"] == 21
    told = together(2, fill, tmp_path / "ranks", str(path), [*names, names[0]], kind)
    for documents, rank in zip((11, 10), told, strict=True):
        assert [cache["documents"] for cache in rank] == [documents] * (len(names) + 1)
    one = CacheReader(tmp_path / "alone")
    for name in names:
        other = CacheReader(tmp_path / name, model_identity=one.spec.model_identity)
        assert set(other.keys()) == set(one.keys())
        for key in list(one.keys()):
            found, expected = other._read(key), one._read(key)
            assert set(found) == set(expected)
            for what in ("next_logprob", "logsumexp"):
                np.testing.assert_allclose(found[what], expected[what], atol=1e-5)
            if kind == "topk":
                np.testing.assert_allclose(found["topk_logprobs"], expected["topk_logprobs"], atol=4e-3)
    assert kind == "topk" or (tmp_path / "tensor" / "head.safetensors").is_file()
