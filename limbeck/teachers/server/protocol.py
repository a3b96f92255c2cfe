"""Answers of a scoring server: log-probabilities per prompt position, checked against the ids that were sent.

Two forms are read. vLLM's own ``prompt_logprobs`` (per position a mapping from token id to log-probability), and the
older ``echo`` with ``logprobs``, usable where tokens are given as ``token_id:<n>`` and not as ambiguous text.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.errors import ServerError
from limbeck.teachers.server.client import ServerClient, ServerConfig, ServerFailure
from limbeck.tokens import ByteTokenizer, ByteVocab
from limbeck.utils.http import MAX_BYTES

# The sum of the listed probabilities may pass 1 by the server's rounding (bfloat16 logits, float32 sums).
_SLACK = 1e-2
# Below this a 16-bit number cannot hold a log-probability; servers write -9999 for what is impossible.
_LOWEST = -65_000.0
_MOST_ID = 2**31
# Of one listed token, with its rank and text: some 75 bytes, more where tokens are long or written with escapes.
_BYTES_PER_TOKEN = 512


_ADVICE = "give the tokenizer of the served model as teacher.tokenizer.name"


class _ForeignIds(ServerFailure):
    """Probability where the teacher's tokenizer has no token."""


@dataclass(frozen=True)
class ScoredDocument:
    """Scores of a document of n tokens: ``topk_ids`` int32 and ``topk_logprobs`` float32 [n - 1, k], most likely
    first, ``next_logprob`` float32 [n - 1]. Row t is about token t + 1."""

    topk_ids: npt.NDArray[np.int32]
    topk_logprobs: npt.NDArray[np.float32]
    next_logprob: npt.NDArray[np.float32]


def request_body(model: str, prompts: Any, k: int, style: str) -> dict[str, Any]:
    """The body of a request that scores ``prompts`` (a text, or one or more lists of token ids)."""
    body: dict[str, Any] = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0.0}
    if style == "prompt_logprobs":
        return {**body, "prompt_logprobs": k, "return_token_ids": True, "add_special_tokens": False}
    return {**body, "echo": True, "logprobs": k, "return_tokens_as_token_ids": True, "add_special_tokens": False}


def answer_bytes(tokens: int, k: int) -> int:
    """Bytes that the answer to a request of so many prompt tokens may have."""
    return MAX_BYTES + tokens * (k + 1) * _BYTES_PER_TOKEN


