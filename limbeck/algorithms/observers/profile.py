"""``logger.profile_steps``: a table of where the time of steps goes, and a trace; see ``limbeck.utils.profiling``."""

from __future__ import annotations

from limbeck.algorithms.run import Observer, Run, Step
from limbeck.distributed.comm import Comm
from limbeck.utils.logger import LoggerConfig
from limbeck.utils.profiling import StepProfile


class Profile(Observer):
    """Charges the time of a run's steps to their sections, on rank 0."""

    name = "profile"

    def __init__(self, config: LoggerConfig) -> None:
        self.config = config
        self.profile: StepProfile | None = None

    def on_start(self, run: Run) -> None:
        if not self.config.profile_steps or Comm.world().rank != 0:
            return
        self.profile = profile = StepProfile(self.config.log_dir, self.config.profile_steps, run.student.device)
        run.timer.synchronize, run.timer.around, run.section = profile.synchronize, profile.mark, profile.section

    def on_step(self, run: Run, step: Step) -> None:
        if self.profile is not None:
            self.profile.take(run.timer)

    def after_step(self, run: Run) -> None:
        if self.profile is not None and self.profile.end_step(run.state.total_steps):
            run.logger.print(self.profile.table())

    def close(self, run: Run) -> None:
        if self.profile is not None and self.profile.close():
            run.logger.print(self.profile.table())
