"""``limbeck write``: a teacher answers prompts, a verifier keeps what is right, and the result is data to train on.

Prompts are dealt with in blocks. A block is claimed by a lock that ends with its process, written to a file of its own
and renamed, so that a kill loses at most the blocks in work and doubles none, and any number of processes share a file
of prompts. Each answer has a seed of its own, from the prompt's number and its own number among the prompt's answers.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from limbeck.algorithms.engine import EngineConfig
from limbeck.algorithms.rollouts import sample_seed
from limbeck.algorithms.vllm_sampler import VllmSampler, load_vllm
from limbeck.config import FREE
from limbeck.data.problems import Problem, Problems, PromptReading, encode_prompt
from limbeck.data.readers import HUB_PREFIX, BadRecord
from limbeck.distributed.device import default_device
from limbeck.errors import ConfigError, DataError, LimbeckError, ServerError, one_line
from limbeck.evaluation.bits import EvalModel, EvalOptions
from limbeck.evaluation.models import find_model
from limbeck.models.continuous import ContinuousSampler, make_local_sampler
from limbeck.models.generate import CPU_ANSWERS, MOST_ANSWERS, Sampler, SamplingConfig
from limbeck.models.language_model import LanguageModel
from limbeck.teachers.server.client import ServerClient, ServerConfig, ServerFailure
from limbeck.tokens import ByteTokenizer, load_tokenizer
from limbeck.tokens.chat.calls import WrittenCall, wire_message, written_calls
from limbeck.tokens.chat.teacher_context import ContextForm, add_context
from limbeck.utils.files import write_atomic
from limbeck.utils.progress import Progress, Silent, say, stage
from limbeck.verifiers import Answer, AnyVerifier, Verdict

PROVENANCE = "provenance"
"""Key of a record that says who wrote its answer, and how: ``writer``, ``engine``, ``temperature``, ``number``,
``top_p``, ``seed``, ``prompt``, ``source``, ``ended`` and ``verdict``."""
_THOUGHT = re.compile(r"^\s*(?:<think>)?(.*?)</think>", re.DOTALL)


class WriteConfig(PromptReading):
    """Settings of what is written, by whom, and which of it is kept."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    prompts: list[str]
    """Files, globs, folders, or ``hf:owner/name``."""
    teacher: str | None = None
    """Model folder or hub id; behind a server the name of the model there."""
    output: str
    """JSON lines to write."""
    answers: int = Field(default=1, ge=1)
    """Answers to each prompt."""
    temperature: float = Field(default=0.7, ge=0)
    """0: always the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Choose among the most likely tokens that have this much probability together."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Most tokens of an answer."""
    seed: int = Field(default=0, ge=0)
    """Seed of all answers."""
    verifier: AnyVerifier | None = None
    """Judge of an answer."""
    keep: Literal["verified", "all"] = "verified"
    """Right answers alone, or, with their verdicts, all that are no duplicates; without a verifier whole answers."""
    teacher_context_as: ContextForm = "system"
    """Place of a prompt's ``teacher_context``, as ``data.teacher_context_as``; its record keeps it."""
    reasoning: Literal["keep", "strip"] = "keep"
    """Whether what stands in front of ``</think>`` stays, as ``reasoning_content``."""
    engine: Literal["auto", "generate", "continuous", "vllm", "server"] = Field(default="auto", json_schema_extra=FREE)
    """As ``on_policy.sampler``; ``vllm`` in this process; ``server``: an OpenAI-compatible one."""
    server: ServerConfig | None = Field(default=None, json_schema_extra=FREE)
    """Where the server is."""
    batch_size: int | None = Field(default=None, ge=1, json_schema_extra=FREE)
    """Answers that are written at a time; null: 32 on a CPU or of a server, on an accelerator what its memory holds."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first so many prompts."""

    @model_validator(mode="after")
    def _consistent(self) -> WriteConfig:
        if (self.engine == "server") != (self.server is not None):
            raise ValueError("the engine 'server' and the server's address belong together; give both or neither")
        if self.server is None and self.teacher is None:
            raise ValueError("no teacher is named; give --teacher MODEL, or --server URL")
        if self.temperature == 0 and self.answers > 1:
            raise ValueError("at temperature 0 all answers to a prompt are the same; set answers to 1")
        if self.server is not None and self.teacher_context_as == "hint":
            raise ValueError("the teacher's template says where a hint goes, and a server does not show it; use user")
        return self

    def order(self) -> dict[str, Any]:
        """Settings that must be the same where the work is gone on with."""
        free = {"engine", "server", "batch_size", "output"}
        return self.model_dump(mode="json", exclude=free)


