"""A teacher behind a server gives what the same model gives in this process; every lie is one clear line."""

from __future__ import annotations

import copy
import json
import logging
import threading
from functools import partial

import numpy as np
import pytest
import torch

from limbeck.data.microbatch import get_microbatch_iterator
from limbeck.errors import DataError, ServerError
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher
from limbeck.teachers.server import teacher as teacher_module
from limbeck.teachers.server.client import ServerClient, ServerConfig
from limbeck.teachers.server.teacher import ServerTeacher
from limbeck.utils.http import TokenBucket
from tests.gates import wait_until
from tests.helpers.servers import HOLD, ScoringServer, serving
from tests.helpers.tiny import batch, config, loss_fn, student, teacher, tokenizer
from tests.patience import WAIT_SECONDS

KEY = "sk-a-very-secret-key"


@pytest.fixture(scope="module")
def policy():
    return teacher()


@pytest.fixture
def server(policy):
    with serving(ScoringServer(policy, max_k=400)) as running:
        yield running


def settings(server, **more):
    return ServerConfig(url=server.url, **{"backoff": 0.001, "retries": 2, "k": 16, "timeout": WAIT_SECONDS, **more})


def remote(server, **more):
    return ServerTeacher(settings(server, **more), tokenizer(340))


def lie_about_rows(change):
    """Change every choice of the answers that come after the probe."""

    def lie(number, body, answer):
        status, made = answer
        made = copy.deepcopy(made)
        for prompt, choice in zip(body["prompt"], made.get("choices", []), strict=False):
            change(prompt, choice)
        return status, made

    return lie


# ---- equality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("echo", [False, True])
def test_scores_equal_the_live_model(policy, echo):
    """Both forms of the API, to the precision of float32 written as JSON text."""
    data = batch()
    with serving(ScoringServer(policy, echo_only=echo)) as server:
        source = remote(server, k=16)
        assert source.facts.style == ("echo" if echo else "prompt_logprobs")
        assert torch.allclose(source.log_probs(data), LiveTeacher(policy).log_probs(data), atol=1e-5)
        (mb,) = get_microbatch_iterator(data, {}, 6, None, None)[0]
        signal = source.signal(mb, torch.device("cpu"))
    start = signal.row_start_B
    top = policy.get_topk_logits(data, 16, prefix="teacher_")
    for b, n in enumerate(data["teacher_input_lengths"].tolist()):
        rows = int(start[b]) + torch.arange(n - 1)
        logits = top["topk_logits"][b, : n - 1]
        assert torch.equal(signal.next_ids[rows], data["teacher_input_ids"][b, 1:n])
        assert torch.equal(signal.topk_ids[rows].long(), top["topk_indices"][b, : n - 1])
        gaps = (signal.topk_logprobs[rows] - signal.topk_logprobs[rows][:, :1]) - (logits - logits[:, :1])
        assert float(gaps.abs().max()) < 1e-5


def test_a_step_equals_the_live_teachers(server, policy):
    """With k = the whole vocabulary nothing is left out, so loss and gradient norm are the live teacher's."""
    live = student().train(batch(), loss_fn(), teachers=[LiveTeacher(policy)])
    far = student().train(batch(), loss_fn(), teachers=[remote(server, k=340)])
    assert far["loss"] == pytest.approx(live["loss"], rel=1e-5)
    assert far["grad_norm"] == pytest.approx(live["grad_norm"], rel=1e-4)
    assert far["metrics"]["teacher_0/rows_failed"] == (0.0, 6.0)


def test_same_tokenizer_teacher():
    frozen = Policy(config(), tokenizer(300), device="cpu", seed=5, init_optimizer=False)
    data = batch(cross=False)
    live = student().train(data, loss_fn(cross=False), teachers=[LiveTeacher(frozen)])["loss"]
    with serving(ScoringServer(frozen, max_k=400)) as server:
        source = ServerTeacher(settings(server, k=300), tokenizer(300))
        assert student().train(data, loss_fn(cross=False), teachers=[source])["loss"] == pytest.approx(live, rel=1e-5)


