"""Parts that the recipes share: a run with all that it has, where it stands, how it is saved and resumed, who watches
it.

A recipe adds its own parts in a subclass of :class:`Run`. A feature of runs that no step needs is an :class:`Observer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.distributed.comm import Comm
from limbeck.errors import CheckpointError
from limbeck.losses.contract import State, Teacher
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.policy import Policy
from limbeck.models.trainer import found_batches
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.logger import Logger
from limbeck.utils.metrics import Pair
from limbeck.utils.progress import say
from limbeck.utils.state import capture_rng, fitting, restore_rng
from limbeck.utils.timer import Timer


@dataclass
class RunState:
    """Where a run stands, as ``training_info.json`` of a checkpoint holds it."""

    current_epoch: int = 0
    """Passes over the data that are complete."""
    current_step: int = 0
    """Steps of the pass that is under way."""
    total_steps: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    val_loss: float | None = None
    """Validation loss of these very weights; None where they were not validated."""
    observers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of observers, by their names."""

    @classmethod
    def of(cls, stored: Mapping[str, Any], where: str = "the state of the run") -> RunState:
        """The state that ``as_dict`` made; ``where`` names it in errors.

        Raises:
            CheckpointError: an entry is of another type.
        """
        values = {entry.name: stored[entry.name] for entry in fields(cls) if entry.name in stored}
        for name, value in values.items():
            kinds = {"val_loss": (int, float), "observers": (dict,)}.get(name, (int,))
            states = value.values() if isinstance(value, dict) else ()
            # the very type: true is an int for isinstance
            if type(value) not in kinds or not all(isinstance(state, dict) for state in states):
                raise CheckpointError(f"{name!r} of {where} is {repr(value)[:100]}, no count; take another checkpoint")
        state = cls(**values)
        # earlier checkpoints call these counts "dropped", the earliest beside the states of observers
        counts = state.observers.pop("dropped", None) or stored.get("dropped")
        if counts is not None:
            state.observers.setdefault("skipped", counts)
        return state

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the published calls."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class Run:
    """Everything that a training loop needs. ``config`` is a run file with the sections of every recipe."""

    config: Any
    student: Policy
    teachers: list[Teacher]
    loader: StatefulDataLoader
    val_loader: StatefulDataLoader | None
    loss_fn: Any
    checkpointer: CheckpointManager
    logger: Logger = field(init=False)
    state: RunState = field(default_factory=RunState, kw_only=True)
    timer: Timer = field(default_factory=Timer, kw_only=True)
    section: Callable[[str], AbstractContextManager[object]] = field(default=nullcontext, kw_only=True)
    """Context around logging, validation and saving, by these names; a profile sets it."""

    # -- what a recipe adds -----------------------------------------------------------------------------------------

    def own_state(self) -> State:
        """State that this rank must find again in a checkpoint, besides its position and random state."""
        return {}

    def load_own_state(self, stored: State) -> None:
        """Take over what ``own_state`` has stored."""

    def shared_state(self) -> State:
        """State that the ranks keep together in a checkpoint, each its shards."""
        return {}

    def load_shared_state(self, checkpoint: Checkpoint) -> None:
        """Take over what ``shared_state`` has stored. Collective."""

    def nothing_learned(self, skipped: str) -> str:
        """The error where no step so far has learnt anything; empty where later ones can."""
        raise NotImplementedError

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def begin(self, latest: Checkpoint | None) -> None:
        """Go on from a checkpoint if there is one, and open the logger; the last thing before the loop. Collective."""
        if latest is not None:
            with fitting(f"the checkpoint {str(latest.folder)!r}"):
                self._resume(latest)
        rows = self.config.policy.train_micro_batch_size
        if (line := found_batches(self.student, rows, self.teachers)) is not None:
            say(line)
        step = self.state.total_steps if latest is not None else -1
        self.logger = Logger(self.config.logger, resume_step=step, rank=Comm.world().rank)

    def _resume(self, latest: Checkpoint) -> None:
        info = self.checkpointer.load_training_info(latest.folder) or {}
        self.state = RunState.of(info, f"the checkpoint {str(latest.folder)!r}")
        self.load_shared_state(latest)
        stored = latest.own()
        self.load_own_state(stored)
        # on such a device as before, so that sums have the order that they would have had
        self.student.budget.restore(stored.get("batches", {}))
        sampler: Any = self.loader.sampler
        sampler.go_to(stored["position"])
        sampler.set_epoch(self.state.current_epoch)
        # whatever the set-up has drawn, the next draw is the one after the checkpoint
        restore_rng(stored["rng"])

    def save(self, step: int, measured: Mapping[str, float]) -> None:
        """Write a checkpoint; ``measured`` ranks it. Collective."""
        # by steps taken, not by what was read: loader processes are ahead of the step
        used = self.state.current_step * self.config.distillation.num_prompts_per_step
        sampler: Any = self.loader.sampler
        with self.checkpointer.saving(step, {**self.state.as_dict(), **measured}) as folder:
            state = {"position": sampler.position(used), "rng": capture_rng(), **self.own_state()}
            state["batches"] = self.student.budget.state()
            Checkpoint(folder).save(self.student, self.student.trainer, shared=self.shared_state(), own=state)