@dataclass(frozen=True)
class Written:
    """An answer as its engine gave it; ``calls``: where the engine parses tool calls itself."""

    text: str
    tokens: int
    ended: bool
    reasoning: str | None = None
    calls: tuple[WrittenCall, ...] | None = None


class AnswerWriter(ABC):
    """Whoever answers prompts."""

    name: str
    engine: str

    @abstractmethod
    def write(self, problems: Sequence[Problem], seeds: Sequence[int]) -> list[Written | LimbeckError]:
        """An answer to each, or why there is none."""

    def close(self) -> None:
        """Let go of what it holds."""


class SamplerWriter(AnswerWriter):
    """A sampler of on-policy runs, with the teacher in the student's place."""

    def __init__(
        self, config: WriteConfig, engine: str, sampler: Sampler, tokenizer: ByteTokenizer, *, room: int
    ) -> None:
        self.name, self.context_as = str(config.teacher), config.teacher_context_as
        self.engine, self.sampler, self.tokenizer, self.room = engine, sampler, tokenizer, room

    def write(self, problems: Sequence[Problem], seeds: Sequence[int]) -> list[Written | LimbeckError]:
        written: list[Written | LimbeckError] = []
        ids = []
        for problem in problems:
            try:
                with_context = _in_context(problem, self.context_as, self.tokenizer)
                prompt = encode_prompt(self.tokenizer, with_context, name=self.name)
                if len(prompt) > self.room:
                    raise DataError(f"the prompt has {len(prompt)} tokens, and {self.room} leave room for an answer")
                ids.append(prompt)
                # keeps the place until the sampler has answered
                written.append(Written("", 0, False))
            except LimbeckError as error:
                written.append(error)
        usable = [number for number, one in enumerate(written) if isinstance(one, Written)]
        vocab = self.tokenizer.vocab
        samples = self.sampler.sample(ids, seed=[seeds[number] for number in usable]) if ids else []
        for sample in samples:
            tokens = sample.ids_T.tolist()
            # special tokens, which the end of an answer is, are no part of what it says
            text = vocab.join([token for token in tokens if not vocab.special[token]]).decode("utf-8", "replace")
            written[usable[sample.prompt]] = Written(text, len(tokens), sample.ended)
        return written


class TeacherVllm(VllmSampler):
    """vLLM with a teacher's weights, which stay as they are."""

    def __init__(self, model: str, sampling: SamplingConfig, end_ids: Sequence[int], vocab_size: int) -> None:
        super().__init__(EngineConfig(vllm={}, weights=model), sampling, end_ids, vocab_size)
        self._engine = self._vllm.LLM(model=model)

    def sync(self, model: LanguageModel, step: int) -> None:
        """Nothing changes."""