def test_a_teacher_with_another_tokenizer_needs_its_own_ids(server):
    source = ServerTeacher(settings(server), tokenizer(340), student_fingerprint="another")
    with pytest.raises(DataError, match="teacher_0_input_ids"):
        student().train(batch(cross=False), loss_fn(cross=False), teachers=[source])


# ---- how it asks ---------------------------------------------------------------------------------------------------


def test_a_batch_is_asked_for_once_in_limited_requests(server):
    source = remote(server, prompts_per_request=2, tokens_per_request=70, concurrency=3)
    server.requests.clear()
    student(train_micro_batch_size=1).train(batch(), loss_fn(), teachers=[source])
    lengths = [[len(p) for p in r["prompt"]] for r in server.requests]
    assert sorted(n for r in lengths for n in r) == sorted(batch()["teacher_input_lengths"].tolist())
    assert all(len(r) == 1 or (len(r) == 2 and sum(r) <= 70) for r in lengths)
    assert server.most_at_once <= 3


def test_two_batches_of_a_step_are_both_remembered_until_it_ends(server):
    source = remote(server)
    first, second = batch([0, 1]), batch([2, 3])
    for data in (first, second):
        source.prefetch(data)
    asked = len(server.requests)
    for data in (first, second):
        (mb,) = get_microbatch_iterator(data, {}, 2, None, None)[0]
        source.signal(mb, torch.device("cpu"))
    assert len(server.requests) == asked
    source.step_end()
    source.prefetch(second)
    assert len(server.requests) == asked
    source.prefetch(first)
    assert len(server.requests) > asked


# ---- ahead -----------------------------------------------------------------------------------------------------------


def rows_asked(server):
    return sum(len(body["prompt"]) for body in server.requests if isinstance(body["prompt"], list))


def test_what_is_asked_ahead_is_asked_once_and_found_by_later_steps(server):
    source = remote(server)
    first, second = batch([0, 1]), batch([1, 2, 3])
    before = rows_asked(server)
    source.ask_ahead(first)
    # a row that a batch under way needs, too, is kept for both
    source.ask_ahead(second)
    source.ask_ahead(second)
    for data in (first, second):
        assert source.prefetch(data).metrics["rows_failed"][0] == 0
        (mb,) = get_microbatch_iterator(data, {}, 3, None, None)[0]
        source.signal(mb, torch.device("cpu"))
        source.step_end()
    assert rows_asked(server) - before == 4
    assert source.seconds_asked > 0
    source.close()


def test_an_error_ahead_is_one_of_the_step_that_needs_the_row(server):
    source = remote(server, retries=0)
    refused = batch([0])["teacher_input_lengths"].item()
    server.lie = lambda number, body, answer: (400, {}) if [len(p) for p in body["prompt"]] == [refused] else None
    source.ask_ahead(batch([0]))
    source.prefetch(batch([1]))
    with pytest.raises(ServerError, match="http_400"):
        source.prefetch(batch([0]))


def test_rows_that_no_step_needs_are_forgotten(server):
    source = remote(server)
    before = rows_asked(server)
    source.ask_ahead(batch([0]))
    for _ in range(3):
        source.step_end()
    source.prefetch(batch([0]))
    wait_until(lambda: rows_asked(server) == before + 2, "both requests")


def test_answers_go_with_rows_that_move_to_another_process(server):
    source, other = remote(server), remote(server)
    source.ask_ahead(batch([0, 1, 2]))
    raw = source.asked(batch([0, 2]))
    before = rows_asked(server)
    other.take_asked(raw)
    other.take_asked(b"")
    there, here = (teacher.log_probs(batch([0, 2])) for teacher in (other, source))
    # only whoever has handed them out must ask again
    assert rows_asked(server) - before == 2
    assert torch.equal(there, here)


def test_a_closed_teacher_waits_for_nothing_and_can_be_asked_again(server):
    before, held = set(threading.enumerate()), threading.Event()
    source = remote(server, concurrency=1, prompts_per_request=1)

    def hold(number, body, answer):
        held.set()
        return HOLD

    server.lie = hold
    source.ask_ahead(batch())
    assert held.wait(WAIT_SECONDS)
    # one is under way, the others wait for their turn
    source.close()
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("limbeck-")]
    server.lie = None
    assert source.prefetch(batch()).metrics["rows_failed"] == (0.0, 6.0)


