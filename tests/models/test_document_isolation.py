"""Attention stays within a document: real model classes with random weights, packed against unpacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import ProcessedInputs, process_microbatch
from limbeck.errors import ConfigError
from limbeck.models.attention import choose_attention, register_varlen_attention, verify_document_isolation
from limbeck.models.language_model import LanguageModel

VOCAB = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    # Wide enough that attention moves the outputs by more than bf16 rounding.
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "qwen3": Qwen3Config(**COMMON),
    # A window shorter than the documents: the sliding layers must keep it inside a packed document.
    "gemma3": Gemma3TextConfig(
        **COMMON, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
LENGTHS = [9, 1, 14, 6]
PACKING = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "sequence_length_round": 16}}


@pytest.fixture(params=[(name, attention) for name in CONFIGS for attention in ("sdpa", "eager")], ids="-".join)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    name, attention = request.param
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention, dtype=torch.float32).eval()


def make_batch(seed: int = 0) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    return BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(LENGTHS))


def by_document(inputs: ProcessedInputs, hidden: torch.Tensor) -> list[torch.Tensor]:
    flat = hidden.reshape(-1, hidden.shape[-1])
    assert inputs.row_start is not None
    return [flat[start : start + n] for start, n in zip(inputs.row_start.tolist(), LENGTHS, strict=True)]


def document_causal_mask(
    document_ids: torch.Tensor, *, sliding_window: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Mask ``[B, 1, T, T]``: a token sees itself and earlier tokens of its document, at most ``sliding_window`` of
    them. A bool mask (sdpa), or an additive one of ``dtype`` (eager)."""
    places = torch.arange(document_ids.shape[-1])
    distance = places[:, None] - places[None, :]
    allowed = distance >= 0
    if sliding_window is not None:
        allowed = allowed & (distance < sliding_window)
    mask = ((document_ids[:, :, None] == document_ids[:, None, :]) & allowed)[:, None]
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def explicit_attention_mask(inputs: ProcessedInputs, config: Any, *, dtype: torch.dtype | None) -> Any:
    """The packed inputs' mask, one per layer type where layers differ."""
    assert inputs.document_ids is not None
    full = document_causal_mask(inputs.document_ids, dtype=dtype)
    if "sliding_attention" not in (getattr(config, "layer_types", None) or []):
        return full
    window = document_causal_mask(inputs.document_ids, sliding_window=config.sliding_window, dtype=dtype)
    return {"full_attention": full, "sliding_attention": window}


@torch.no_grad()
def run(model: torch.nn.Module, batch: BatchedDataDict, packed: bool, **extra: Any) -> list[torch.Tensor]:
    inputs = process_microbatch(batch, None, packed, PACKING if packed else {}, 1)
    output = model.model(**{**inputs.model_kwargs(), **extra})  # type: ignore[operator]
    return by_document(inputs, output.last_hidden_state)


