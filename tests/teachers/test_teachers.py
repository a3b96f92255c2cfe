import multiprocessing
import os
import re
import threading

import pytest
import torch

from limbeck.data.microbatch import get_microbatch_iterator
from limbeck.errors import CacheError, DataError
from limbeck.models.policy import Policy
from limbeck.teachers.cache import CacheReader
from limbeck.teachers.cache.fill import spec_for, write_cache
from limbeck.teachers.cache.format import load_head, save_head
from limbeck.teachers.cached import READERS, CachedTeacher, _readers
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import ByteVocab
from tests.helpers.tiny import batch, config, loss_fn, student, teacher, tokenizer
from tests.models.test_policy import LAYOUTS, step_gradients
from tests.patience import WAIT_SECONDS


def cached(tmp_path, policy, data, **spec):
    write_cache(policy, [data], tmp_path, spec_for(policy, **spec))
    return CachedTeacher(tmp_path)


def step(source, **settings):
    policy = student(max_grad_norm=None)
    return step_gradients(policy, batch(), loss_fn(**settings), [source])


@pytest.mark.parametrize("kind", [{"k": 340}, {"hidden": True, "hidden_dtype": "float16"}, {"hidden": True}])
def test_a_cached_teacher_equals_the_live_one_within_its_precision(tmp_path, kind):
    """k = the whole vocabulary: what is left is the rounding of log-probs (float16) or hidden states."""
    policy = teacher()
    live, live_grads = step(LiveTeacher(policy))
    stored, stored_grads = step(cached(tmp_path, policy, batch(), **kind))
    kl = {name: r["metrics"]["kl_loss"][0] / r["metrics"]["kl_loss"][1] for name, r in (("l", live), ("s", stored))}
    # float16 keeps log p to 2^-11 of its size, bfloat16 hidden states to 2^-9: absolute errors per chunk, in nats
    assert abs(kl["s"] - kl["l"]) < (1e-3 if kind == {"hidden": True} else 5e-4)
    assert abs(stored["loss"] - live["loss"]) < 1e-3
    scale = max(float(g.abs().max()) for g in live_grads.values())
    for name, grad in live_grads.items():
        assert float((stored_grads[name] - grad).abs().max()) <= 2e-3 * scale, name


@pytest.mark.parametrize("layout", ["one", "dynamic", "packed"])
def test_a_cached_teacher_serves_every_layout_and_order(tmp_path, layout):
    source = cached(tmp_path, teacher(), batch(), k=16)
    expected = student().train(batch(), loss_fn(), teachers=[source])["loss"]
    shuffled = batch([5, 3, 0, 4, 2, 1])
    got = student(**LAYOUTS[layout]).train(shuffled, loss_fn(), teachers=[source])["loss"]
    assert got == pytest.approx(expected, rel=1e-6)


def test_same_tokenizer_teacher_from_a_cache(tmp_path):
    frozen = Policy(config(), tokenizer(300), device="cpu", seed=5, init_optimizer=False)
    data = batch(cross=False)
    source = cached(tmp_path, frozen, data, k=300)
    live = student().train(data, loss_fn(cross=False), teachers=[LiveTeacher(frozen)])["loss"]
    stored = student().train(data, loss_fn(cross=False), teachers=[source])["loss"]
    assert stored == pytest.approx(live, rel=5e-4)


def test_logprobs_agree(tmp_path):
    policy = teacher()
    live = LiveTeacher(policy).log_probs(batch())
    stored = cached(tmp_path, policy, batch(), k=4).log_probs(batch())
    assert torch.allclose(live, stored, atol=1e-5)
    assert live.shape == batch()["teacher_input_ids"].shape