def steps_of(config: Any, loader: StatefulDataLoader) -> int:
    """Steps of a whole run."""
    d = config.distillation
    return int(min(d.max_num_steps, d.max_num_epochs * len(loader)))


@dataclass
class Step:
    """A step that was taken, before it is logged.

    Attributes:
        number: from 1.
        tokens: real student tokens of all ranks.
        metrics: what is logged, as (sum, count) pairs or numbers; an observer may add to it.
        skipped: what collating its records left out, by reason.
    """

    number: int
    tokens: int
    metrics: dict[str, Any]
    skipped: Sequence[Mapping[str, int]]


class Observer:
    """Watches a run. Every method does nothing unless a subclass says otherwise; a run calls them on every rank.

    Collectives are allowed where a method says so. What an observer keeps must be the same after a kill and a resume.
    """

    name: ClassVar[str]
    """Name of its state in checkpoints."""
    breaks_off: ClassVar[bool] = False
    """Whether Ctrl-C may end ``on_validation``, which is then left out: for what takes long and may be missed."""

    def on_start(self, run: Run) -> None:
        """Before the first step of a start, also of a resumed one. Collective."""

    def on_step(self, run: Run, step: Step) -> None:
        """A step was taken and is about to be logged. A ``LossError`` ends the run and keeps the batch."""

    def after_step(self, run: Run) -> None:
        """A step was logged, and validated and saved where that was due."""

    def on_epoch(self, run: Run) -> None:
        """The last step of an epoch or of the run was taken, and is neither validated nor saved. Collective."""

    def measure(self, run: Run, step: int) -> Mapping[str, Pair]:
        """Figures of a validation besides the recipe's, as (sum, count) over all ranks, by their names without
        ``val/``. Collective."""
        return {}

    def on_validation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        """A validation was logged; ``means`` by the names of the log without ``val/``. Collective."""

    def on_end(self, run: Run) -> None:
        """The run has come to its end, or was stopped; all is saved. Collective."""

    def close(self, run: Run) -> None:
        """The run is over, also after an error."""

    def stop_reason(self) -> str | None:
        """Why the run is over by what was seen so far, as the end of a sentence; the same on every rank. Asked after
        every step, and of a stored state before a run loads its models."""
        return None

    def wants_checkpoint(self) -> bool:
        """Whether these weights must be kept, asked after every step; the same on every rank."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint keeps, as JSON has it, of all ranks. Collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored state."""


class ObserverConfig(BaseModel):
    """Settings that bring an observer with them, wherever they stand in a run file."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    def observer(self) -> Observer:
        """The observer that these settings ask for."""
        raise NotImplementedError