def test_packed_equals_unpacked(model: torch.nn.Module) -> None:
    batch = make_batch()
    for packed, alone in zip(run(model, batch, True), run(model, batch, False), strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def test_a_neighbour_changes_nothing(model: torch.nn.Module) -> None:
    batch, other = make_batch(), make_batch()
    before = run(model, batch, True)
    for changed in range(len(LENGTHS)):
        other["input_ids"] = batch["input_ids"].clone()
        other["input_ids"][changed] = (batch["input_ids"][changed] + 1) % VOCAB
        after = run(model, other, True)
        for document in range(len(LENGTHS)):
            same = torch.equal(before[document], after[document])
            assert same == (document != changed)


def test_dropping_the_padding_mask_changes_no_real_token(model: torch.nn.Module) -> None:
    batch = make_batch()
    for masked, free in zip(run(model, batch, False), run(model, batch, False, attention_mask=None), strict=True):
        torch.testing.assert_close(masked, free, atol=1e-5, rtol=0)


def test_explicit_mask_says_the_same(model: torch.nn.Module) -> None:
    batch = make_batch()
    inputs = process_microbatch(batch, None, True, PACKING, 1)
    eager = model.config._attn_implementation == "eager"
    mask = explicit_attention_mask(inputs, model.config, dtype=torch.float32 if eager else None)
    for explicit, found in zip(run(model, batch, True, attention_mask=mask), run(model, batch, True), strict=True):
        torch.testing.assert_close(explicit, found, atol=1e-5, rtol=0)


def test_gradients_of_packed_and_unpacked_agree(model: torch.nn.Module) -> None:
    def gradients(packed: bool) -> list[torch.Tensor]:
        inputs = process_microbatch(make_batch(), None, packed, PACKING if packed else {}, 1)
        model.zero_grad()
        hidden = model.model(**inputs.model_kwargs()).last_hidden_state  # type: ignore[operator]
        direction = torch.linspace(-1, 1, hidden.shape[-1])
        sum((part @ direction).tanh().sum() * (i + 1) for i, part in enumerate(by_document(inputs, hidden))).backward()
        return [p.grad.clone() for p in model.model.parameters() if p.grad is not None]  # type: ignore[union-attr]

    for packed, alone in zip(gradients(True), gradients(False), strict=True):
        assert (packed - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_probe_accepts_real_models(model: torch.nn.Module) -> None:
    model.train()
    assert verify_document_isolation(model, vocab_size=VOCAB) == 0
    assert model.training


class Mixing(torch.nn.Module):
    """A real model under a plain causal mask, blind to documents."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        eager = self.model.config._attn_implementation == "eager"
        mask = document_causal_mask(torch.zeros_like(input_ids), dtype=torch.float32 if eager else None)
        return self.model(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False)


def test_probe_refuses_real_models_under_a_plain_mask(model: torch.nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"Mixing .*allowed 0\.2\b"):
        verify_document_isolation(Mixing(model), vocab_size=VOCAB, tolerance=0.2)


ATTENTION = ("sdpa", "eager", "flex_attention", "limbeck_varlen")
HEADS = {"9 over 3": (9, 3), "8 over 4": (8, 4), "8": (8, 8), "7 over 1": (7, 1)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_on_an_accelerator_documents_are_computed_as_if_alone(
    attention: str, precision: str, heads: tuple[int, int], compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a run can choose: a neighbour changes no bit, and a packed document is what it is alone."""
    if attention == "limbeck_varlen" and precision == "float32":
        pytest.skip("torch's variable-length kernel takes narrow types alone")
    torch.compiler.reset()
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 64}
    config = LlamaConfig(**{**COMMON, **sizes, "hidden_size": 64 * heads[0], "max_position_embeddings": 512})
    frozen = torch.bfloat16 if precision == "bfloat16" else torch.float32
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, dtype=frozen)
    cfg = {
        "precision": "float32" if precision == "float32" else "bfloat16",
        "attn_implementation": attention,
        "compile": {"enabled": compiled, "dynamic": True},
        "sequence_packing": {"enabled": True, "train_mb_tokens": 512},
    }
    if attention == "limbeck_varlen":
        register_varlen_attention()
    network.set_attn_implementation(attention)
    # packing is verified where the model is made: a neighbour that moves anything is an error
    model = LanguageModel({"model_name": "random", **cfg}, None, device="cuda", model=network)
    assert "could not be checked" not in caplog.text
    lengths = [150, 1, 200]
    ids = torch.randint(0, VOCAB, (3, 200), generator=torch.Generator().manual_seed(1))

    def hidden(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        batch = BatchedDataDict(input_ids=rows, input_lengths=torch.tensor(lengths))
        inputs = process_microbatch(batch, None, True, model.cfg, 1, device="cuda")
        with torch.no_grad():
            return model.forward_hidden(inputs).float()

    packed = hidden(ids, lengths)
    other = ids.clone()
    other[0] = (ids[0] + 1 + VOCAB // 2) % VOCAB
    assert torch.equal(hidden(other, lengths)[150:], packed[150:])
    alone = torch.cat([hidden(ids[i : i + 1, :n], [n]) for i, n in enumerate(lengths)])
    allowed = 1e-4 if precision == "float32" else 0.05
    assert (packed - alone).norm() <= allowed * alone.norm()


def test_flex_attention_is_given_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast rotary embeddings leave queries and keys wide."""
    from transformers.integrations import flex_attention as theirs

    seen: list[torch.dtype] = []

    def spy(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.extend((query.dtype, key.dtype, value.dtype))
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setattr(theirs, "flex_attention_forward", spy)
    network = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="flex_attention")
    choose_attention(network, "flex_attention", torch.bfloat16, torch.device("cpu"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        network(input_ids=torch.arange(5)[None], use_cache=False)
    assert set(seen) == {torch.bfloat16}


class Leaky(torch.nn.Module):
    """Carries state along the sequence, as a recurrent layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return (self.embed(input_ids).cumsum(dim=1),)


def test_probe_refuses_a_model_that_carries_state() -> None:
    with pytest.raises(ConfigError, match="Leaky"):
        verify_document_isolation(Leaky(), vocab_size=VOCAB)


def test_probe_says_when_it_cannot_tell(caplog: pytest.LogCaptureFixture) -> None:
    class Bag(Leaky):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return (self.embed(input_ids),)

    assert verify_document_isolation(Bag(), vocab_size=VOCAB) == 0
    assert "could not be checked" in caplog.text


def test_mask_by_hand() -> None:
    mask = document_causal_mask(torch.tensor([[0, 0, 0, 1]]), sliding_window=2)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
