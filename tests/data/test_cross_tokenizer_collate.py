"""CrossTokenizerCollator: what a batch holds, and that nothing in it depends on its neighbours or on workers."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.align import TokenAligner
from limbeck.cli.project import peak_rss_mb
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.data.layout import aligned_chunks
from limbeck.errors import ConfigError, DataError, TokenizerError
from limbeck.tokens import ByteTokenizer, ByteVocab
from tests.helpers.tokenizers import tiny
from tests.texts import TEXTS, unicode_text
from tests.zoo import tokenizer

CHAT = [
    {"role": "user", "content": "What is 2011 + 1?"},
    {"role": "assistant", "content": "It is 2012."},
    {"role": "user", "content": "And the café?"},
    {"role": "assistant", "content": "Closed since 2011, 蒸馏!"},
]


def collator(student: str = "llama3_2", teacher: str = "qwen3", **options) -> CrossTokenizerCollator:
    s, t = tokenizer(student), tokenizer(teacher)
    options = {"ctx_length_student": 256, "ctx_length_teacher": 256, "aligner": TokenAligner(s, t)} | options
    return CrossTokenizerCollator(student_tokenizer=s, teacher_tokenizer=t, **options)


def records(texts) -> list[dict]:
    return [{"text": t, "idx": i, "loss_multiplier": 1.0, "source": f"data.jsonl:{i + 1}"} for i, t in enumerate(texts)]


@pytest.mark.parametrize("options", [{}, {"ctx_length_student": 20}, {"mode": "chat"}], ids=str)
def test_a_layout_holds_the_chunks_of_the_published_keys(options: dict) -> None:
    rows = [{"messages": CHAT}] * 2 if options.get("mode") == "chat" else records(["", *TEXTS.values()])
    keys, layout = (collator(**options, chunks_as=form)(rows) for form in ("keys", "layout"))
    assert not [key for key in layout if key.startswith("alignment_")]
    want, found = aligned_chunks(keys, 0), aligned_chunks(layout, 0)
    assert found is not None
    assert found.num_chunks > 0
    for f in fields(found):
        value, other = getattr(found, f.name), getattr(want, f.name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, f.name
    assert collator(**options, chunks_as="layout")([])["chunks_0"].num_chunks == 0


def test_keys_shapes_and_masks() -> None:
    batch = collator(make_seq_div_by_student=8, make_seq_div_by_teacher=16)(records(TEXTS.values()))
    assert batch["input_ids"].shape[1] % 8 == 0
    assert batch["teacher_input_ids"].shape[1] % 16 == 0
    assert batch["input_ids"].shape[1] - batch["input_lengths"].max() < 8
    assert batch["idx"] == list(range(len(TEXTS)))
    fields = ["pair_valid", "pair_is_correct", "num_chunks", "student_chunk_id", "teacher_chunk_id"]
    fields += ["student_exact_partition_mask", "teacher_exact_partition_mask"]
    for name in fields:
        assert torch.equal(batch[f"alignment_{name}"], batch[f"alignment_0_{name}"])
    width = torch.arange(batch["input_ids"].shape[1])
    padding = width[None] >= batch["input_lengths"][:, None]
    assert not batch["token_mask"][padding].any()
    assert (batch["alignment_student_chunk_id"][padding] == -1).all()
    assert (batch["input_ids"][:, 0] == tokenizer("llama3_2").bos_token_id).all()
    assert not batch["token_mask"][:, 0].any()
    empty = list(TEXTS).index("empty")
    assert batch["sample_mask"][empty] == 0
    assert batch["skipped"][empty]["no_target"] == 1


def test_target_bytes_are_the_bytes_that_have_a_predictor() -> None:
    batch = collator()(records(["Hello there, 2011!"]))
    assert batch["target_bytes"].tolist() == [18]  # the BOS token predicts the first
    qwen = ByteTokenizer.of(tokenizer("qwen3")).encode("Hello there, 2011!")
    assert batch["teacher_target_bytes"].tolist() == [18 - int(qwen.byte_ends[0])]  # no BOS token: the first has none


@pytest.mark.parametrize(("s", "t"), [("llama3_2", "qwen3"), ("gemma3", "smollm2"), ("llama2", "gptoss")])
def test_chunks_hold_equal_bytes_in_the_batch(s: str, t: str) -> None:
    batch = collator(s, t)(records(TEXTS.values()))
    vocabs = ByteVocab.from_tokenizer(tokenizer(s)), ByteVocab.from_tokenizer(tokenizer(t))
    for row in range(batch.size):
        for k in range(int(batch["alignment_num_chunks"][row])):
            if batch["alignment_pair_is_correct"][row, k]:
                mine = batch["input_ids"][row][batch["alignment_student_chunk_id"][row] == k]
                theirs = batch["teacher_input_ids"][row][batch["alignment_teacher_chunk_id"][row] == k]
                assert vocabs[0].join(mine.tolist()) == vocabs[1].join(theirs.tolist())


@settings(max_examples=40, deadline=None)
@given(text=unicode_text(400), s=st.integers(1, 40), t=st.integers(1, 40))
def test_cut_at_the_last_shared_boundary(text: str, s: int, t: int) -> None:
    whole = collator()(records([text]))
    cut = collator(ctx_length_student=s, ctx_length_teacher=t)(records([text]))
    lengths = int(cut["input_lengths"][0]), int(cut["teacher_input_lengths"][0])
    assert lengths[0] <= s
    assert lengths[1] <= t
    n = int(cut["alignment_num_chunks"][0])
    full = int(whole["alignment_num_chunks"][0])
    assert torch.equal(cut["input_ids"][0, : lengths[0]], whole["input_ids"][0, : lengths[0]])
    for side, length in zip(("student", "teacher"), lengths, strict=True):
        ids = cut[f"alignment_{side}_chunk_id"][0, :length]
        assert torch.equal(ids, whole[f"alignment_{side}_chunk_id"][0, :length])
        if n < full:
            assert length == 0 or ids[-1] == n - 1
    if n < full:
        ends = [
            int((whole[f"alignment_{side}_chunk_id"][0] == n).nonzero().max()) + 1 for side in ("student", "teacher")
        ]
        assert ends[0] > s or ends[1] > t
        assert cut["skipped"][0]["truncated"] == 1


def test_the_house_s_own_tokenizers_give_the_same_batch() -> None:
    theirs = [tiny(300), tiny(340)]
    own = [ByteTokenizer(json.loads(t.backend_tokenizer.to_str()), named={"eos_token": "<eos>"}) for t in theirs]
    batches = [
        CrossTokenizerCollator(
            student_tokenizer=s, teacher_tokenizer=t, ctx_length_student=32, ctx_length_teacher=32, append_eos=True
        )(records(list(TEXTS.values())[:4]))
        for s, t in (theirs, own)
    ]
    assert batches[0].keys() == batches[1].keys()
    for key, value in batches[0].items():
        assert torch.equal(value, batches[1][key]) if isinstance(value, torch.Tensor) else value == batches[1][key], key


def test_batch_does_not_depend_on_neighbours() -> None:
    make = collator()
    together = make(records(TEXTS.values()))
    for row, text in enumerate(TEXTS.values()):
        alone = make(records([text]))
        n = int(alone["input_lengths"][0])
        assert torch.equal(together["input_ids"][row, :n], alone["input_ids"][0, :n])
        assert torch.equal(together["alignment_student_chunk_id"][row, :n], alone["alignment_student_chunk_id"][0, :n])
        assert together["sample_mask"][row] == alone["sample_mask"][0]


def test_several_teachers_and_one_with_the_student_s_tokenizer() -> None:
    make = CrossTokenizerCollator(
        student_tokenizer=tokenizer("llama3_2"),
        teacher_tokenizer=[tokenizer("qwen3"), None, tokenizer("gemma3")],
        ctx_length_student=12,
        ctx_length_teacher=[8, 12, 64],
        make_seq_div_by_teacher=[4, 1, 2],
    )
    batch = make(records(["In 2011 and 2012 there were many, many texts to read.", "short"]))
    assert "teacher_1_input_ids" not in batch
    assert torch.equal(batch["teacher_input_ids"], batch["teacher_0_input_ids"])
    assert batch["teacher_0_input_lengths"].max() <= 8
    for i in (0, 2):
        last = batch[f"alignment_{i}_student_chunk_id"][0, int(batch["input_lengths"][0]) - 1]
        assert last == batch[f"alignment_{i}_num_chunks"][0] - 1
    with pytest.raises(ConfigError, match="2 entries for 3 teachers"):
        CrossTokenizerCollator(
            student_tokenizer=tokenizer("gpt2"),
            teacher_tokenizer=[None, None, None],
            ctx_length_student=8,
            ctx_length_teacher=[1, 2],
        )


def test_chat_mode_supervises_and_aligns_assistant_text_alone() -> None:
    batch = collator(mode="chat")([{"messages": CHAT, "idx": 0}])
    vocab = ByteVocab.from_tokenizer(tokenizer("llama3_2"))
    supervised = batch["input_ids"][0][batch["token_mask"][0] == 1].tolist()
    assert vocab.join(supervised).decode() == "It is 2012.Closed since 2011, 蒸馏!"
    assert [vocab.roles[i] for i in supervised if vocab.special[i]] == ["eot", "eot"]
    chunked = batch["input_ids"][0][batch["alignment_student_chunk_id"][0] >= 0].tolist()
    assert chunked[-1] == supervised[-1]
    assert set(supervised) <= set(chunked) | set(supervised)
    assert vocab.join(chunked).decode() == "It is 2012.Closed since 2011, 蒸馏!"
    last = collator(mode="chat", train_on="last")([{"messages": CHAT, "idx": 0}])
    assert 0 < last["token_mask"].sum() < batch["token_mask"].sum()


@pytest.mark.parametrize(
    "student", ["smollm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3_2", "gemma3"))]
)
def test_a_pad_id_that_is_a_real_or_an_end_token_changes_nothing(student: str) -> None:
    texts = ["one", "one two three four five", "!!! ! !"]
    base, other = tokenizer(student), pickle.loads(pickle.dumps(tokenizer(student)))
    other.pad_token = other.eos_token
    made = []
    for tok in (base, other):
        make = CrossTokenizerCollator(
            student_tokenizer=tok, teacher_tokenizer=tokenizer("qwen3"), ctx_length_student=64, ctx_length_teacher=64,
            append_eos=True,
        )  # fmt: skip
        made.append(make(records(texts)))
    for key in ("input_lengths", "token_mask", "alignment_student_chunk_id", "alignment_pair_valid"):
        assert torch.equal(made[0][key], made[1][key])
    assert (
        made[1]["token_mask"].sum()
        == (made[1]["input_lengths"] - made[1]["input_ids"].eq(base.bos_token_id)[:, 0].long()).sum()
    )


def test_published_tokenize_batch() -> None:
    ids, mask = CrossTokenizerCollator._tokenize_batch(["a b c", "a"], tokenizer("llama3_2"), 3, 4)
    assert ids.shape == mask.shape == (2, 4)
    assert mask.sum(1).tolist() == [3, 2]


class _Texts(torch.utils.data.Dataset):
    def __init__(self, texts: list[str]) -> None:
        self.rows = records(texts)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.rows[i]


@pytest.mark.filterwarnings("ignore")
def test_same_batches_in_any_worker_count_and_after_a_resume() -> None:
    texts = [f"{i} {t}" for i, t in enumerate(list(TEXTS.values()) * 3)]
    make = collator("smollm2", "llama2")

    def loader(workers: int) -> StatefulDataLoader:
        return StatefulDataLoader(_Texts(texts), batch_size=7, num_workers=workers, collate_fn=make)

    plain = list(loader(0))
    for workers in (1, 2):
        for a, b in itertools.zip_longest(plain, loader(workers)):
            assert a["idx"] == b["idx"]
            assert torch.equal(a["input_ids"], b["input_ids"])
            assert torch.equal(a["alignment_teacher_chunk_id"], b["alignment_teacher_chunk_id"])
    first = loader(1)
    seen = iter(first)
    next(seen)
    next(seen)
    state = first.state_dict()
    del seen
    again = loader(1)
    again.load_state_dict(state)
    assert next(iter(again))["idx"] == plain[2]["idx"]


def memory_growth() -> float:
    """MB by which this process's peak grows between the 25th batch and the 100th."""
    make = collator("smollm2", "gpt2", ctx_length_student=512, ctx_length_teacher=512)
    rng = np.random.default_rng(0)
    words = [str(w) for w in rng.integers(0, 10**6, 5000)]

    def run(batches: int) -> float:
        for _ in range(batches):
            make(records([" ".join(rng.choice(words, 150)) for _ in range(16)]))
        peak = peak_rss_mb()
        assert peak is not None
        return peak

    warm = run(25)
    return run(75) - warm


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data() -> None:
    # in a process of its own: the peak of this one is what other tests have left
    collator("smollm2", "gpt2")  # fetches both
    program = f"from {__name__} import memory_growth; print(memory_growth())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 40  # the batches made meanwhile add up to far more


