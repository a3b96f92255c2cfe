"""Texts that student and teachers write behind the same few prompts, so that a reader of a run sees its text change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from pydantic import Field

from limbeck.algorithms.run import Observer, ObserverConfig, Run
from limbeck.data.readers import BadRecord
from limbeck.data.sources import as_record, flatten_documents
from limbeck.distributed.comm import Comm
from limbeck.errors import TemplateError, one_line
from limbeck.losses.contract import Teacher
from limbeck.models.generate import LocalSampler, Sample, SamplingConfig
from limbeck.models.language_model import LanguageModel
from limbeck.models.loading import ModelConfig
from limbeck.tokens import ByteTokenizer
from limbeck.tokens.chat.render import render_chat
from limbeck.tokens.tokenizer import read_template
from limbeck.utils.progress import stage

USUAL_NUMBER = 2
_RECORDS_TRIED = 64
_REFERENCE_CHARACTERS = 400


class SamplesConfig(ObserverConfig):
    """Greedy continuations of fixed prompts, written to ``samples.jsonl`` of the run folder at every validation."""

    number: int | None = Field(default=None, ge=0)
    """Prompts from the first validation records; 0: none. Default: 2, and none where the student is sharded over ranks,
    since ranks that write together have no cache of keys and values."""
    prompts: list[str] = Field(default=[])
    """Prompts of your own, instead of the records': texts, or what a user says where ``data.mode`` is ``chat``."""
    prompt_characters: int = Field(default=160, ge=1)
    """How much of a text is the prompt, at most half of it; a conversation is shown up to its last answer."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Most tokens of a continuation."""

    def observer(self) -> Observer:
        return Samples(self)


class Samples(Observer):
    """Has the models of a run on texts write at every validation."""

    name = "samples"
    breaks_off = True

    def __init__(self, config: SamplesConfig) -> None:
        self.config = config
        self.prompts: PromptSamples | None = None
        self.writes = config.number != 0

    def on_validation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        if not self.writes or run.val_loader is None:
            return
        try:
            # the first time teachers write, too, which takes as long as many steps where there is no GPU
            with nullcontext() if self.prompts else stage("writing samples"):
                self.prompts = self.prompts or self._prompts(run)
                written = self.prompts.write()
        except Exception as error:
            if self.config.number is not None:
                raise
            # nobody asked for them: not every model can write, and a run must not end for want of a look at it
            run.logger.print(f"warning: this run writes no samples ({one_line(error)}); see distillation.samples")
            self.writes = False
            return
        run.logger.log_samples(written, step)

    def _prompts(self, run: Run) -> PromptSamples:
        assert run.val_loader is not None
        return PromptSamples(
            self.config,
            run.student,
            run.teachers,
            run.val_loader.dataset,
            sections=[run.config.policy, *run.config.all_teachers],
            chat=run.config.data.detected_mode() == "chat",
        )


@dataclass(frozen=True)
class Prompt:
    """A text to be continued, or a conversation to be answered.

    Attributes:
        shown: the prompt as a reader sees it.
        reference: how the record goes on; empty for a prompt of the user's own.
    """

    shown: str
    text: str | None = None
    messages: Sequence[dict[str, Any]] = ()
    tools: Any = None
    reference: str = ""