class ServerWriter(AnswerWriter):
    """An OpenAI-compatible chat server."""

    engine = "server"

    def __init__(self, config: WriteConfig) -> None:
        assert config.server is not None
        self.config, self.client = config, ServerClient(config.server)
        self.name = config.teacher or config.server.model or self._served()

    def _served(self) -> str:
        status, answer = self._ask("GET", "/models", None)
        served = [m.get("id") for m in (answer or {}).get("data", [])] if status == 200 else []
        if len(served) != 1:
            raise ServerError(f"the server {self.client.url} serves {served or 'nothing'}; name one with --teacher")
        return str(served[0])

    def _ask(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        try:
            return self.client.request(method, path, body, tokens=self.config.max_new_tokens)
        except ServerFailure as failure:
            raise ServerError(
                f"the server {self.client.url} does not answer ({failure}); what is written is kept: start the command "
                "again and it goes on"
            ) from failure

    def write(self, problems: Sequence[Problem], seeds: Sequence[int]) -> list[Written | LimbeckError]:
        assert self.config.server is not None
        with ThreadPoolExecutor(max_workers=self.config.server.concurrency) as pool:
            return list(pool.map(self._one, problems, seeds))

    def _one(self, problem: Problem, seed: int) -> Written | LimbeckError:
        config = self.config
        body = {
            "model": self.name,
            "messages": [wire_message(m) for m in _in_context(problem, config.teacher_context_as).messages],
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": config.max_new_tokens,
            "seed": seed,
            **({"tools": problem.tools} if problem.tools else {}),
            **({"chat_template_kwargs": kwargs} if (kwargs := problem.record.get("template_kwargs")) else {}),
        }
        status, answer = self._ask("POST", "/chat/completions", body)
        # this prompt's fault: the others are asked all the same
        if status in (400, 413, 422):
            return DataError(f"the server refuses it: HTTP {status} ({self.client.error_text(answer)})")
        if status != 200:
            raise ServerError(
                f"the server {self.client.url} does not write: HTTP {status} ({self.client.error_text(answer)})"
            )
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = choice.get("message")
        if not isinstance(message, dict):
            raise ServerError(f"the server {self.client.url} gave no message; expected a chat completion")
        usage = answer.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
        thought = message.get("reasoning_content") or message.get("reasoning")
        return Written(
            str(message.get("content") or ""),
            tokens if isinstance(tokens, int) else 0,
            choice.get("finish_reason") != "length",
            thought if isinstance(thought, str) else None,
            tuple(_server_calls(message.get("tool_calls"))) if message.get("tool_calls") else None,
        )

    def close(self) -> None:
        self.client.close()


def _in_context(problem: Problem, form: ContextForm, tokenizer: ByteTokenizer | None = None) -> Problem:
    """A prompt as its teacher reads it."""
    if problem.context is None:
        return problem
    with_context = add_context(problem.messages, problem.context, form, tokenizer, to_come=True)
    return replace(problem, messages=with_context.messages)


def _server_calls(calls: Any) -> Iterator[WrittenCall]:
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            yield WrittenCall(function["name"], arguments, call.get("id"))


def make_writer(config: WriteConfig) -> AnswerWriter:
    """The writer that the settings name; loads its model."""
    if config.server is not None:
        return ServerWriter(config)
    assert config.teacher is not None
    if config.engine == "vllm":
        load_vllm()
        source = find_model(config.teacher)
        tokenizer = ByteTokenizer.of(load_tokenizer(source.tokenizer))
        sampler: Sampler = TeacherVllm(
            source.weights, _sampling(config), tokenizer.vocab.end_ids(), tokenizer.vocab.size
        )
        return SamplerWriter(config, "vllm", sampler, tokenizer, room=1 << 30)
    with stage(f"loading {config.teacher}"):
        model = EvalModel(find_model(config.teacher), EvalOptions())
    kind: Any = config.engine
    # a head may be narrower than its tokenizer
    ends = model.encoder.vocab.end_ids(model.policy.vocab_size)
    sampler = make_local_sampler(model.policy, kind, _sampling(config), ends, model.encoder.vocab)
    engine = "continuous" if isinstance(sampler, ContinuousSampler) else "generate"
    room = model.limit() - config.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"answers of {config.max_new_tokens} tokens leave no room for a prompt in the {model.limit()} positions of "
            f"{config.teacher!r}; lower --max-new-tokens"
        )
    return SamplerWriter(config, engine, sampler, model.encoder, room=room)


def _sampling(config: WriteConfig) -> SamplingConfig:
    return SamplingConfig(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        batch_size=config.batch_size,
    )


# -- records -----------------------------------------------------------------------------------------------------------


