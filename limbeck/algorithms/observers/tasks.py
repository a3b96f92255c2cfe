"""``distillation.tasks``: how many problems the student solves, at every validation, as ``val/task/NAME``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from limbeck.algorithms.run import Observer, ObserverConfig, Run, Step, steps_of
from limbeck.data.problems import Problem, encode_prompt
from limbeck.distributed.comm import Comm
from limbeck.evaluation.tasks import Task, TaskConfig, TaskResult
from limbeck.models.continuous import make_local_sampler
from limbeck.models.generate import LocalSampler
from limbeck.tokens import ByteTokenizer
from limbeck.tokens.tokenizer import read_template
from limbeck.utils.metrics import Pairs

SHARE = 0.2
"""Share of a run's time that all its tasks may take."""
FIRST_SECONDS = 15.0
"""That a task may take before the first step, where a run's own speed is not known."""
FEWEST = 8
"""Problems that are asked however long they take."""


class RunTaskConfig(TaskConfig, ObserverConfig):
    """A task that a run is validated on."""

    def observer(self) -> Observer:
        return TaskScores(self)


class TaskScores(Observer):
    """Has the student solve a task's problems.

    Attributes:
        number: problems that are asked; fixed once the run's own speed is known.
    """

    def __init__(self, config: RunTaskConfig) -> None:
        self.config = config
        self.name = f"task/{config.name}"  # type: ignore[misc]
        self.number: int | None = config.problems
        self._task: Task | None = None
        self._sampler: LocalSampler | None = None
        self._trained, self._steps, self._last, self._spent = 0.0, 0, 0.0, 0.0
        self._result: TaskResult | None = None

    def on_start(self, run: Run) -> None:
        with Comm.world().fail_together():
            self._task = Task(self.config)
        self._last = time.perf_counter()

    def on_step(self, run: Run, step: Step) -> None:
        self._trained += time.perf_counter() - self._last
        self._steps += 1

    def after_step(self, run: Run) -> None:
        # behind validation and checkpoint, which are no training
        self._last = time.perf_counter()

    def measure(self, run: Run, step: int) -> Pairs:
        assert self._task is not None
        ranks, start = run.student.dims.data, time.perf_counter()
        every = len(self._task.problems)
        first = min(every, FEWEST if self.number is None else self.number)
        result = self._measured(run, 0, first, (ranks.rank, ranks.size))
        if self.number is None:
            seconds = time.perf_counter() - start
            number = self._affordable(run, step, first, seconds)
            result += self._measured(run, first, number, (ranks.rank, ranks.size))
        self._spent += time.perf_counter() - start
        # data-parallel ranks, per validation: their problems' scores
        mine = json.dumps([result.problems, result.scores, result.reasons]).encode()
        parts = [json.loads(raw) for raw in ranks.exchange([mine] * ranks.size)]
        scores = {
            number: score for problems, values, _ in parts for number, score in zip(problems, values, strict=True)
        }
        reasons = {name: sum(part[2].get(name, 0) for part in parts) for part in parts for name in part[2]}
        self._result = TaskResult(list(scores), list(scores.values()), reasons)
        name, asked = f"task/{self.config.name}", float(len(scores))
        answers = asked * self.config.samples
        return {
            name: (sum(scores.values()), asked),
            f"{name}_se": (self._result.standard_error, 1.0),
            f"{name}_cut": (float(reasons.get("cut", 0)), answers),
            f"{name}_no_answer": (float(reasons.get("no_answer", 0) + reasons.get("failed", 0)), answers),
        }

    def _measured(self, run: Run, begin: int, number: int, part: tuple[int, int]) -> TaskResult:
        student, section = run.student, run.config.policy
        tokenizer = ByteTokenizer.of(student.tokenizer)
        vocab = tokenizer.vocab
        if self._sampler is None:
            ends = vocab.end_ids(student.vocab_size)
            self._sampler = make_local_sampler(student, "auto", self.config.sampling(), ends, vocab)
        # a continuous sampler writes with a copy of the weights
        self._sampler.sync(student, run.state.total_steps)
        template = section.tokenizer.chat_template
        template = None if template is None else read_template(template)

        def encode(problem: Problem) -> Any:
            kwargs = section.tokenizer.chat_template_kwargs
            return encode_prompt(tokenizer, problem, template=template, template_kwargs=kwargs, name="student")

        longest = section.max_total_sequence_length
        room = max(1, longest - self.config.max_new_tokens)
        assert self._task is not None
        return self._task.measure(self._sampler, vocab, encode, number, begin=begin, room=room, part=part)

    def _affordable(self, run: Run, step: int, asked: int, seconds: float) -> int:
        """Problems that this validation may ask, where the first ``asked`` took so long; the same on every rank. Behind
        the first step, by what is left of this task's share of the run's time, and from then on."""
        assert self._task is not None
        every = len(self._task.problems)
        budget = self._budget(run, step) if self._steps else FIRST_SECONDS
        # all ranks, once: clocks differ
        # not fewer than were asked already
        number = int(Comm.world().broadcast_json(min(every, max(asked, int(asked * budget / max(seconds, 1e-9))))))
        if self._steps:
            self.number = number
            if number < every:
                run.logger.print(
                    f"task {self.config.name}: {number} of {every} problems from here on, so that it takes a fifth of "
                    "the run's time; set its 'problems' to ask more"
                )
        return number

    def _budget(self, run: Run, step: int) -> float:
        """Seconds that each validation from this one on may take."""
        loop, steps = run.config.distillation, steps_of(run.config, run.loader)
        # of the time of training alone, so that it is SHARE of both together
        share = SHARE / (1 - SHARE) / max(1, len(loop.tasks))
        left = share * self._trained / self._steps * steps - self._spent
        validations = 1 + (steps - step) // loop.val_period if loop.val_period else 1
        return left / validations

    def on_validation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        result = self._result
        if result is None:
            return
        row = {"task": self.config.name, "problems": result.problems, "scores": result.scores}
        run.logger.log_tasks([{**row, "reasons": result.reasons}], step)
        run.logger.print(f"step {step}: task {self.config.name} {result}")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.number is None else {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = int(state["number"])
