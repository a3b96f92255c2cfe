"""The sampler in processes of a Ray cluster: the text of the sampler in this one, weights through the object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms.config import OnPolicyMasterConfig
from limbeck.algorithms.engine import EngineConfig
from limbeck.algorithms.on_policy_distillation import run
from limbeck.algorithms.ray_sampler import RaySampler
from limbeck.config import resolve
from limbeck.distributed.launch import launch
from limbeck.errors import ConfigError, LimbeckError
from limbeck.models.generate import LocalSampler, SamplingConfig
from limbeck.models.policy import Policy
from tests.helpers.ray_cluster import cluster, give_back
from tests.helpers.runs import rows, settings, write_data, write_tokenizers
from tests.helpers.tiny import LLAMA, config, tokenizer
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.slow
PROMPTS = [torch.tensor([5, 9, 40]), torch.tensor([7])]
SAMPLING = SamplingConfig(max_new_tokens=5, top_p=0.9)


@pytest.fixture(scope="module")
def three_cores() -> Iterator[Any]:
    with cluster(3) as ray:
        yield ray


@pytest.fixture(autouse=True)
def whole_cluster(three_cores: Any) -> Iterator[None]:
    yield
    give_back(three_cores, 3)


@pytest.fixture
def model(tmp_path: Path) -> Policy:
    tokenizer(300).save_pretrained(tmp_path / "tokenizer")
    own = config(LLAMA, tokenizer={"name": str(tmp_path / "tokenizer")})
    return Policy(own, tokenizer(300), name="student", device="cpu", seed=0)


def placed(**more: Any) -> RaySampler:
    engine = EngineConfig.model_validate({"ray": {"num_cpus": 1, **more}})
    return RaySampler(engine, SAMPLING, "auto", [299], patience=WAIT_SECONDS)


def test_it_writes_what_this_process_writes_also_with_new_weights(model: Policy) -> None:
    sampler = placed()
    for step in range(2):
        sampler.sync(model, step)
        found = sampler.sample(PROMPTS, n=2, seed=[3, 4])
        expected = LocalSampler(model, SAMPLING, [299]).sample(PROMPTS, n=2, seed=[3, 4])
        for one, other in zip(found, expected, strict=True):
            assert (one.prompt, one.ids_T.tolist(), one.ended) == (other.prompt, other.ids_T.tolist(), other.ended)
            torch.testing.assert_close(one.log_probs_T, other.log_probs_T, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            for p in model.model.parameters():
                p.mul_(2)
    sampler.close()


def test_what_the_cluster_cannot_hold_and_what_a_sampler_refuses_are_one_line(model: Policy) -> None:
    with pytest.raises(ConfigError, match=r"3 CPU, .* need 9.*on_policy\.engine\.ray"):
        placed(num_cpus=9).sync(model, 0)
    sampler = placed()
    sampler.sync(model, 0)
    with pytest.raises(LimbeckError, match=r"the sampler failed: prompt 1 of 2 has no token"):
        sampler.sample([PROMPTS[0], torch.tensor([], dtype=torch.int64)])
    sampler._ray.kill(sampler._own)
    with pytest.raises(LimbeckError, match=r"process that samples is gone"):
        sampler.sample(PROMPTS)
    sampler.close()


def test_a_run_under_ray_with_samplers_of_their_own_is_the_run_without(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_tokenizers(tmp_path)
    found = {}
    for name, more in (("plain", {}), ("placed", {"engine": {"ray": {"num_cpus": 1}}})):
        values = settings(tmp_path, tmp_path / name)
        values["distillation"] |= {"max_num_steps": 2, "val_at_start": False, "val_at_end": False}
        values["on_policy"] = {"max_new_tokens": 8, "prompt_tokens": 5, **more}
        values["cluster"] = {"launcher": "ray", "num_workers": 1}
        launch(run, resolve(OnPolicyMasterConfig, {**values, "algorithm": "on_policy_distillation"}))
        found[name] = rows(tmp_path / name)
    for mine, theirs in zip(found["plain"], found["placed"], strict=True):
        assert theirs["train/loss"] == pytest.approx(mine["train/loss"], rel=1e-3, abs=1e-5)
        assert theirs["train/sample/length"] == mine["train/sample/length"]
        assert theirs["train/sample/engine_gap"] < 1e-4
        assert theirs["train/sample/staleness"] == 0