def test_signals_carry_the_ids_that_were_scored(tmp_path):
    data = batch()
    policy = teacher()
    iterator, _ = get_microbatch_iterator(data, {}, 6, None, None)
    (mb,) = iterator
    for source in (LiveTeacher(policy), cached(tmp_path, policy, data, k=4)):
        signal = source.signal(mb, torch.device("cpu"))
        start = signal.row_start_B
        for b, n in enumerate(data["teacher_input_lengths"].tolist()):
            rows = int(start[b]) + torch.arange(n - 1)
            ids = data["teacher_input_ids"][b, :n]
            following = signal.next_ids[rows] if hasattr(signal, "next_ids") else signal.input_ids[rows + 1]
            assert torch.equal(following, ids[1:])


@pytest.mark.parametrize("kind", [{"k": 4}, {"hidden": True}])
def test_a_look_up_that_was_begun_gives_the_same_signal(tmp_path, kind):
    source = cached(tmp_path, teacher(), batch(), **kind)
    first, second = (mb for mb in get_microbatch_iterator(batch(), {}, 3, None, None)[0])
    plain = {number: source.signal(mb, torch.device("cpu")) for number, mb in enumerate((first, second))}
    source.begin(first)
    other = source.signal(second, torch.device("cpu"))  # begun for another micro-batch: not used
    source.begin(first)
    begun = source.signal(first, torch.device("cpu"))
    for got, want in ((begun, plain[0]), (other, plain[1])):
        values = ("hidden",) if "hidden" in kind else ("topk_ids", "topk_logprobs", "next_logprob")
        assert all(torch.equal(getattr(got, name), getattr(want, name)) for name in values)
        assert torch.equal(got.row_start_B, want.row_start_B)


def test_a_look_up_begins_at_once_and_tells_its_errors_when_it_is_asked(tmp_path):
    source = cached(tmp_path, teacher(), batch([0, 1]), k=8)
    read, gate = source.reader.get, threading.Event()
    asked = threading.Event()

    def waiting(ids):
        asked.set()
        assert gate.wait(WAIT_SECONDS)
        return read(ids)

    source.reader.get = waiting
    data = batch([0, 1, 2])
    (mb,) = get_microbatch_iterator(data, {}, 3, None, None)[0]
    source.begin(mb)  # returns while the documents are being read
    assert asked.wait(WAIT_SECONDS)
    gate.set()
    with pytest.raises(CacheError, match=rf"\(2 documents\).* {int(data['teacher_input_lengths'][2])} tokens"):
        source.signal(mb, torch.device("cpu"))


def test_the_threads_that_look_up_are_kept(tmp_path, monkeypatch):
    """A thread that starts holds up the host in front of a step's first kernel."""
    source = cached(tmp_path, teacher(), batch(), k=8)
    (mb,) = get_microbatch_iterator(batch(), {}, 6, None, None)[0]
    begun, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread.name), start(thread))[1])
    for _ in range(6):
        source.begin(mb)
        source.signal(mb, torch.device("cpu"))
    assert len(begun) <= READERS


def test_a_child_of_a_process_has_threads_of_its_own():
    look_up(1)
    child = multiprocessing.get_context("fork").Process(target=look_up, args=(2,))
    child.start()
    child.join(WAIT_SECONDS)
    assert child.exitcode == 0


def look_up(value):
    assert _readers(os.getpid()).submit(int, value).result(WAIT_SECONDS) == value


@pytest.mark.parametrize("kind", [{"k": 4}, {"hidden": True}])
def test_rows_without_an_entry_are_empty(tmp_path, kind):
    source = cached(tmp_path, teacher(), batch(), **kind)
    (mb,) = get_microbatch_iterator(batch(), {}, 6, None, None)[0]
    signal = source.signal(mb, torch.device("cpu"))
    lengths = batch()["teacher_input_lengths"]
    ends = signal.row_start_B + lengths - 1  # nothing follows the last token
    if "hidden" in kind:
        assert not signal.hidden[ends].any()
        return
    assert bool((signal.topk_ids[ends] == -1).all())
    assert not signal.topk_logprobs[ends].any()
    assert not signal.next_logprob[ends].any()


