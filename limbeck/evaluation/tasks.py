"""Tasks: how many problems a model solves, by a verifier, with a standard error."""

from __future__ import annotations

import gc
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from limbeck.config import read_yaml, resolve
from limbeck.data.problems import Problem, Problems, PromptReading, choose, encode_prompt
from limbeck.data.readers import BadRecord
from limbeck.errors import ConfigError, DataError
from limbeck.evaluation.bits import EvalModel, EvalOptions
from limbeck.evaluation.models import find_model
from limbeck.models.continuous import make_local_sampler
from limbeck.models.generate import Sampler, SamplingConfig
from limbeck.tokens import ByteVocab
from limbeck.utils.paired import paired
from limbeck.utils.progress import say, stage
from limbeck.verifiers import Answer, AnyVerifier

MOST_PROBLEMS = 100
"""Problems of a task where nobody says how many."""
SEED = 0
"""Seed of the order of problems and of the samples: the same in every run, so that figures compare."""

Encode = Callable[[Problem], Tensor]


class TaskConfig(BaseModel):
    """Problems, who says whether an answer is right, and how answers are sampled."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    """Names the metric ``val/task/NAME``: letters, digits, ``_``, ``-`` and ``.``."""
    data: str | list[str]
    """Files, globs, folders, or ``hf:owner/name``, of prompts as ``limbeck write`` reads them."""
    verifier: AnyVerifier
    """Judge of an answer: a name such as ``number``, ``module:function``, or a section with the name
    and settings."""
    prompt_key: str | None = None
    """Key of the prompt in a record; default: the conversation up to its last answer, or ``prompt``, ``question``..."""
    hub_subset: str | None = None
    """``hf:`` data: the configuration of the data set."""
    hub_split: str = "test"
    """``hf:`` data: the split."""
    problems: int | None = Field(default=None, ge=1)
    """How many problems, always the same ones; null: up to 100, and in a run fewer where they would take more than a
    fifth of its time."""
    samples: int = Field(default=1, ge=1)
    """Answers to each problem; a problem's score is their mean."""
    temperature: float = Field(default=0.0, ge=0)
    """0: always the most likely token."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Most tokens of an answer."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise ValueError(f"{name!r} would be no part of a metric's name; use letters, digits, _, - and .")
        return name

    def sampling(self) -> SamplingConfig:
        """How answers are sampled."""
        return SamplingConfig(max_new_tokens=self.max_new_tokens, temperature=self.temperature)


@dataclass(frozen=True)
class TaskResult:
    """Scores of problems, by the numbers of their records; ``reasons``: of all answers, ``cut`` among them."""

    problems: list[int]
    scores: list[float]
    reasons: dict[str, int]

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores) if self.scores else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, over problems; NaN with one problem."""
        # ddof=1: of a sample; the mean is estimated from the same scores
        return float(np.std(self.scores, ddof=1) / math.sqrt(len(self.scores))) if len(self.scores) > 1 else math.nan

    def __add__(self, more: TaskResult) -> TaskResult:
        reasons = Counter(self.reasons) + Counter(more.reasons)
        return TaskResult(self.problems + more.problems, self.scores + more.scores, dict(reasons))

    def __str__(self) -> str:
        error = self.standard_error
        return f"{self.score:.1%}" + ("" if math.isnan(error) else f" ± {error:.1%}") + f" of {len(self.scores)}"


