"""Episodes that the student plays in an environment: each of its answers is a row, behind all that was said before it.

Episodes of a step advance together. Whoever is ready for an answer is sampled with the others that are; calls of tools
are answered in threads meanwhile.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

from limbeck.algorithms.episode_hints import EpisodeHints
from limbeck.algorithms.episode_traces import trace_of
from limbeck.algorithms.rewards import Reward
from limbeck.algorithms.rollouts import Heard, Rollout, Rollouts, StepData, Written, measure
from limbeck.data.continuations import Continuation, ContinuationCollator, Prompt, ReadAnswer
from limbeck.data.cross_tokenizer_collate import DatumSpec
from limbeck.data.sources import CONTEXT, REFERENCE
from limbeck.environments.session import Answered, EpisodeOver, ProcessPool, Session
from limbeck.environments.settings import EnvironmentSettings
from limbeck.errors import LimbeckError
from limbeck.losses.policy_gradient import group_advantages
from limbeck.models.generate import Sample, Sampler
from limbeck.traces.failed_state_prompts import HintAfterFailureConfig
from limbeck.traces.redact import redact_trace
from limbeck.traces.schema import Trace
from limbeck.utils.metrics import Pair

Ending = Literal[
    "answered",
    "done",
    "turns",
    "tokens",
    "seconds",
    "cut",
    "context",
    "template",
    "start",
    "judge",
    "error",
    "timeout",
    "died",
]
"""Why an episode ended: the environment had nothing to say to an answer, or says that it is over; a limit of turns,
tokens or the environment's seconds; an answer was cut off by ``max_new_tokens``, or had no room; a template refuses the
conversation; the environment could not begin, or judge; it raised an error, gave no reply in time, or its process ended
where none can take its place."""
GATHER_SECONDS = 0.05
"""So long those who are ready wait for others to be sampled with."""


@dataclass
class Turn:
    """One answer of the student: the prompt in front of it and what was sampled."""

    prompt: Prompt
    sample: Sample
    answer: ReadAnswer


@dataclass
class Episode:
    """A conversation of the student with an environment.

    Attributes:
        record: what it began with, in our form.
        copy: its number among the episodes of its record.
        messages: of the conversation so far.
        ending: why it ended.
        reward: what the environment said last.
        prompt: behind which the next answer is due.
    """

    record: DatumSpec
    copy: int
    session: Session
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0
    failed: int = 0
    ending: Ending | None = None
    reward: float | None = None
    prompt: Prompt | None = None

    @property
    def idx(self) -> int:
        """Number of its record."""
        return int(self.record.get("idx", 0))

    @property
    def tokens(self) -> int:
        """Tokens that the student has written."""
        return sum(len(turn.sample.ids_T) for turn in self.turns)

    @property
    def malformed(self) -> int:
        """Calls of the student that could not be read."""
        return sum(turn.answer.malformed for turn in self.turns)


class Episodes(Rollouts):
    """Plays the episodes of a step's records.

    Args:
        environment: of the run file.
        n: episodes of each record.
        by_environment: whether the reward is what the environment says.
        hints: what teachers are told about answers whose calls failed; None: nothing.
    """

    def __init__(
        self,
        sampler: Sampler,
        rows: ContinuationCollator,
        environment: EnvironmentSettings,
        *,
        n: int,
        seed: int,
        reward: Reward | None = None,
        by_environment: bool = False,
        hints: HintAfterFailureConfig | None = None,
    ) -> None:
        super().__init__(sampler, rows, n=n, seed=seed, reward=reward)
        self.environment, self.by_environment, self.hints = environment, by_environment, hints
        self.tools = environment.tools()
        self.pool = ProcessPool(environment)

    def write(self, batch: StepData, step: int, heard: Heard | None = None) -> Written:
        """See ``Rollouts.write``. One process's own, never together with others."""
        start = time.perf_counter()
        # hints change what teachers read, once an episode is over
        episodes = self.play(batch.records, step, heard if self.hints is None else None)
        seconds = time.perf_counter() - start
        turns = [(episode, turn) for episode in episodes for turn in episode.turns]
        prompts = [turn.prompt for _, turn in turns]
        samples = [
            Sample(number, turn.sample.ids_T, turn.sample.log_probs_T, turn.sample.ended)
            for number, (_, turn) in enumerate(turns)
        ]
        metrics = measure(samples)
        metrics.add({"sample/tokens_per_s": (float(sum(len(s.ids_T) for s in samples)), seconds)})
        metrics.add(self._of_text(prompts, samples))
        metrics.add(_figures(episodes))
        skipped = Counter[str]()
        if self.hints is not None:
            hints = EpisodeHints(self.hints, self.rows)
            prompts = [
                prompt
                for episode in episodes
                for prompt in hints.prompts(_trace(episode, step + 1), [turn.prompt for turn in episode.turns])
            ]
            metrics.add(hints.figures())
            skipped = hints.skipped
            if heard is not None:
                heard([_continuation(prompt, turn.sample) for prompt, (_, turn) in zip(prompts, turns, strict=True)])
        advantages: list[float] = []
        if self.reward is not None or self.by_environment:
            figures = self._reward(episodes)
            metrics.add(figures)
            by_episode = dict(zip(map(id, episodes), _advantages(episodes), strict=True))
            advantages = [by_episode[id(episode)] for episode, _ in turns]
        # steps of a run are counted from 1, as in its metrics
        traces = _stored(episodes, step + 1, self.environment)
        return Written(prompts, samples, advantages, metrics, traces, skipped)

    def _reward(self, episodes: Sequence[Episode]) -> dict[str, Pair]:
        """Settle the episodes' rewards; figures of them."""
        figures: dict[str, Pair] = {}
        if self.reward is not None:
            played = [episode for episode in episodes if episode.turns]
            last = [episode.turns[-1] for episode in played]
            rewards, figures = self.reward.of_all(
                [list(turn.prompt.messages) for turn in last],
                [self.rows.said(_continuation(turn.prompt, turn.sample)) for turn in last],
                [episode.record.get(REFERENCE) or {} for episode in played],  # type: ignore[misc]
            )
            for episode, reward in zip(played, rewards, strict=True):
                episode.reward = reward
        known = [episode.reward for episode in episodes if episode.reward is not None]
        return {"sample/reward": (sum(known), float(len(known))), **figures}

    def collate(self, written: Written) -> Rollout:
        """See ``Rollouts.collate``; rewards are advantages already."""
        rollout = super().collate(written)
        if self.reward is not None or self.by_environment:
            batch = rollout.batch
            batch["advantages"] = torch.tensor(written.rewards, dtype=torch.float32)
            batch["behavior_valid"] = batch["written_mask"] > 0
        return rollout

    # ---- playing ----

    def play(self, records: Sequence[DatumSpec], step: int, heard: Heard | None = None) -> list[Episode]:
        """The episodes of these records, played to their ends."""
        with_context = any(record.get(CONTEXT) for record in records)
        every = [Episode(record, copy, Session(self.pool, self.tools)) for record in records for copy in range(self.n)]
        waiting: dict[Future[None], Episode] = {}
        yet_to_begin, ready = deque(every), list[Episode]()
        with self._threads() as pool:
            while yet_to_begin or waiting:
                while yet_to_begin and len(waiting) < self.environment.at_once:
                    episode = yet_to_begin.popleft()
                    waiting[pool.submit(self._begin, episode)] = episode
                for episode in _collected(waiting):
                    self._next_prompt(episode, with_context)
                    if episode.ending is None:
                        ready.append(episode)
                # threads come back in any order, and the last bits of sums depend on a row's neighbours
                ready.sort(key=lambda episode: (episode.idx, episode.copy))
                for episode, turn in zip(ready, self._answers(ready, step, heard), strict=True):
                    episode.turns.append(turn)
                    waiting[pool.submit(self._go_on, episode)] = episode
                ready = []
        return every

    @contextmanager
    def _threads(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(max_workers=self.environment.at_once) as pool:
            try:
                yield pool
            except BaseException:
                # what waits for a process goes on when that is gone
                pool.shutdown(wait=False, cancel_futures=True)
                self.pool.close()
                raise

    def _answers(self, ready: Sequence[Episode], step: int, heard: Heard | None) -> list[Turn]:
        if not ready:
            return []
        prompts = [episode.prompt for episode in ready if episode.prompt is not None]
        # of the episode and its turn, not of the batch: who else is ready depends on how long tools take
        seeds = [episode_seed(self.seed, step, e.idx, len(e.turns), e.copy) for e in ready]
        samples = self.sample(prompts, 1, seeds, heard)
        turns = []
        for episode, prompt, sample in zip(ready, prompts, samples, strict=True):
            answer = self.rows.read_answer(_continuation(prompt, sample), episode.calls)
            turns.append(Turn(prompt, sample, answer))
        return turns

    def _begin(self, episode: Episode) -> None:
        """Start an episode, in a thread."""
        try:
            stored: Mapping[str, Any] = episode.record
            record = {**(stored.get(REFERENCE) or {}), **{k: v for k, v in stored.items() if k != REFERENCE}}
            messages = list(stored.get("messages") or [])
            # the record's own answer is what the student is to find
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            episode.messages, episode.tools = episode.session.start({**record, "messages": messages})
        except EpisodeOver as over:
            self._end(episode, over.args[0])

    def _go_on(self, episode: Episode) -> None:
        """Let the environment answer, in a thread."""
        limits, turn = self.environment, episode.turns[-1]
        episode.messages.append(turn.answer.message)
        episode.calls += len(turn.answer.calls)
        try:
            if not turn.sample.ended:
                raise EpisodeOver("cut")
            answered = Answered()
            if turn.answer.calls or not self.environment.restarts:
                answered = episode.session.answer(turn.answer.calls, turn.answer.message)
            episode.failed += answered.failed
            episode.messages += answered.messages
            episode.reward, done = episode.session.judge(episode.messages)
            if done:
                raise EpisodeOver("done")
            if not answered.messages:
                raise EpisodeOver("answered")
            if len(episode.turns) >= limits.max_turns:
                raise EpisodeOver("turns")
            if episode.tokens >= limits.max_tokens:
                raise EpisodeOver("tokens")
        except EpisodeOver as over:
            self._end(episode, over.args[0])

    def _next_prompt(self, episode: Episode, with_context: bool) -> None:
        """What the next answer is due behind, if the episode goes on; renderers are not for several threads."""
        if episode.ending is not None:
            return
        record: Any = {**episode.record, "tools": episode.tools or None}
        # our own key, which is no part of the conversation that templates render
        messages = [{key: value for key, value in m.items() if key != "is_error"} for m in episode.messages]
        try:
            prompt = self.rows.prompt_of(record, messages, turn=len(episode.turns), with_context=with_context)
        except LimbeckError:
            return self._end(episode, "template")
        if prompt is None:
            return self._end(episode, "context")
        episode.prompt = prompt

    @staticmethod
    def _end(episode: Episode, reason: Ending) -> None:
        episode.ending = reason
        episode.session.close()

    def close(self) -> None:
        self.pool.close()


def episode_seed(seed: int, step: int, idx: int, turn: int, copy: int) -> int:
    """Seed of one answer of one episode; 31 bits, which every engine takes."""
    return int(np.random.SeedSequence([seed, step, idx, turn, copy]).generate_state(1)[0]) >> 1


def _continuation(prompt: Prompt, sample: Sample) -> Continuation:
    return Continuation(prompt, sample.ids_T.numpy(), sample.ended)


def _collected(waiting: dict[Future[None], Episode]) -> list[Episode]:
    """The first episodes whose threads are through, and those that are within a moment; an error of a thread is one of
    the run."""
    wait(waiting, return_when=FIRST_COMPLETED)
    done, _ = wait(waiting, timeout=GATHER_SECONDS)
    finished = [(future, waiting.pop(future)) for future in list(waiting) if future in done]
    for future, _ in finished:
        # raises what the thread has raised
        future.result()
    return [episode for _, episode in finished]


def _advantages(episodes: Sequence[Episode]) -> list[float]:
    """Each episode's reward less the mean of its record's; 0 for one without a reward."""
    rewards = torch.tensor([episode.reward or 0.0 for episode in episodes], dtype=torch.float64)
    groups = torch.tensor([episode.idx for episode in episodes], dtype=torch.int64)
    valid = torch.tensor([episode.reward is not None for episode in episodes], dtype=torch.bool)
    return list(group_advantages(rewards, groups, valid=valid).tolist())


def _stored(episodes: Sequence[Episode], step: int, settings: EnvironmentSettings) -> list[dict[str, Any]]:
    """Some of a step's episodes as canonical traces: one of each record before a second of any."""
    chosen = sorted(range(len(episodes)), key=lambda number: (episodes[number].copy, number))[: settings.keep_traces]
    traces = [_trace(episodes[number], step) for number in chosen]
    if settings.redact:
        traces = [redact_trace(trace)[0] for trace in traces]
    return [json.loads(trace.to_json()) for trace in traces]


def _trace(episode: Episode, step: int) -> Trace:
    return trace_of(
        episode.messages,
        [(turn.answer, turn.sample) for turn in episode.turns],
        tools=episode.tools,
        reward=episode.reward,
        step=step,
        record=episode.idx,
        copy=episode.copy,
        ending=episode.ending,
    )


def _figures(episodes: Sequence[Episode]) -> dict[str, Pair]:
    """Figures of episodes as (sum, count): turns and calls of each; of the calls, the share that could not be read and
    that the environment says failed; the share that ended for each reason."""
    count, calls = float(len(episodes)), float(sum(episode.calls for episode in episodes))
    endings = Counter(episode.ending for episode in episodes)
    return {
        "episode/turns": (float(sum(len(episode.turns) for episode in episodes)), count),
        "episode/calls": (calls, count),
        "episode/malformed": (float(sum(episode.malformed for episode in episodes)), calls),
        "episode/failed_calls": (float(sum(episode.failed for episode in episodes)), calls),
        **{f"episode/ended_{ending}": (float(endings[ending]), count) for ending in get_args(Ending)},
    }