def test_a_server_that_does_not_repeat_itself_is_refused(server):
    source = remote(server)
    source.verify()
    calls = []

    def drift(prompt, choice):
        calls.append(prompt)
        for place in choice["prompt_logprobs"][1:]:
            for one in place.values():
                one["logprob"] -= 0.1 * len(calls)

    server.lie = lie_about_rows(drift)
    with pytest.raises(ServerError, match=r"up to 0\.1 apart"):
        source.verify()


def test_other_tokens_the_second_time_are_refused(server):
    """The token that came keeps its number."""
    source = remote(server)
    calls = []

    def other(prompt, choice):
        calls.append(prompt)
        for number, place in enumerate(choice["prompt_logprobs"][1:], 1):
            others = [t for t in place if t != str(prompt[number])]
            for rank, token in enumerate(others):
                place[token]["logprob"] = -1.0 if rank == len(calls) else -12.0
            place[str(prompt[number])]["logprob"] = -12.5

    server.lie = lie_about_rows(other)
    with pytest.raises(ServerError, match=r"3\d% .*other tokens"):
        source.verify()


@pytest.mark.parametrize("shift", [1, 7, 0])
def test_ids_that_name_other_tokens_are_refused(server, shift):
    """A server that knows a text by heart, but numbers all tokens but the one that was sent in another way."""
    source = remote(server)

    def shifted(prompt, choice):
        for number, place in enumerate(choice["prompt_logprobs"][1:], 1):
            known, place_ids = prompt[number], {(prompt[number] + shift) % 340: -0.1}
            place_ids |= {(known + shift + 2 + n) % 340: -9.0 - n for n in range(15)}
            place_ids[known] = -0.1 if shift == 0 else -40.0
            place.clear()
            place.update({str(t): {"logprob": v} for t, v in place_ids.items()})

    server.lie = lie_about_rows(shifted)
    if shift == 0:
        source.verify()
    else:
        with pytest.raises(ServerError, match=r"9\d% .* 16 likeliest tokens"):
            source.verify()


def test_rows_that_pad_a_head_may_be_named(server):
    """An id beyond the vocabulary is an empty place where it is as unlikely as what no text has taught."""
    source = remote(server)

    def padded(prompt, choice):
        place = choice["prompt_logprobs"][2]
        token = next(t for t in place if t != str(prompt[2]))
        place["341"] = {**place.pop(token), "logprob": -8.0}
        place[str(prompt[2])]["logprob"] = -9.0

    server.lie = lie_about_rows(padded)
    (found,) = source.score([np.array([5, 6, 7, 8])])
    assert (found.topk_ids == -1).sum() == 1
    source.verify()


def test_the_token_bucket_spreads_requests():
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    bucket = TokenBucket(600, burst=10, clock=lambda: now[0], sleep=sleep)
    for _ in range(30):
        bucket.take(50)
    # 1,500 tokens at 10 a second, of which 100 are there at the start
    assert now[0] == pytest.approx(140.0)
    bucket.take(1000)
    assert bucket.take(1) == pytest.approx(90.1)


def test_the_limit_is_applied_to_requests(server, monkeypatch):
    slept = []
    # on a clock that stands still nothing is regained while the server computes
    monkeypatch.setattr("limbeck.teachers.server.client.TokenBucket", partial(TokenBucket, clock=lambda: 0.0))
    cfg = settings(server, tokens_per_minute=6000, concurrency=1)
    source = ServerTeacher(cfg, tokenizer(340), client=ServerClient(cfg, sleep=slept.append))
    data = batch()
    source.prefetch(data)
    # the probe and the batch together pass the burst of 1,000 tokens only when asked for often
    for _ in range(4):
        source._found.clear()
        source.prefetch(data)
    assert sum(slept) > 0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_retried(server, status):
    source = remote(server, retries=3)
    failed = []

    def lie(number, body, answer):
        if len(failed) < 2:
            failed.append(number)
            return status, {"error": {"message": "busy"}}, {"retry-after": "0"}
        return None

    server.lie = lie
    metrics = source.prefetch(batch([0, 1])).metrics
    assert metrics["rows_failed"] == (0.0, 2.0)
    assert source.client.counts["retries"] == 2


