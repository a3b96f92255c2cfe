"""Continuous batching writes what the plain sampler writes: the same tokens for the same seeds, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.errors import ConfigError, LimbeckError
from limbeck.models import attention, continuous
from limbeck.models.attention import PAGED
from limbeck.models.continuous import ContinuousSampler, make_local_sampler
from limbeck.models.generate import LocalSampler, Sample, SamplingConfig, answers_at_once
from limbeck.models.policy import Policy
from limbeck.tokens import ByteVocab
from tests.helpers.tiny import student, tokenizer

needs_engine = pytest.mark.skipif(not continuous.SUPPORTED, reason="the installed transformers has another engine")
PROMPTS = [torch.tensor([5, 9, 40]), torch.tensor([7]), torch.tensor([5, 9, 40]), torch.arange(3, 50)]


def same(found: list[Sample], expected: list[Sample]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt, one.ids_T.tolist(), one.ended) == (other.prompt, other.ids_T.tolist(), other.ended)
        torch.testing.assert_close(one.log_probs_T, other.log_probs_T, atol=2e-4, rtol=1e-4)


@needs_engine
@pytest.mark.parametrize(
    "how",
    [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.8}, {"stop": ["e"]}],
    ids=["greedy", "nucleus", "stop_text"],
)
def test_it_writes_what_the_plain_sampler_writes(model: Policy, how: dict[str, Any]) -> None:
    vocab = ByteVocab.from_tokenizer(tokenizer(300))
    plain = LocalSampler(model, SamplingConfig(max_new_tokens=6), []).sample(PROMPTS, n=2, seed=3)
    # a token that comes early somewhere ends answers, and two of eight are in work at a time
    end, config = [int(plain[0].ids_T[1])], SamplingConfig(max_new_tokens=6, batch_size=2, **how)
    expected = LocalSampler(model, config, end, vocab).sample(PROMPTS, n=2, seed=3)
    sampler = ContinuousSampler(model, config, end, vocab)
    same(sampler.sample(PROMPTS, n=2, seed=3), expected)
    same(sampler.sample(PROMPTS[:2], n=2, seed=3), expected[:4])
    assert sampler.sample([], n=2, seed=3) == []


class KernelOfTorch:
    """Stands in for torch's variable-length kernel, which no CPU has: one answer after the other."""

    takes_windows = True

    def __init__(self) -> None:
        self.answers = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        assert window is None
        ends_q, ends_k = (cu.tolist() for cu in cu_seqlens)
        self.answers = max(self.answers, len(ends_q) - 1)
        out = torch.empty_like(query)
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            assert (b - a <= longest[0], d - c <= longest[1]) == (True, True)
            q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
            # queries stand at the end of their keys
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
            out[a:b] = found[0].transpose(0, 1)
        return out


@needs_engine
def test_answers_in_work_attend_by_the_kernel_of_torch(model: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelOfTorch()
    monkeypatch.setattr(attention, "varlen_kernel", lambda: kernel)
    config = SamplingConfig(max_new_tokens=6, batch_size=3)
    expected = LocalSampler(model, config).sample(PROMPTS, n=2, seed=3)
    same(ContinuousSampler(model, config, attention=PAGED).sample(PROMPTS, n=2, seed=3), expected)
    assert kernel.answers == 3


@needs_engine
def test_a_narrow_engine_keeps_its_positions(model: Policy) -> None:
    narrow = student(precision="bfloat16")
    engine = ContinuousSampler(narrow, SamplingConfig())._engine
    assert {weight.dtype for weight in engine.parameters()} == {torch.bfloat16}
    wide = dict(narrow.model.named_buffers())
    for name, own in engine.named_buffers():
        torch.testing.assert_close(own, wide[name], atol=0, rtol=0)


@needs_engine
def test_the_engine_draws_no_random_number_of_the_run_and_repeats_its_bits(model: Policy) -> None:
    before = torch.get_rng_state()
    config = SamplingConfig(max_new_tokens=4, batch_size=3)
    kept = ContinuousSampler(model, config)
    found = [kept.sample(PROMPTS[i:], n=2, seed=3) for i in (0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    fresh = ContinuousSampler(model, config).sample(PROMPTS[1:], n=2, seed=3)
    assert [s.log_probs_T.tolist() for s in fresh] == [s.log_probs_T.tolist() for s in found[1]]


@needs_engine
def test_new_weights_are_handed_over() -> None:
    made = student()
    config = SamplingConfig(max_new_tokens=4)
    sampler = ContinuousSampler(made, config)
    before = sampler.sample(PROMPTS, seed=1)
    with torch.no_grad():
        for p in made.model.parameters():
            p.mul_(3)
    same(sampler.sample(PROMPTS, seed=1), before)
    sampler.sync(made, 1)
    after = sampler.sample(PROMPTS, seed=1)
    same(after, LocalSampler(made, config).sample(PROMPTS, seed=1))
    assert [s.ids_T.tolist() for s in after] != [s.ids_T.tolist() for s in before]
    assert made.model.get_output_embeddings().weight.requires_grad


@needs_engine
def test_log_probabilities_survive_the_way_that_the_engine_takes() -> None:
    log_p = torch.tensor([[0.0], [-1e-4], [-0.7], [-9.0], [-40.0]])
    chosen = torch.tensor([[0], [4], [9], [3], [2]])
    scores = continuous._tell(torch.zeros(5, 10), chosen, log_p)
    assert torch.equal(scores.argmax(1, keepdim=True), chosen)
    said = scores.softmax(1).gather(1, chosen).log()
    torch.testing.assert_close(continuous._heard(said.double()), log_p, atol=1e-4, rtol=0)


@needs_engine
def test_an_engine_that_fails_says_so(model: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ContinuousSampler(model, SamplingConfig(max_new_tokens=4))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("out of order")

    monkeypatch.setattr(sampler._engine, "forward", fail)
    with pytest.raises(LimbeckError, match="out of order"):
        sampler.sample(PROMPTS)


@needs_engine
def test_auto_is_the_plain_one_on_a_cpu(model: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = ByteVocab.from_tokenizer(tokenizer(300))
    assert type(make_local_sampler(model, "auto", SamplingConfig(), [], vocab)) is LocalSampler
    assert type(make_local_sampler(model, "continuous", SamplingConfig(), [], vocab)) is ContinuousSampler
    monkeypatch.setattr(type(model.sharding), "is_sharded", True)
    with pytest.raises(ConfigError, match=r"continuous .*fsdp"):
        make_local_sampler(model, "continuous", SamplingConfig(), [], vocab)


def test_another_engine_is_refused_in_one_sentence(model: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "SUPPORTED", False)
    with pytest.raises(ConfigError, match=r"transformers 5\.20"):
        ContinuousSampler(model, SamplingConfig())


def test_answers_at_once_go_by_the_memory_of_the_device(model: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers_at_once(model, SamplingConfig(batch_size=3)) == 3
    assert answers_at_once(model, SamplingConfig()) == 32
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    # keys and values of two layers of two heads of eight numbers of two bytes, for 1,024 and 976 tokens
    answer = 2 * 2 * 2 * 8 * 2 * 2000
    for answers, expected in ((0, 8), (20, 20), (4000, 256)):
        monkeypatch.setattr(
            "limbeck.models.generate.memory_total", lambda device, n=answers: int(n * answer / 0.15) + 9
        )
        assert answers_at_once(model, SamplingConfig(max_new_tokens=976)) == expected