def test_masked_samples_need_not_be_cached(tmp_path):
    source = cached(tmp_path, teacher(), batch([0, 1]), k=8)
    data = batch([0, 1, 2])
    with pytest.raises(CacheError, match=rf"\(2 documents\).* {int(data['teacher_input_lengths'][2])} tokens"):
        student().train(data, loss_fn(), teachers=[source])
    data["sample_mask"][2] = 0.0
    alone = student().train(batch([0, 1]), loss_fn(), teachers=[source])["loss"]
    assert student().train(data, loss_fn(), teachers=[source])["loss"] == pytest.approx(alone, rel=1e-6)


def test_a_teacher_with_another_tokenizer_needs_its_own_ids():
    own = ByteVocab.from_tokenizer(tokenizer(300)).fingerprint
    source = LiveTeacher(teacher(), student_fingerprint=own)
    student().train(batch(), loss_fn(), teachers=[source])
    with pytest.raises(DataError, match="teacher_0_input_ids"):
        student().train(batch(cross=False), loss_fn(cross=False), teachers=[source])


def killed_after(*parts):
    yield from map(batch, parts)
    raise KeyboardInterrupt


def test_caching_goes_on_where_it_stopped(tmp_path):
    policy = teacher()
    spec = spec_for(policy, k=8)

    with pytest.raises(KeyboardInterrupt):
        write_cache(policy, killed_after([0, 1], [1, 2]), tmp_path, spec)
    with pytest.raises(CacheError, match=r"not complete \(3 documents"):
        CacheReader(tmp_path)
    scored = []
    real = policy.get_hidden
    policy.get_hidden = lambda data, **k: scored.append(data.size) or real(data, **k)
    writer = write_cache(policy, [batch()], tmp_path, spec)
    assert scored == [3]
    assert writer.documents == len(CacheReader(tmp_path)) == 6


def test_a_changed_teacher_voids_the_cache(tmp_path):
    policy = teacher()
    write_cache(policy, [batch()], tmp_path, spec_for(policy, k=8))
    CacheReader(tmp_path, model_identity=policy.identity())
    other = teacher(seed=9)
    with pytest.raises(CacheError, match=re.escape(str(other.identity()))):
        CacheReader(tmp_path, model_identity=other.identity())
    with pytest.raises(CacheError, match="was made with model_identity"):
        write_cache(other, [batch()], tmp_path, spec_for(other, k=8))
    fingerprint = ByteVocab.from_tokenizer(tokenizer(300)).fingerprint
    with pytest.raises(CacheError, match=fingerprint[:16]):
        CachedTeacher(tmp_path, teacher_fingerprint=fingerprint)


def test_head_file(tmp_path):
    from limbeck.losses import Head

    head = Head(5, weight=torch.randn(7, 3), bias=torch.randn(7), softcap=2.0, scale=0.5)
    save_head(tmp_path, head)
    again = load_head(tmp_path, "cpu")
    x = torch.randn(4, 3)
    assert torch.equal(again.logits(x), head.logits(x))
    stored = (tmp_path / "head.safetensors").read_bytes()
    (tmp_path / "head.safetensors").write_bytes(stored[:-1] + bytes([stored[-1] ^ 64]))
    with pytest.raises(CacheError, match="checksum"):
        load_head(tmp_path, "cpu")
    (tmp_path / "head.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CacheError, match=r"(?i)header"):
        load_head(tmp_path, "cpu")
    with pytest.raises(CacheError, match="linear head"):
        save_head(tmp_path, Head.identity(5))


def test_spec_needs_one_kind():
    with pytest.raises(CacheError, match=r"k=None.*hidden=False"):
        spec_for(teacher())
    with pytest.raises(CacheError, match=r"k=3.*hidden=True"):
        spec_for(teacher(), k=3, hidden=True)