@dataclass
class Writer:
    """A model that continues prompts, and how it reads them."""

    name: str
    model: LanguageModel
    config: ModelConfig
    tokenizer: ByteTokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = ByteTokenizer.of(self.model.tokenizer)

    def write(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[dict[str, Any]]:
        """One row for every prompt. Collective where the model is sharded; otherwise rank 0 alone writes."""
        if not self.model.sharding.is_sharded and Comm.world().rank != 0:
            return []
        longest = self.config.max_total_sequence_length
        new = min(max_new_tokens, max(1, longest // 2))
        # the front is lost: what is continued stands at the end
        ids = [self.encode(prompt)[-(longest - new) :] for prompt in prompts]
        ends = self.tokenizer.vocab.end_ids(self.model.vocab_size)
        greedy = SamplingConfig(max_new_tokens=new, temperature=0)
        written = LocalSampler(self.model, greedy, ends).sample(ids)
        return [sample_row(self.name, n, prompts[n].shown, s, self.tokenizer) for n, s in enumerate(written)]

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """int64 ``[T]``, as the model reads a prompt in training."""
        if prompt.text is not None:
            text = self.tokenizer.encode(prompt.text, bos=self.tokenizer.adds_bos)
        else:
            template = self.config.tokenizer.chat_template
            text = render_chat(
                self.tokenizer,
                prompt.messages,
                tools=prompt.tools,
                template=None if template is None else read_template(template),
                template_kwargs=self.config.tokenizer.chat_template_kwargs,
                name=self.name,
                add_generation_prompt=True,
            )
        return torch.from_numpy(text.ids.astype("int64"))


def sample_row(writer: str, number: int, prompt: str, sample: Sample, tokenizer: ByteTokenizer) -> dict[str, Any]:
    """Entry that ``Logger.log_samples`` stores of a continuation; ``number`` is that of its prompt."""
    # a character may be cut in the middle, since it may be several tokens
    text = tokenizer.vocab.join(sample.ids_T.tolist()).decode("utf-8", "replace")
    size = len(sample.ids_T)
    return {"writer": writer, "number": number, "prompt": prompt, "text": text, "tokens": size, "ended": sample.ended}


class PromptSamples:
    """The prompts of a run and who continues them: the student every time, live teachers once.

    Args:
        records: where prompts are taken from unless the settings bring their own.
        sections: of the run file, the student's and one per teacher.
        chat: prompts are conversations.
    """

    def __init__(
        self,
        config: SamplesConfig,
        student: LanguageModel,
        teachers: Sequence[Teacher],
        records: Any,
        *,
        sections: Sequence[ModelConfig],
        chat: bool,
    ) -> None:
        self.config, self.chat = config, chat
        policy, *others = sections
        self.student = Writer("student", student, policy)
        live = [(t, s) for t, s in zip(teachers, others, strict=True) if t.model is not None]
        self.teachers = [
            Writer("teacher" if len(teachers) == 1 else f"teacher {t.number}", t.model, section)
            for t, section in live
            if t.model.tokenizer is not None and (config.number is not None or not t.model.sharding.is_sharded)
        ]
        self._told = False
        number = config.number
        if number is None:
            number = 0 if student.sharding.is_sharded else len(config.prompts) or USUAL_NUMBER
        prompts = (self._given(text) for text in config.prompts)
        self.prompts = list(islice(prompts if config.prompts else self._from_records(records), number))

    def write(self) -> list[dict[str, Any]]:
        """Rows of the student as it is now; the first time also those of the teachers and how the records go on, which
        belong to step 0. Collective."""
        if not self.prompts:
            return []
        rows = self.student.write(self.prompts, self.config.max_new_tokens)
        if not self._told:
            self._told = True
            constant = [
                row for teacher in self.teachers for row in teacher.write(self.prompts, self.config.max_new_tokens)
            ]
            constant += [
                {"writer": "data", "number": number, "prompt": prompt.shown, "text": prompt.reference}
                for number, prompt in enumerate(self.prompts)
                if prompt.reference
            ]
            rows += [{"step": 0, **row} for row in constant]
        return rows

    def _given(self, text: str) -> Prompt:
        return Prompt(text, messages=[{"role": "user", "content": text}]) if self.chat else Prompt(text, text=text)

    def _from_records(self, records: Any) -> Iterator[Prompt]:
        rows = flatten_documents(records[i] for i in range(min(len(records), _RECORDS_TRIED)))
        for row in _readable(rows):
            prompt = self._conversation(row) if self.chat else self._text(row)
            if prompt is not None and self._can_read(prompt):
                yield prompt

    def _text(self, row: Mapping[str, Any]) -> Prompt | None:
        text = row.get("text") or ""
        end = min(self.config.prompt_characters, len(text) // 2)
        space = text.rfind(" ", 1, end + 1)
        start = text[: space if space > 0 else end].rstrip()
        return Prompt(start, text=start, reference=text[len(start) :][:_REFERENCE_CHARACTERS]) if start else None

    def _conversation(self, row: Mapping[str, Any]) -> Prompt | None:
        messages: list[dict[str, Any]] = row.get("messages") or []
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers or not answers[-1]:
            return None
        before, answer = messages[: answers[-1]], messages[answers[-1]].get("content")
        said = before[-1].get("content")
        return Prompt(
            said if isinstance(said, str) else str(said or ""),
            messages=before,
            tools=row.get("tools"),
            reference=answer[:_REFERENCE_CHARACTERS] if isinstance(answer, str) else "",
        )

    def _can_read(self, prompt: Prompt) -> bool:
        """A record that a template refuses is left out of the samples, as it is where it is collated."""
        try:
            return all(len(writer.encode(prompt)) for writer in (self.student, *self.teachers))
        except TemplateError:
            return False


def _readable(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        try:
            yield as_record(row)
        except BadRecord:
            continue