def choices_of(answer: Any, prompts: int) -> list[dict[str, Any]]:
    """The answer's choices in the order of the prompts."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise ServerFailure("bad_answer", "the body is no completion")
    # the very type: true would be 1
    by_index = {c.get("index", i): c for i, c in enumerate(choices) if type(c.get("index", i)) is int}
    if len(choices) != prompts or by_index.keys() != set(range(prompts)):
        raise ServerFailure("bad_answer", f"{len(choices)} choices for {prompts} prompts, or not numbered from 0")
    return [by_index[i] for i in range(prompts)]


def positions_of(choice: dict[str, Any], style: str) -> list[dict[int, float]]:
    """Per prompt position the log-probability by token id; empty at the first, which nothing predicts."""
    try:
        if style == "prompt_logprobs":
            listed = choice.get("prompt_logprobs")
            if not isinstance(listed, list):
                raise ServerFailure("no_logprobs", "the answer holds no prompt_logprobs")
            return [
                {int(token): float(entry["logprob"]) for token, entry in (position or {}).items()}
                for position in listed
            ]
        return _echoed(choice)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServerFailure("bad_answer", f"log-probabilities in an unknown form ({type(error).__name__})") from error


def _echoed(choice: dict[str, Any]) -> list[dict[int, float]]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.get("top_logprobs"):
        raise ServerFailure("no_logprobs", "the answer holds no log-probabilities of the prompt")
    out: list[dict[int, float]] = []
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, value, top in zip(*columns, strict=True):
        logprob_of = {} if value is None else {_token_id(name): float(x) for name, x in (top or {}).items()}
        if value is not None:
            logprob_of[_token_id(token)] = float(value)
        out.append(logprob_of)
    return out


def _token_id(name: str) -> int:
    if not name.startswith("token_id:"):
        raise ServerFailure("no_token_ids", "the server names tokens by their text, which does not tell which they are")
    return int(name.removeprefix("token_id:"))


def read_choice(choice: dict[str, Any], ids: Sequence[int], k: int, vocab_size: int, style: str) -> ScoredDocument:
    """Scores of the document ``ids``; a ``ServerFailure`` where the server scored anything else.

    An id beyond ``vocab_size`` (a padded row of the server's head, which no text has taught anything) becomes -1, an
    empty place; together they may have a hundredth of the probability of a position.
    """
    said = choice.get("prompt_token_ids")
    if isinstance(said, list) and said != list(ids):
        raise ServerFailure("wrong_ids", f"the server scored {len(said)} other token ids than the {len(ids)} sent")
    places = positions_of(choice, style)
    rows = len(ids) - 1
    # with echo, the token that had to be generated stands at the end
    if len(places) not in (len(ids), len(ids) + (style == "echo")):
        raise ServerFailure("wrong_ids", f"{len(places)} positions for {len(ids)} tokens")
    topk_ids = np.full((rows, k), -1, np.int32)
    topk = np.zeros((rows, k), np.float32)
    next_logprob = np.zeros(rows, np.float32)
    for row in range(rows):
        position = places[row + 1]
        next_logprob[row] = _read_place(position, int(ids[row + 1]), k, topk_ids[row], topk[row], row + 1)
        _check_mass(topk[row], k / vocab_size, row + 1)
    beyond = topk_ids >= vocab_size
    outside = np.where(beyond, np.exp(topk), 0.0).sum(-1)
    if outside.max(initial=0.0) > _SLACK:
        worst = int(outside.argmax())
        raise _ForeignIds(
            "bad_numbers",
            f"position {worst + 1} gives {outside[worst]:.2f} of the probability to ids such as "
            f"{int(topk_ids[worst][beyond[worst]][0])}, and the teacher's tokenizer has {vocab_size}",
        )
    topk_ids[beyond] = -1
    return ScoredDocument(topk_ids, topk, next_logprob)


def _check_mass(logprobs: npt.NDArray[np.float32], share: float, position: int) -> None:
    """The most likely tokens hold at least the share that they have where all are equally likely."""
    # the server's head may be wider than the vocabulary, but not twice as wide
    if float(np.exp(logprobs).sum()) < share / 2:
        raise ServerFailure("bad_numbers", f"the most likely tokens at position {position} are less likely than chance")


def _read_place(
    logprob_of: dict[int, float],
    realised: int,
    k: int,
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    position: int,
) -> float:
    """Fill one row from the k most likely; the realised token stands beside them where it is not one of them."""
    if realised not in logprob_of:
        raise ServerFailure("wrong_ids", f"position {position} was scored without the token {realised} that was sent")
    if len(logprob_of) not in (k, k + 1):
        raise ServerFailure("wrong_k", f"{len(logprob_of)} log-probabilities at position {position}, asked for {k}")
    next_logprob = logprob_of[realised]
    in_range = all(_LOWEST <= value <= _SLACK for value in logprob_of.values())
    if not in_range or not 0 <= min(logprob_of) <= max(logprob_of) < _MOST_ID:
        raise ServerFailure("bad_numbers", f"position {position} holds values that are no log-probabilities")
    if sum(math.exp(value) for value in logprob_of.values()) > 1 + _SLACK:
        raise ServerFailure("bad_numbers", f"the probabilities at position {position} add up to more than 1")
    # equal ones by their ids, whatever order the server wrote them in
    top = sorted(logprob_of.items(), key=lambda item: (-item[1], item[0]))
    if len(logprob_of) == k + 1:
        # ties aside, the extra one is the least likely
        if next_logprob > top[-1][1] + 1e-6 * abs(next_logprob):
            raise ServerFailure("wrong_k", f"{k + 1} log-probabilities at position {position}, asked for {k}")
        top = [item for item in top if item[0] != realised]
    ids[:] = [token for token, _ in top]
    # within the slack a server's rounding may pass 0
    logprobs[:] = [min(value, 0.0) for _, value in top]
    return min(next_logprob, 0.0)


def pack_scores(scores: Sequence[ScoredDocument | ServerFailure], **facts: int) -> bytes:
    """Scores and failures as bytes for another process: length of a JSON head (8 bytes), the head, plain arrays."""
    rows: list[Any] = []
    arrays: list[bytes] = []
    for one in scores:
        if isinstance(one, ServerFailure):
            rows.append([one.reason, one.detail])
            continue
        rows.append(list(one.topk_ids.shape))
        arrays += [one.topk_ids.tobytes(), one.topk_logprobs.tobytes(), one.next_logprob.tobytes()]
    head = json.dumps({"rows": rows, **facts}).encode()
    return b"".join((struct.pack("<Q", len(head)), head, *arrays))


def unpack_scores(raw: bytes) -> tuple[list[ScoredDocument | ServerFailure], dict[str, int]]:
    """Scores that :func:`pack_scores` was given."""
    offset = 8 + int(struct.unpack("<Q", raw[:8])[0])
    facts = json.loads(raw[8:offset])

    def take(dtype: Any, *shape: int) -> npt.NDArray[Any]:
        nonlocal offset
        # a copy: an array over bytes is read-only, which torch does not know
        array = np.frombuffer(raw, dtype, math.prod(shape), offset).reshape(shape).copy()
        offset += array.nbytes
        return array

    out: list[ScoredDocument | ServerFailure] = []
    for row in facts.pop("rows"):
        if isinstance(row[0], str):
            out.append(ServerFailure(row[0], row[1]))
        else:
            out.append(ScoredDocument(take(np.int32, *row), take(np.float32, *row), take(np.float32, row[0])))
    return out, facts


# -- probe -------------------------------------------------------------------------------------------------------------


# Several scripts, digits, code, blanks and an emoji: tokenizers that agree on all of it agree.
KNOWN_TEXT = (
    "An alembic of 1,024 ml costs 3.75; naïve cafés ordered 20 of them.\n\n\tdef f(x):\n        return x ** 2  # 平方\n"
    "你好，世界！こんにちは。 Привет, мир — العربية 🙂 https://example.org/a?b=c&d=%20"
)


@dataclass(frozen=True)
class ServerFacts:
    """Findings of the probe. ``max_length``: tokens of the longest prompt, where the server says so."""

    model: str
    style: str
    max_length: int | None


def probe_server(client: ServerClient, config: ServerConfig, tokenizer: object) -> ServerFacts:
    """Ask the server everything that a run depends on; a ``ServerError`` says what does not fit."""
    return _Probe(client, config, tokenizer).run()


class _Probe:
    def __init__(self, client: ServerClient, config: ServerConfig, tokenizer: object) -> None:
        self.client, self.config, self.tokenizer = client, config, tokenizer
        self.where = f"the server {client.url}"
        self.vocab = ByteVocab.from_tokenizer(tokenizer)
        self.ids: list[int] = ByteTokenizer.of(tokenizer).encode(KNOWN_TEXT).ids.tolist()

    def run(self) -> ServerFacts:
        model, longest = self._model()
        k = min(self.config.k, self.vocab.size)
        style = self._style(model, k)
        self._same_tokenizer(model, style)
        return ServerFacts(model, style, longest)

    def _ask(self, method: str, path: str, body: Any = None, k: int = 0) -> tuple[int, Any]:
        """``k``: how many tokens per position the body asks for."""
        tokens = len(self.ids) if body else 0
        # another tokenizer may cut the known text finer, down to bytes
        most = answer_bytes(len(KNOWN_TEXT.encode()), k)
        try:
            return self.client.request(method, path, body, tokens=tokens, retries=1, max_bytes=most)
        except ServerFailure as failure:
            if failure.reason in ("connection", "timeout"):
                raise ServerError(
                    f"{self.where} cannot be reached ({failure}); check teacher.server.url and that it runs"
                ) from failure
            raise ServerError(f"{self.where} does not answer the first requests ({failure}); look at its log") from None

    def _model(self) -> tuple[str, int | None]:
        status, answer = self._ask("GET", "/models")
        cards = answer.get("data") if isinstance(answer, dict) and status == 200 else None
        wanted = self.config.model
        if not isinstance(cards, list):
            if wanted is None:
                raise ServerError(
                    f"{self.where} lists no models (HTTP {status}); set teacher.server.model, and check that the "
                    "address ends in /v1"
                )
            return wanted, None
        names = {str(c.get("id")): c for c in cards if isinstance(c, dict)}
        if wanted is None and len(names) == 1:
            wanted = next(iter(names))
        if wanted is None or wanted not in names:
            served = self.client.clean(str(sorted(names)))
            raise ServerError(f"{self.where} serves {served}; teacher.server.model is {wanted!r}")
        longest = names[wanted].get("max_model_len")
        # one place is taken by the token that a completion must generate
        return wanted, longest - 1 if isinstance(longest, int) and longest > 1 else None

    def _try(self, model: str, style: str, k: int) -> str:
        """Empty where the ids of the known text are scored correctly with this k; otherwise what is wrong."""
        status, answer = self._ask("POST", "/completions", request_body(model, [self.ids], k, style), k)
        if status != 200:
            return f"HTTP {status}: {self.client.error_text(answer) or 'no reason given'}"
        try:
            read_choice(choices_of(answer, 1)[0], self.ids, k, self.vocab.size, style)
        except _ForeignIds as failure:
            raise ServerError(f"{self.where} has another tokenizer: {failure.detail}; {_ADVICE}") from None
        except ServerFailure as failure:
            if failure.reason == "wrong_ids":
                raise ServerError(
                    f"{self.where} does not score the token ids that it is sent: {failure.detail}"
                ) from None
            return str(failure)
        return ""

    def _style(self, model: str, k: int) -> str:
        wrong: dict[str, str] = {}
        for style in ("prompt_logprobs", "echo"):
            wrong[style] = self._try(model, style, k)
            if not wrong[style]:
                return style
            # refused for its k or for good: one token is asked for to tell the two apart
            if k > 1 and not self._try(model, style, 1):
                most = self._largest(model, style, k)
                raise ServerError(
                    f"{self.where} gives at most {most} log-probabilities per position and teacher.server.k is {k} "
                    f"({wrong[style]}); lower k, or start the server with more (vLLM: --max-logprobs {k})"
                )
        raise ServerError(
            f"{self.where} gives no log-probabilities of the prompt (prompt_logprobs: {wrong['prompt_logprobs']}; "
            f"echo: {wrong['echo']}); serve the teacher with vLLM, or cache its signals instead"
        )

    def _largest(self, model: str, style: str, k: int) -> int:
        low, high = 1, k
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._try(model, style, middle) else (middle, high)
        return low

    def _same_tokenizer(self, model: str, style: str) -> None:
        """The server tokenizes the known text itself; ids and the text behind them must be those of the tokenizer."""
        status, answer = self._ask("POST", "/completions", request_body(model, KNOWN_TEXT, 1, style), 1)
        if status != 200:
            raise ServerError(f"{self.where} does not score a text (HTTP {status}: {self.client.error_text(answer)})")
        try:
            choice = choices_of(answer, 1)[0]
            places = positions_of(choice, style)
        except ServerFailure as failure:
            raise ServerError(f"{self.where} does not score a text ({failure})") from None
        said = choice.get("prompt_token_ids")
        count = len(said) if isinstance(said, list) else len(places) - (style == "echo")
        if count != len(self.ids):
            raise ServerError(
                f"{self.where} has another tokenizer: it reads the known text as {count} tokens, the tokenizer here as "
                f"{len(self.ids)}; {_ADVICE}"
            )
        theirs: Sequence[Any] = said if isinstance(said, list) else [None] * count
        for position, (mine, own_position, other) in enumerate(zip(self.ids, places, theirs, strict=False)):
            if other not in (None, mine) or (position and mine not in own_position):
                raise ServerError(
                    f"{self.where} has another tokenizer: at token {position} of the known text it has "
                    f"{self.client.clean(repr(sorted(own_position) if other is None else other))}, the tokenizer here "
                    f"{mine}; {_ADVICE}"
                )
        self._same_bytes(choice)

    def _same_bytes(self, choice: dict[str, Any]) -> None:
        """The texts that the server gives for ids, where it does, are those of the tokenizer here."""
        for position in choice.get("prompt_logprobs") or []:
            for token, entry in (position or {}).items():
                text = entry.get("decoded_token") if isinstance(entry, dict) else None
                number = int(token)
                if not isinstance(text, str) or not 0 <= number < self.vocab.size or self.vocab.special[number]:
                    continue
                mine = self.vocab.token_bytes[number].decode("utf-8", "replace")
                # pieces of characters have no text, and servers differ in how they show blanks
                if "\ufffd" in mine + text or _bare(mine) == _bare(text):
                    continue
                raise ServerError(
                    f"{self.where} has another tokenizer: its token {number} is {self.client.clean(repr(text))}, here "
                    f"{mine!r}; {_ADVICE}"
                )


def _bare(text: str) -> str:
    """Without blanks, in whatever way a tokenizer writes them."""
    return "".join(c for c in text if not c.isspace() and c not in "Ġ▁Ċĉ")
