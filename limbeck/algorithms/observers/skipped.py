"""Skipped records, by reason: logged at validations, said at the end of every epoch, stored in ``skipped.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from limbeck.algorithms import run_folder
from limbeck.algorithms.run import Observer, Run, Step
from limbeck.distributed.comm import Comm
from limbeck.errors import DataError


class SkippedCounts(Observer):
    """Counts of this rank; of a resumed run, rank 0 has those of all ranks so far, so that a sum counts none twice."""

    name = "skipped"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_step(self, run: Run, step: Step) -> None:
        # ranks that read the same rows would count them once each
        if run.student.dims.owns_records:
            for counts in step.skipped:
                self.counts.update(counts)

    def on_validation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        self._log(run, Comm.world().sum_counter(self.counts))  # all ranks, once per validation

    def on_epoch(self, run: Run) -> None:
        """Say what was left out, and stop where that is everything."""
        total = run_folder.write_skipped(run.config.logger.log_dir, self.counts)
        self._log(run, total)
        if run.state.total_valid_tokens == 0 and (why := run.nothing_learned(str(dict(total) or "nothing"))):
            raise DataError(why)
        if total:
            counts = ", ".join(f"{n} {reason}" for reason, n in sorted(total.items()))
            run.logger.print(f"epoch {run.state.current_epoch}: left out so far: {counts}")
        if lost := total["truncated_tokens"]:
            share = lost / (lost + run.state.total_valid_tokens)
            run.logger.print(f"texts longer than the context lost {share:.0%} of their tokens ({lost:,}) so far")

    def on_end(self, run: Run) -> None:
        run_folder.write_skipped(run.config.logger.log_dir, self.counts)

    def state_dict(self) -> dict[str, int]:
        return dict(Comm.world().sum_counter(self.counts))  # all ranks, once per checkpoint

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if not all(type(count) is int for count in state.values()):
            raise ValueError(f"{dict(state)} are no counts")
        self.counts = Counter(state if Comm.world().rank == 0 else {})

    @staticmethod
    def _log(run: Run, total: Mapping[str, int]) -> None:
        counts = {f"skipped/{reason}": float(n) for reason, n in sorted(total.items())}
        run.logger.log_metrics(counts, run.state.total_steps, "train")
