"""Hints at the calls of an episode that failed, for the teachers of the answers that made them.

What reads logs of agents finds the failed calls and writes the hints; the whole episode is known by then, so that a
hint which gives away what came later is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from limbeck.data.continuations import ContinuationCollator, Prompt
from limbeck.errors import LimbeckError
from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.failed_state_prompts import HintAfterFailureConfig
from limbeck.traces.hints import layered_hints
from limbeck.traces.schema import Trace
from limbeck.utils.metrics import Pair


class EpisodeHints:
    """Prompts of one step's episodes with their hints.

    Attributes:
        skipped: failed calls without a hint, by reason.
        failed: answers with a call that failed.
        hinted: those of them whose teachers read a hint.
    """

    def __init__(self, config: HintAfterFailureConfig, rows: ContinuationCollator) -> None:
        self.only_failed, self.rows = config.only_failed, rows
        self._finder = FailedCallFinder(layered_hints(config.hints))
        self.failed = self.hinted = 0

    @property
    def skipped(self) -> Counter[str]:
        """Failed calls without a hint, by reason."""
        return self._finder.skipped

    def prompts(self, trace: Trace, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of an episode's answers, in the order of its turns; with a hint where a call failed.

        Args:
            trace: of the whole episode, message by message.
            prompts: each holds all messages before its answer.
        """
        hints: dict[int, list[str]] = {}
        for failed_call in self._finder.find(trace):
            hints.setdefault(failed_call.target, []).append(failed_call.hint)
        callers = trace.callers()
        failed = {callers[i][0] for i, message in enumerate(trace.messages) if message.is_error and i in callers}
        self.failed += sum(len(prompt.messages) in failed for prompt in prompts)
        return [self._prompt(prompt, hints.get(len(prompt.messages), [])) for prompt in prompts]

    def _prompt(self, prompt: Prompt, hints: Sequence[str]) -> Prompt:
        plain = replace(prompt, compared=not self.only_failed)
        if not hints:
            return plain
        try:
            # several calls of one answer may have failed in the same way
            hinted = self.rows.hinted(prompt, "\n\n".join(dict.fromkeys(hints)))
        except LimbeckError:
            self.skipped["hint_refused"] += len(hints)
            return plain
        if hinted is None:
            self.skipped["hint_does_not_fit"] += len(hints)
            return plain
        self.hinted += 1
        return hinted

    def figures(self) -> dict[str, Pair]:
        """Share of the answers with a failed call whose teachers read a hint, and failed calls without one by reason,
        each of all that have none."""
        lost = float(self.skipped.total())
        reasons = {f"episode/unhinted_{reason}": (float(count), lost) for reason, count in self.skipped.items()}
        return {"episode/hinted": (float(self.hinted), float(self.failed)), **reasons}
