"""A look at a scoring server before the run: is it there, which model, how large a k, the same tokenizer?

Everything that would otherwise show as a finite but meaningless loss is one clear line here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from limbeck.models.server_answer import choices_of, positions_of, read_choice, request_body
from limbeck.models.server_client import ServerClient, ServerFailure
from limbeck.tokens import ByteVocab, TextEncoder
from limbeck.utils.errors import ServerError

if TYPE_CHECKING:
    from limbeck.models.server_config import ServerConfig

# Several scripts, digits, code, blanks and an emoji: tokenizers that agree on all of it agree.
KNOWN_TEXT = (
    "An alembic of 1,024 ml costs 3.75; naïve cafés ordered 20 of them.\n\n\tdef f(x):\n        return x ** 2  # 平方\n"
    "你好，世界！こんにちは。 Привет, мир — العربية 🙂 https://example.org/a?b=c&d=%20"
)


@dataclass(frozen=True)
class ServerFacts:
    """What the probe found. ``max_length``: tokens of the longest prompt, where the server says so."""

    model: str
    style: str
    max_length: int | None


def probe_server(client: ServerClient, config: ServerConfig, tokenizer: Any) -> ServerFacts:
    """Ask the server everything that a run depends on; a ``ServerError`` says what does not fit."""
    return _Probe(client, config, tokenizer).run()


class _Probe:
    def __init__(self, client: ServerClient, config: ServerConfig, tokenizer: Any) -> None:
        self.client, self.config, self.tokenizer = client, config, tokenizer
        self.where = f"the server {client.url}"
        self.vocab = ByteVocab.from_tokenizer(tokenizer)
        self.ids: list[int] = TextEncoder.for_tokenizer(tokenizer).encode(KNOWN_TEXT).ids.tolist()

    def run(self) -> ServerFacts:
        model, longest = self._model()
        k = min(self.config.k, self.vocab.size)
        style = self._style(model, k)
        self._same_tokenizer(model, style)
        return ServerFacts(model, style, longest)

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        try:
            return self.client.request(method, path, body, tokens=len(self.ids) if body else 0, retries=1)
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
            raise ServerError(f"{self.where} serves {sorted(names)}; teacher.server.model is {wanted!r}")
        longest = names[wanted].get("max_model_len")
        # one place is taken by the token that a completion must generate
        return wanted, longest - 1 if isinstance(longest, int) and longest > 1 else None

    def _try(self, model: str, style: str, k: int) -> str:
        """Empty where the ids of the known text are scored correctly with this k; otherwise what is wrong."""
        status, answer = self._ask("POST", "/completions", request_body(model, [self.ids], k, style))
        if status != 200:
            return f"HTTP {status}: {self.client.error_text(answer) or 'no reason given'}"
        try:
            read_choice(choices_of(answer, 1)[0], self.ids, k, self.vocab.size, style)
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
        status, answer = self._ask("POST", "/completions", request_body(model, KNOWN_TEXT, 1, style))
        advice = "give the tokenizer of the served model as teacher.tokenizer.name"
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
                f"{len(self.ids)}; {advice}"
            )
        theirs: Sequence[Any] = said if isinstance(said, list) else [None] * count
        for position, (mine, place, other) in enumerate(zip(self.ids, places, theirs, strict=False)):
            if other not in (None, mine) or (position and mine not in place):
                raise ServerError(
                    f"{self.where} has another tokenizer: at token {position} of the known text it has "
                    f"{other if other is not None else sorted(place)}, the tokenizer here {mine}; {advice}"
                )
        self._same_bytes(choice, advice)

    def _same_bytes(self, choice: dict[str, Any], advice: str) -> None:
        """The texts that the server gives for ids, where it does, are those of the tokenizer here."""
        for place in choice.get("prompt_logprobs") or []:
            for token, entry in (place or {}).items():
                text = entry.get("decoded_token") if isinstance(entry, dict) else None
                number = int(token)
                if not isinstance(text, str) or number >= self.vocab.size or self.vocab.special[number]:
                    continue
                mine = self.vocab.token_bytes[number].decode("utf-8", "replace")
                # pieces of characters have no text, and servers differ in how they show blanks
                if "\ufffd" in mine + text or _bare(mine) == _bare(text):
                    continue
                raise ServerError(
                    f"{self.where} has another tokenizer: its token {number} is {text!r}, here {mine!r}; {advice}"
                )


def _bare(text: str) -> str:
    """Without blanks, in whatever way a tokenizer writes them."""
    return "".join(c for c in text if not c.isspace() and c not in "Ġ▁Ċĉ")