class Task:
    """A task with its problems read; records that cannot be asked are counted and said."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        config.verifier.ready()
        reading = PromptReading(prompt_key=config.prompt_key, hub_subset=config.hub_subset, hub_split=config.hub_split)
        problems, bad = Problems(config.data, reading), Counter[str]()
        self.problems: list[Problem] = []
        for number in choose(problems, None, SEED):
            if len(self.problems) == (config.problems or MOST_PROBLEMS):
                break
            try:
                problem = problems[number]
                config.verifier.check(problem.record)
            except (BadRecord, DataError) as error:
                bad[type(error).__name__] += 1
                if sum(bad.values()) <= 3:
                    say(f"task {config.name}: {problems.location(number)} is left out: {error}")
                continue
            self.problems.append(problem)
        if not self.problems:
            raise DataError(
                f"task {config.name!r} has no problem that can be asked and verified in {config.data} "
                f"({sum(bad.values())} records are left out); see the lines above"
            )
        if config.problems is not None and len(self.problems) < config.problems:
            raise DataError(
                f"task {config.name!r} asks for {config.problems} problems, and {config.data} holds "
                f"{len(self.problems)}; lower 'problems'"
            )

    def measure(
        self,
        sampler: Sampler,
        vocab: ByteVocab,
        encode: Encode,
        number: int | None = None,
        *,
        begin: int = 0,
        room: int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> TaskResult:
        """Scores of the first ``number`` problems, those before ``begin`` left out, or of this rank's share of them: of
        ``part = (rank, size)`` every size-th from the rank on. Ranks of a sharded model must make the same call.

        ``room``: tokens that a prompt may have; one that is longer loses its front, and is counted as ``prompt_cut``.
        """
        share = self.problems[begin:number][part[0] :: part[1]]
        whole, room = [encode(problem) for problem in share], room or 1 << 30
        prompts = [prompt[-room:] for prompt in whole]
        seeds = [problem.number * 2 + 1 for problem in share]
        samples = sampler.sample(prompts, n=self.config.samples, seed=seeds)
        # special tokens, which the end of an answer is, spell nothing
        answers = [Answer(_text(vocab, sample.ids_T.tolist())) for sample in samples]
        verdicts = self.config.verifier.verify_all(answers, [share[sample.prompt].record for sample in samples])
        scores = [0.0] * len(share)
        for sample, verdict in zip(samples, verdicts, strict=True):
            # a user's function may give any number, and a share lies between 0 and 1
            scores[sample.prompt] += (1.0 if verdict.right else min(max(verdict.score, 0.0), 1.0)) / self.config.samples
        reasons = Counter(str(verdict.reason) for verdict in verdicts)
        reasons["cut"] = sum(not sample.ended for sample in samples)
        reasons["prompt_cut"] = sum(len(prompt) > room for prompt in whole)
        return TaskResult([problem.number for problem in share], scores, dict(reasons))


def _text(vocab: ByteVocab, ids: Sequence[int]) -> str:
    return vocab.join([token for token in ids if not vocab.special[token]]).decode("utf-8", "replace")


def read_tasks(path: str) -> list[TaskConfig]:
    """The tasks of a YAML file: one, a list, or a file with a key ``tasks``, as a run file has it."""
    try:
        content: Any = read_yaml(path, path)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"the task file {path!r} cannot be read: {error}") from error
    if isinstance(content, Mapping) and "tasks" in content:
        content = content["tasks"]
    listed = content if isinstance(content, list) else [content]
    folder = Path(path).parent
    for one in listed:
        if not isinstance(one, Mapping):
            raise ConfigError(f"the task file {path!r} holds {one!r}; expected name, data and verifier of each task")
    tasks = [resolve(TaskConfig, _beside(one, folder)) for one in listed]
    check_names(tasks)
    return tasks


def _beside(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A task whose data may lie beside its file."""
    data = task.get("data")
    if isinstance(data, str) and not Path(data).exists() and (folder / data).exists():
        return {**task, "data": str(folder / data)}
    return dict(task)


def check_names(tasks: Sequence[TaskConfig]) -> None:
    """Refuse two tasks of one name."""
    names = Counter(task.name for task in tasks)
    twice = [name for name, number in names.items() if number > 1]
    if twice:
        raise ConfigError(f"two tasks have the name {twice[0]!r}, which names their metric; rename one of them")


def evaluate_tasks(
    models: Sequence[str], tasks: Sequence[TaskConfig], options: EvalOptions | None = None
) -> dict[str, Any]:
    """Every task by every model, one in memory at a time.

    Returns ``{"scores": {spec: {task: {"score", "standard_error", "problems", "cut", "no_answer", "failed"}}},
    "pairs": {task: {spec: paired(first model, spec)}}}``.
    """
    options = options or EvalOptions()
    check_names(tasks)
    loaded = [Task(task) for task in tasks]
    by_model: dict[str, dict[str, TaskResult]] = {}
    for spec in dict.fromkeys(models):
        model = EvalModel(find_model(spec, options.checkpoint), options)
        by_model[spec] = {task.config.name: _by_model(model, task) for task in loaded}
        del model
        gc.collect()
    first, *others = by_model
    scores = {
        spec: {
            name: {
                "score": result.score,
                "standard_error": result.standard_error,
                "problems": len(result.scores),
                **{reason: result.reasons.get(reason, 0) for reason in ("cut", "no_answer", "failed", "prompt_cut")},
            }
            for name, result in results.items()
        }
        for spec, results in by_model.items()
    }
    pairs = {
        task.config.name: {
            spec: paired(_scores(by_model[first][task.config.name]), _scores(by_model[spec][task.config.name]))
            for spec in others
        }
        for task in loaded
    }
    return {"scores": scores, "pairs": pairs}


def _scores(result: TaskResult) -> dict[int, float]:
    return dict(zip(result.problems, result.scores, strict=True))


def _by_model(model: EvalModel, task: Task) -> TaskResult:
    vocab = model.encoder.vocab
    ends = vocab.end_ids(model.policy.vocab_size)
    sampler = make_local_sampler(model.policy, "auto", task.config.sampling(), ends, vocab)
    room = max(1, model.limit() - task.config.max_new_tokens)

    def encode(problem: Problem) -> Tensor:
        return encode_prompt(model.encoder, problem, name=model.name)

    with stage(f"{model.name}: task {task.config.name}, {len(task.problems)} problems"):
        return task.measure(sampler, vocab, encode, room=room)