def test_bad_records() -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:7 has no text; its keys are \['source'\]"):
        collator()([{"source": "data.jsonl:7"}])
    with pytest.raises(DataError, match=r"record 3.*surrogate|record 3"):
        collator()([{"text": "a\ud800", "idx": 3}])
    skipping = collator(on_error="skip")([{"text": "a\ud800", "idx": 3}, {"text": "fine", "idx": 4}])
    assert skipping["sample_mask"].tolist() == [0, 1]
    assert skipping["skipped"][0]["skipped_record"] == 1
    with pytest.raises(DataError, match=r"record 1 .*\['idx', 'text'\]"):
        collator(mode="chat")([{"text": "x", "idx": 1}])
    with pytest.raises(DataError, match=r"chat\.jsonl:2"):
        collator("llama3_2", "gemma3", mode="chat")([{"messages": CHAT[:1] + CHAT, "source": "chat.jsonl:2"}])
    with pytest.raises(TokenizerError, match=r"teacher 0's .*teacher\.tokenizer\.chat"):
        collator("llama3_2", "gpt2", mode="chat")
    with pytest.raises(ConfigError, match="context length is 0"):
        collator(ctx_length_teacher=0)


def test_a_huge_document_and_a_row_of_nothing() -> None:
    huge = "word and 2011, " * 3_500_000  # 52 MB
    batch = collator("smollm2", "gpt2", ctx_length_student=128, ctx_length_teacher=100)(records([huge, ""]))
    assert batch["input_lengths"].tolist()[1] == 0
    assert 0 < batch["input_lengths"][0] <= 128
    assert batch["skipped"][0]["truncated"] == batch["skipped"][0]["prefix_of_document"] == 1
    assert batch["sample_mask"].tolist() == [1.0, 0.0]
    whole = collator("smollm2", "gpt2", ctx_length_student=128, ctx_length_teacher=100)(records([huge[:5000]]))
    assert torch.equal(batch["input_ids"][0], whole["input_ids"][0])
