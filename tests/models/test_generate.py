"""What a model writes: its own distribution, the same for the same seed, with the log-probabilities of the trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.attention import varlen_kernel
from limbeck.errors import DataError
from limbeck.models.attention import NAME, register_varlen_attention
from limbeck.models.generate import LocalSampler, Sample, SamplingConfig
from limbeck.models.policy import Policy
from tests.helpers.tiny import LLAMA, config, tokenizer

PROMPTS = [torch.tensor([5, 9, 40]), torch.tensor([7]), torch.tensor([5, 9, 40])]


def written(model: Policy, prompts: list[Tensor] = PROMPTS, *, end: tuple[int, ...] = (), **more: Any) -> list[Sample]:
    calls = {name: more.pop(name) for name in ("n", "seed") if name in more}
    return LocalSampler(model, SamplingConfig(**{"max_new_tokens": 6, **more}), end).sample(prompts, **calls)


def ids(samples: list[Sample]) -> list[list[int]]:
    return [sample.ids_T.tolist() for sample in samples]


def test_log_probs_are_the_trainers(model: Policy) -> None:
    for sample in written(model, temperature=0.7, top_p=0.8, n=2):
        whole = torch.cat([PROMPTS[sample.prompt], sample.ids_T])
        data: BatchedDataDict = BatchedDataDict({"input_ids": whole[None], "input_lengths": torch.tensor([len(whole)])})
        expected = model.get_logprobs(data)["logprobs"][0, -len(sample.ids_T) :]
        torch.testing.assert_close(sample.log_probs_T, expected, atol=1e-5, rtol=1e-5)


def test_a_seed_writes_the_same_whatever_stands_beside_it(model: Policy) -> None:
    first = ids(written(model, n=2, seed=3))
    state = torch.get_rng_state()
    assert ids(written(model, n=2, seed=3)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert ids(written(model, PROMPTS[:2], n=2, seed=3)) == first[:4]
    assert ids(written(model, n=2, seed=4)) != first
    # equal prompts are not answered alike
    assert first[:2] != first[4:]


@pytest.mark.skipif(varlen_kernel() is None, reason="this torch has no variable-length attention")
def test_attention_over_packed_documents_does_not_write(model: Policy) -> None:
    expected = ids(written(model, n=2, seed=3))
    before = model.model.config._attn_implementation
    model.model.set_attn_implementation(register_varlen_attention())
    try:
        assert ids(written(model, n=2, seed=3)) == expected
        assert model.model.config._attn_implementation == NAME
    finally:
        model.model.set_attn_implementation(before)


def test_tokens_come_as_often_as_the_model_says(model: Policy) -> None:
    prompt, n = PROMPTS[0], 4000
    with torch.no_grad():
        p = model.model(prompt[None]).logits[0, -1].div(1.5).softmax(-1)
    found = written(model, [prompt], n=n, max_new_tokens=1, temperature=1.5)
    counts = torch.bincount(torch.tensor([int(s.ids_T[0]) for s in found]), minlength=len(p))
    # the sum of squared deviations, in units of their variance, has mean V - 1 and variance 2 (V - 1)
    likely = p * n > 5
    rest = torch.stack([counts[~likely].sum(), p[~likely].sum() * n])
    observed, expected = torch.cat([counts[likely], rest[:1]]), torch.cat([p[likely] * n, rest[1:]])
    chi = float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    freedom = len(observed) - 1
    assert freedom > 5
    assert chi < freedom + 6 * math.sqrt(2 * freedom)


def test_only_the_nucleus_is_chosen_from(model: Policy) -> None:
    with torch.no_grad():
        p = model.model(PROMPTS[0][None]).logits[0, -1].softmax(-1).sort(descending=True)
    kept = int((p.values.cumsum(0) - p.values < 0.5).sum())
    found = {s.ids_T[0].item() for s in written(model, PROMPTS[:1], n=300, max_new_tokens=1, top_p=0.5)}
    assert len(found) > 1
    assert found <= set(p.indices[:kept].tolist())


def test_greedy_is_the_most_likely_and_ends_where_it_should(model: Policy) -> None:
    found = written(model, temperature=0)
    for sample in found:
        assert not sample.ended
        prefix = PROMPTS[sample.prompt]
        for token in sample.ids_T:
            with torch.no_grad():
                assert int(model.model(prefix[None]).logits[0, -1].argmax()) == int(token)
            prefix = torch.cat([prefix, token[None]])
    end = int(found[0].ids_T[2])
    stopped = written(model, temperature=0, end=(end,))[0]
    assert stopped.ids_T.tolist() == found[0].ids_T.tolist()[: found[0].ids_T.tolist().index(end) + 1]
    assert stopped.ended
    assert len(stopped.log_probs_T) == len(stopped.ids_T)


def test_what_a_folder_says_about_sampling_and_rows_that_are_no_tokens_take_no_part() -> None:
    made = Policy(config({**LLAMA, "vocab_size": 320}), tokenizer(300), device="cpu", seed=0, init_optimizer=False)
    with torch.no_grad():
        # a row behind the tokenizer's last id that wins everywhere
        made.model.get_output_embeddings().weight[300:] *= 1e3
    plain = ids(written(made, temperature=0))
    assert max(max(row) for row in plain) < made.vocab_size == 300
    own = made.model.generation_config = GenerationConfig(repetition_penalty=50.0, max_new_tokens=1, do_sample=True)
    assert ids(written(made, temperature=0)) == plain
    assert made.model.generation_config is own


def test_nothing_to_go_on_from(model: Policy) -> None:
    assert written(model, []) == []
    with pytest.raises(DataError, match="prompt 1 of 2 has no token"):
        written(model, [PROMPTS[0], PROMPTS[0][:0]])