def message_of(written: Written, *, has_tools: bool, reasoning: Literal["keep", "strip"]) -> dict[str, Any]:
    """An answer as a message: its tool calls, where tools were offered, and its reasoning in keys of their own."""
    text, thought = written.text, written.reasoning
    if thought is None and (block := _THOUGHT.match(text)) is not None:
        thought, text = block[1], text[block.end() :]
    calls = list(written.calls) if written.calls is not None else written_calls(text) if has_tools else []
    message: dict[str, Any] = {"role": "assistant", "content": text.strip()}
    if calls:
        if written.calls is None:
            # what stands in front of the first call is said, the rest is markup
            message["content"] = re.split(r"<tool_call>|<function=|\{\s*\"name\"", text, maxsplit=1)[0].strip()
        message["tool_calls"] = [
            {
                "id": call.id or f"call{number:05}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls)
        ]
    if thought is not None and thought.strip() and reasoning == "keep":
        message["reasoning_content"] = thought.strip()
    return message


@dataclass
class Counts:
    """Outcome of prompts and answers. Figures of several blocks add up."""

    prompts: int = 0
    answers: int = 0
    kept: int = 0
    right: int = 0
    tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons of answers that are not right or not kept: ``cut_off``, ``no_answer``, ``wrong``, ``failed``,
    ``duplicate``, ``empty``."""
    bad: Counter[str] = field(default_factory=Counter)
    """Reasons of prompts that were not answered."""

    def add(self, other: Counts) -> None:
        """Add another block's."""
        for name in ("prompts", "answers", "kept", "right", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)
        self.bad.update(other.bad)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; see ``of``."""
        return {**vars(self), "reasons": dict(self.reasons), "bad": dict(self.bad)}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Counts:
        """Figures from what ``as_dict`` gave."""
        return cls(**{**stored, "reasons": Counter(stored["reasons"]), "bad": Counter(stored["bad"])})


def write_block(
    config: WriteConfig, writer: AnswerWriter, problems: Problems, numbers: Sequence[int]
) -> tuple[list[dict[str, Any]], Counts]:
    """The records of some prompts, and what became of all answers to them."""
    counts, asked = Counts(), list[Problem]()
    for number in numbers:
        counts.prompts += 1
        try:
            problem = problems[number]
            if config.verifier is not None:
                config.verifier.check(problem.record)
            asked.append(problem)
        except (BadRecord, DataError) as error:
            _refuse(
                counts,
                problems.location(number),
                error,
                error.reason if isinstance(error, BadRecord) else "unverifiable",
            )
    pairs = [(problem, number) for problem in asked for number in range(config.answers)]
    seeds = [sample_seed(config.seed, number, problem.number) for problem, number in pairs]
    outcomes = writer.write([problem for problem, _ in pairs], seeds)
    verdicts = _verdicts(config, pairs, outcomes)
    records, known = [], set[tuple[int, str]]()
    for (problem, number), seed, one in zip(pairs, seeds, outcomes, strict=True):
        if isinstance(one, LimbeckError):
            # once for a prompt, not for each of its answers
            if number == 0:
                _refuse(counts, problem.source, one, "refused")
            continue
        counts.answers += 1
        counts.tokens += one.tokens
        message = message_of(one, has_tools=bool(problem.tools), reasoning=config.reasoning)
        verdict = verdicts.get((problem.number, number))
        counts.right += verdict is not None and one.ended and verdict.right
        key = problem.number, json.dumps(message, sort_keys=True)
        reason = _reason(one, message, verdict, key in known)
        known.add(key)
        if reason is not None:
            counts.reasons[reason] += 1
        if reason in ("duplicate", "empty") or (reason is not None and config.keep == "verified"):
            continue
        counts.kept += 1
        records.append(_record(config, writer, problem, number, seed, message, one, verdict))
    return records, counts


def _verdicts(
    config: WriteConfig, pairs: Sequence[tuple[Problem, int]], outcomes: Sequence[Written | LimbeckError]
) -> dict[tuple[int, int], Verdict]:
    if config.verifier is None:
        return {}
    judged = [(pair, one) for pair, one in zip(pairs, outcomes, strict=True) if isinstance(one, Written)]
    answers = [Answer(one.text, one.calls) for _, one in judged]
    verdicts = config.verifier.verify_all(answers, [problem.record for (problem, _), _ in judged])
    return {(problem.number, number): v for ((problem, number), _), v in zip(judged, verdicts, strict=True)}


def _reason(one: Written, message: Mapping[str, Any], verdict: Verdict | None, repeated: bool) -> str | None:
    """Why an answer is not simply right; None where it is, or where nobody judges."""
    if not one.ended:
        return "cut_off"
    if not message["content"] and not message.get("tool_calls"):
        return "empty"
    if verdict is not None and not verdict.right:
        return verdict.reason
    return "duplicate" if repeated else None


def _record(
    config: WriteConfig,
    writer: AnswerWriter,
    problem: Problem,
    number: int,
    seed: int,
    message: dict[str, Any],
    one: Written,
    verdict: Verdict | None,
) -> dict[str, Any]:
    judged: dict[str, Any] | None = None
    if verdict is not None and config.verifier is not None:
        judged = {"verifier": config.verifier.name, "right": verdict.right, "score": verdict.score}
        judged |= {"reason": verdict.reason, "why": verdict.why} if verdict.why else {"reason": verdict.reason}
    provenance: dict[str, Any] = {"writer": writer.name, "engine": writer.engine}
    provenance |= {"temperature": config.temperature, "top_p": config.top_p, "number": number, "seed": seed}
    provenance |= {"prompt": problem.number, "source": problem.source, "ended": one.ended, "verdict": judged}
    kept = {"tools": problem.tools, "teacher_context": problem.context}
    kept |= {"template_kwargs": problem.record.get("template_kwargs")}
    more = {key: value for key, value in kept.items() if value}
    return {"messages": [*problem.messages, message], **more, PROVENANCE: provenance}


def _refuse(counts: Counts, where: str, error: Exception, reason: str) -> None:
    counts.bad[reason] += 1
    say(f"{where}: {one_line(error, 200)}; this prompt is left out")


# -- blocks ------------------------------------------------------------------------------------------------------------


class Blocks:
    """The work on an output: blocks of prompts, each claimed by one process at a time.

    ``OUTPUT.work`` holds ``order.json`` and, for each block that is done, its records and its counts; the counts are
    written last. When all are done they become ``OUTPUT`` and ``OUTPUT.summary``.
    """

    def __init__(self, config: WriteConfig, problems: Problems) -> None:
        self.output = Path(config.output)
        self.folder = self.output.with_name(f"{self.output.name}.work")
        self.summary = self.output.with_name(f"{self.output.name}.summary")
        self.total = min(len(problems), config.limit or len(problems))
        local = [path for path in problems.paths if not path.startswith(HUB_PREFIX)]
        self.order = {**config.order(), "found": len(problems), "bytes": [os.path.getsize(path) for path in local]}
        if self.output.exists() and not self.summary.exists() and not self.folder.exists():
            raise ConfigError(
                f"{str(self.output)!r} is no work of limbeck write, which would replace it; give another -o"
            )
        self.size = 0
        # again where the folder went between the two looks: another process has joined the blocks and removed it
        while not self.size and not self.is_done:
            self._open(max(1, _block_answers(config) // config.answers))
        if self.is_done:
            self._same(self.summary)
            # a kill may have come before it was gone
            shutil.rmtree(self.folder, ignore_errors=True)
        starts = range(0, self.total, max(self.size, 1))
        self.blocks = [range(start, min(start + self.size, self.total)) for start in starts]

    def _open(self, size: int) -> None:
        """Begin the work, or take part in what others have begun."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / "order.json"
        with _claimed(self.folder / "order.lock", wait=True) as claimed:
            if not claimed or self.is_done:
                # another process has just finished it
                return
            if kept.exists():
                self._same(kept)
            else:
                write_atomic(kept, json.dumps({"order": self.order, "block": size}, indent=1))
            self.size = int(json.loads(kept.read_text(encoding="utf-8"))["block"])

    @property
    def is_done(self) -> bool:
        """Whether the output is whole."""
        return self.summary.exists() and self.output.exists()

    def _same(self, path: Path) -> None:
        stored = json.loads(path.read_text(encoding="utf-8"))["order"]
        wanted = json.loads(json.dumps(self.order))
        changed = [key for key in wanted if stored.get(key) != wanted[key]]
        if changed:
            key = changed[0]
            raise ConfigError(
                f"{str(self.output)!r} was begun with {key} {stored.get(key)!r}, and this is {wanted[key]!r}; go on "
                "with the same settings, or give another -o"
            )

    def counts(self) -> Counts:
        total = Counts()
        if self.is_done:
            return Counts.of(json.loads(self.summary.read_text(encoding="utf-8"))["counts"])
        for path in self.folder.glob("*.counts"):
            total.add(Counts.of(json.loads(path.read_text(encoding="utf-8"))))
        return total

    def open_blocks(self) -> Iterator[tuple[int, range]]:
        """Blocks that nobody has done and nobody else works on, each claimed while it is handed out."""
        for number, prompts in enumerate(self.blocks):
            if self._counts_of(number).exists():
                continue
            with _claimed(self.folder / f"{number:06}.lock") as claimed:
                # another process may have done it in between
                if claimed and self.folder.is_dir() and not self._counts_of(number).exists():
                    yield number, prompts

    def store(self, number: int, records: Sequence[Mapping[str, Any]], counts: Counts) -> None:
        """Keep what a block has given."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_atomic(self.folder / f"{number:06}.jsonl", lines.encode("utf-8", "replace"))
        # last: a block is done once its counts are there
        write_atomic(self._counts_of(number), json.dumps(counts.as_dict()))

    def stored(self) -> int:
        """Prompts in blocks that are done, by whichever process."""
        return sum(1 for _ in self.folder.glob("*.counts")) * self.size

    def _counts_of(self, number: int) -> Path:
        return self.folder / f"{number:06}.counts"

    def finish(self) -> bool:
        """Join the blocks where all are done; False where others still work on some."""
        if self.is_done:
            return True
        with _claimed(self.folder / "order.lock", wait=True) as claimed:
            if (
                self.is_done
                or not claimed
                or not all(self._counts_of(number).exists() for number in range(len(self.blocks)))
            ):
                return self.is_done
            counts = self.counts()
            partial = self.output.with_name(f"{self.output.name}.joined")
            with open(partial, "wb") as joined:
                for number in range(len(self.blocks)):
                    joined.write((self.folder / f"{number:06}.jsonl").read_bytes())
                joined.flush()
                # before the rename and before the blocks go
                os.fsync(joined.fileno())
            # the summary first: an output without one is somebody else's
            write_atomic(
                self.folder / "summary", json.dumps({"order": self.order, "counts": counts.as_dict()}, indent=1)
            )
            os.replace(partial, self.output)
            os.replace(self.folder / "summary", self.summary)
            shutil.rmtree(self.folder, ignore_errors=True)
        return True


def _block_answers(config: WriteConfig) -> int:
    """Answers of a block: enough that few wait for the last one, few enough that a kill costs little."""
    on_device = config.server is None and default_device().type != "cpu"
    return 4 * (config.batch_size or MOST_ANSWERS) if on_device else 2 * (config.batch_size or CPU_ANSWERS)


@contextmanager
def _claimed(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process got the lock, which ends with it; False, too, where the work is finished and its folder
    gone."""
    with ExitStack() as opened:
        try:
            stream = opened.enter_context(open(path, "a"))
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            yield False
            return
        yield True


def write(config: WriteConfig, progress: Progress | None = None, writer: AnswerWriter | None = None) -> Counts:
    """Write what is not written yet; the counts of all that is there then. ``writer``: one to use instead of the
    teacher that is named."""
    if config.verifier is not None:
        config.verifier.ready()
    problems = Problems(config.prompts, config)
    blocks = Blocks(config, problems)
    if blocks.is_done:
        say(f"{config.output} is complete already")
        return blocks.counts()
    done = blocks.counts()
    bar = (progress or Silent()).begin("answers", blocks.total * config.answers, done.prompts * config.answers)
    start, written = time.perf_counter(), 0
    own_writer = None
    try:
        for number, prompts in blocks.open_blocks():
            if writer is None:
                # only for a block to be written: where all are done or taken no model is loaded
                writer = own_writer = make_writer(config)
            records, counts = write_block(config, writer, problems, prompts)
            blocks.store(number, records, counts)
            written += counts.tokens
            rate = f"{written / (time.perf_counter() - start):,.0f} tokens/s"
            bar.update(min(blocks.stored(), blocks.total) * config.answers, note=rate)
    finally:
        bar.close()
        if own_writer is not None:
            own_writer.close()
    if not blocks.finish():
        say(f"other processes still write; {config.output} is joined when the last of them is done")
    return blocks.counts()