def test_an_http_time_out_is_retried(server):
    source = remote(server)
    source.client = ServerClient(settings(server, timeout=0.3, retries=1))
    server.lie = lambda number, body, answer: HOLD
    with pytest.raises(ServerError, match=r"timeout: no .*answer in 0.3 s"):
        source.prefetch(batch([0]))
    assert (source.client.counts["requests"], source.client.counts["retries"]) == (2, 1)


# ---- failures and lies ---------------------------------------------------------------------------------------------


def _drop_realised(prompt, choice):
    choice.pop("prompt_token_ids", None)
    choice["prompt_logprobs"][1].pop(str(prompt[1]))


def _other_ids(prompt, choice):
    choice["prompt_token_ids"][0] += 1


def _short(prompt, choice):
    choice["prompt_logprobs"].pop()


def _smaller_k(prompt, choice):
    place = choice["prompt_logprobs"][1]
    for token in [t for t in place if t != str(prompt[1])][:3]:
        del place[token]


def _no_logprobs(prompt, choice):
    choice.pop("prompt_logprobs")


def _not_a_number(prompt, choice):
    next(iter(choice["prompt_logprobs"][2].values()))["logprob"] = float("nan")


def _too_likely(prompt, choice):
    for entry in choice["prompt_logprobs"][2].values():
        entry["logprob"] = -0.1


def _strange(prompt, choice):
    choice["prompt_logprobs"][1] = ["what"]


def _number(value):
    def change(prompt, choice):
        place = choice["prompt_logprobs"][2]
        token = next(t for t in place if t != str(prompt[2]))
        place[token]["logprob"] = value

    return change


def _huge_id(prompt, choice):
    place = choice["prompt_logprobs"][2]
    place[str(2**40)] = place.pop(next(t for t in place if t != str(prompt[2])))


def _no_index(prompt, choice):
    choice["index"] = None


def _unlikely(prompt, choice):
    for entry in choice["prompt_logprobs"][2].values():
        entry["logprob"] -= 30.0


def _beyond(prompt, choice):
    for number, place in enumerate(choice["prompt_logprobs"][1:], 1):
        for token in [t for t in place if t != str(prompt[number])]:
            place[str(int(token) + 340)] = place.pop(token)


def _one_beyond(prompt, choice):
    """A likely token alone, at one place."""
    place = choice["prompt_logprobs"][2]
    token = next(t for t in place if t != str(prompt[2]))
    place["340"] = {**place.pop(token), "logprob": -3.0}


