"""A model in shards writes what it writes whole, and a rank without prompts holds nobody up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.policy import Policy
from tests.distributed.cases import together
from tests.helpers.tiny import LLAMA, config, tokenizer

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "tensor": {"tensor_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
PROMPTS = [torch.tensor([5, 9, 40]), torch.tensor([7])]
GREEDY, SAMPLED = SamplingConfig(max_new_tokens=5, temperature=0), SamplingConfig(max_new_tokens=5, top_p=0.9)


def model(layout: dict[str, Any]) -> Policy:
    made = Policy(config(LLAMA, dtensor_cfg=layout), tokenizer(300), device="cpu", seed=0)
    with torch.no_grad():
        for p in made.model.parameters():
            p.mul_(3)
    return made


def written(made: Policy, prompts: list[torch.Tensor], end: list[int]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, how in (("greedy", GREEDY), ("sampled", SAMPLED)):
        found = LocalSampler(made, how, end).sample(prompts, n=2, seed=3)
        out[name] = [(s.prompt, s.ids_T, s.log_probs_T, s.ended) for s in found]
    return out


def work(rank: int, world: int, end: int) -> dict[str, dict[str, Any]]:
    # the second rank of fsdp reads other rows, and has none
    return {
        name: written(model(layout), [] if name == "fsdp" and rank else PROMPTS, [end])
        for name, layout in LAYOUTS.items()
    }


def test_shards_write_what_the_whole_model_writes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = written(model({}), PROMPTS, [])
    end = int(plain["greedy"][0][1][2])
    expected = written(model({}), PROMPTS, [end])["greedy"]
    assert {ended for *_, ended in expected} == {True, False}
    first, second = together(2, work, tmp_path, end)
    assert second["fsdp"] == {"greedy": [], "sampled": []}
    for name in LAYOUTS:
        for found, known in zip(first[name]["greedy"], expected, strict=True):
            assert (found[0], found[1].tolist(), found[3]) == (known[0], known[1].tolist(), known[3])
            torch.testing.assert_close(found[2], known[2], atol=1e-5, rtol=1e-5)
        for _, ids, log_probs, ended in first[name]["sampled"]:
            assert len(ids) == len(log_probs) == 5 or ended
        assert len({tuple(ids.tolist()) for _, ids, *_ in first[name]["sampled"]}) == 4
    for name in ("tensor", "context"):
        for how in ("greedy", "sampled"):
            assert [s[1].tolist() for s in first[name][how]] == [s[1].tolist() for s in second[name][how]]
