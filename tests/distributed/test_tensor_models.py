"""Every kind of model that tensor parallelism accepts computes and learns as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.distributed.mesh import MeshShape, check_model
from limbeck.distributed.tensor_parallel import TensorSplit, check_probe, tp_plan_of
from limbeck.errors import ConfigError
from tests.distributed.cases import Case, close, together
from tests.distributed.test_sharding_options import step
from tests.helpers.tiny import LLAMA

pytestmark = pytest.mark.slow

WINDOW = {"sliding_window": 16}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "qwen2": {},
    "smollm3": {"pad_token_id": 0},
    "gemma": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "tie_word_embeddings": True, "query_pre_attn_scalar": 8, **WINDOW},
    "gemma3_text": {"head_dim": 8, "tie_word_embeddings": True, "query_pre_attn_scalar": 8, **WINDOW},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "olmo2": {},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "starcoder2": {"use_bias": True, "sliding_window": None},
    "cohere": {"logit_scale": 0.5, "tie_word_embeddings": True},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "exaone4": {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "nemotron": {"head_dim": 8},
    "ministral3": {"head_dim": 8, **WINDOW},
    "olmo3": WINDOW,
    "arcee": {},
    "helium": {"head_dim": 8, "pad_token_id": 0},
    "cohere2": {**WINDOW, "tie_word_embeddings": True},
    "ernie4_5": {"head_dim": 8},
}
SEQUENCE = ["gemma2", "phi3", "starcoder2"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
}
PAIRS = [("tensor", kind) for kind in MODELS] + [("sequence", kind) for kind in SEQUENCE]


def case_of(kind: str) -> Case:
    return Case(teachers=(), student={**LLAMA, "model_type": kind, **MODELS[kind]}, rows=((0, 2), (4,)))


def work(rank: int, world: int) -> dict[str, Any]:
    return {f"{layout} {kind}": step(case_of(kind), {}, LAYOUTS[layout], (0, 2, 4)) for layout, kind in PAIRS}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("models")
    return together(2, work, folder)


@pytest.mark.parametrize(("layout", "kind"), PAIRS)
def test_a_split_model_learns_the_same(outcome: Any, layout: str, kind: str) -> None:
    expected = step(case_of(kind), {}, {}, (0, 2, 4))
    for results in outcome:
        found = results[f"{layout} {kind}"]
        for name in ("loss", "norm", "after"):
            close(found[name], expected[name], name)
        assert set(found["gradients"]) == set(expected["gradients"])
        for name, grad in expected["gradients"].items():
            close(found["gradients"][name], grad, name)


def test_models_without_a_plan_of_plain_splits() -> None:
    for kind in ("gpt2", "mamba", "mixtral", "qwen3_moe", None):
        assert tp_plan_of(kind) is None
        with pytest.raises(ConfigError, match=f"models of type {kind!r}"):
            check_model({**LLAMA, "model_type": kind}, MeshShape(tensor=2), vocab_rows=300)


def test_a_parameter_that_would_see_a_share_only() -> None:
    from transformers import ApertusConfig, ApertusModel

    numbers = {**LLAMA, "model_type": "apertus", "pad_token_id": 0}
    body: Any = ApertusModel(ApertusConfig(**numbers, vocab_size=300))
    unused: Any = None
    with pytest.raises(ConfigError, match=r"'layers\.0\.mlp\.act_fn\.\w+'"):
        TensorSplit(body, unused)


def test_a_split_that_computes_something_else() -> None:
    hidden = torch.ones(1, 4, 2)
    check_probe(None, hidden, hidden + 1e-6, exact=True)
    with pytest.raises(ConfigError, match=r"other hidden states \(by 0\.5\)"):
        check_probe(None, hidden, hidden / 2, exact=False)