LIES = {
    "beyond": (_beyond, r"bad_numbers: position \d+ .* 0\.\d+ "),
    "one beyond": (_one_beyond, r"bad_numbers: position 2 .* 0\.05 .* 340,"),
    "skipped": (_drop_realised, "wrong_ids: position 1 "),
    "other_ids": (_other_ids, r"wrong_ids: .* \d+ other"),
    "short": (_short, r"wrong_ids: \d+ positions"),
    "smaller_k": (_smaller_k, "wrong_k: 1[34] .* position 1, .* 16"),
    "none": (_no_logprobs, "no_logprobs"),
    "nan": (_not_a_number, "bad_numbers: position 2 holds"),
    "too_likely": (_too_likely, "bad_numbers: .* position 2 .* more than 1"),
    "strange": (_strange, r"bad_answer: log-probabilities .*Error\)"),
    "10^400": (_number(10**400), r"bad_answer: log-probabilities .*Error\)"),
    "-10^300": (_number(-1e300), "bad_numbers: position 2 holds"),
    "2^40": (_huge_id, "bad_numbers: position 2 holds"),
    "null index": (_no_index, "bad_answer: 1 choices .* 0"),
    "unlikely": (_unlikely, "bad_numbers: .* position 2 .*chance"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_stops_the_run_with_one_line(server, name):
    change, line = LIES[name]
    source = remote(server)
    server.lie = lie_about_rows(change)
    with pytest.raises(ServerError, match=line) as caught:
        student().train(batch([0]), loss_fn(), teachers=[source])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"teacher 0: the server {server.url} gave no scores for a row of ")


@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_a_row_may_be_skipped(server, name):
    source = remote(server, on_failure="skip")
    server.lie = lie_about_rows(LIES[name][0])
    assert source.prefetch(batch([0])).metrics["rows_failed"] == (1.0, 1.0)


def test_an_answer_is_no_larger_than_what_was_asked_for(server):
    source = remote(server)
    server.lie = lambda number, body, answer: (200, b'{"choices": "' + b"x" * (8 << 20) + b'"}')
    with pytest.raises(ServerError, match=r"too_large.* MiB"):
        source.prefetch(batch([0]))


@pytest.mark.parametrize("cross", [True, False])
def test_rows_without_scores_are_left_out(policy, cross, caplog):
    """The loss is that of the same batch in which this teacher never saw the row."""
    frozen = policy if cross else Policy(config(), tokenizer(300), device="cpu", seed=5, init_optimizer=False)
    data = batch(cross=cross)
    ids = data["teacher_input_ids" if cross else "input_ids"]
    bad = ids[2, : int(data["teacher_input_lengths" if cross else "input_lengths"][2])].tolist()

    def lie(number, body, answer):
        return (400, {"error": {"message": "no such prompt"}}) if bad in body["prompt"] else None

    with serving(ScoringServer(frozen, max_k=400)) as server:
        source = ServerTeacher(settings(server, on_failure="skip", k=300), frozen.tokenizer)
        server.lie = lie
        with caplog.at_level(logging.WARNING):
            got = student().train(data, loss_fn(cross), teachers=[source])
        bits = source.log_probs(data)
    masked = batch(cross=cross)
    masked["teacher_0_sample_mask"] = torch.tensor([1.0, 1, 0, 1, 1, 1])
    expected = student().train(masked, loss_fn(cross), teachers=[LiveTeacher(frozen)])
    # k = 300 of the cross teacher's 340 tokens leaves a little out
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3 if cross else 1e-5)
    assert got["metrics"]["teacher_0/rows_failed"] == (1.0, 6.0)
    assert float(got["counts"]["chunks_0"]) == float(expected["counts"]["chunks_0"])
    assert float(got["counts"]["tokens"]) == float(
        student().train(data, loss_fn(cross), teachers=[source])["counts"]["tokens"]
    )
    assert dict(source.failures) == {"http_400": 3}
    assert caplog.text.count("it is left out") == 1
    assert bits[2].isnan().all()
    assert not bits[[0, 1, 3, 4, 5]].isnan().any()


def test_a_dead_server_is_given_up(server):
    source = remote(server, on_failure="skip", give_up_after=4, retries=0)
    server.lie = lambda number, body, answer: (500, {})
    with pytest.raises(ServerError, match="as for the 3 before it"):
        source.prefetch(batch())


def test_the_model_may_vanish(server):
    source = remote(server, on_failure="skip")
    server.name = "other"
    with pytest.raises(ServerError, match=r"'tiny'.*404"):
        source.prefetch(batch([0]))


def test_the_key_is_sent_and_never_shown(policy, monkeypatch, caplog):
    monkeypatch.setenv("LIMBECK_API_KEY", KEY)
    with serving(ScoringServer(policy, key=KEY)) as server, caplog.at_level(logging.DEBUG):
        source = remote(server)
        source.prefetch(batch([0]))
        assert server.headers[-1]["authorization"] == f"Bearer {KEY}"
        server.lie = lambda number, body, answer: (400, {"error": {"message": f"your key {KEY} is\ntoo long"}})
        with pytest.raises(ServerError, match=r"your key \*\*\* is too long") as caught:
            source.prefetch(batch([1]))
        assert KEY not in str(caught.value)
    assert KEY not in caplog.text
    assert KEY not in json.dumps(source.config.model_dump(mode="json"))


def test_a_signal_travels_in_one_copy(server, monkeypatch):
    """Copied one by one, without pinned memory, each tensor would make the host wait for the device."""
    sent = []
    monkeypatch.setattr(teacher_module, "to_device", lambda tree, device: sent.append(tree) or tree)
    (mb,) = get_microbatch_iterator(batch([0, 1]), {}, 2, None, None)[0]
    signal = remote(server).signal(mb, torch.device("cpu"))
    (tree,) = sent
    assert all(getattr(tree, name) is getattr(signal, name) for name in ("topk_ids", "topk_logprobs", "next_ids"))
