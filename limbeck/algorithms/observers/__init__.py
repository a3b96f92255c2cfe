"""Observers, which watch runs: one file each. See ``limbeck.algorithms.run.Observer`` for what one may do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from limbeck.algorithms.observers.compilation import Compilation
from limbeck.algorithms.observers.memory import MemoryMonitor
from limbeck.algorithms.observers.profile import Profile
from limbeck.algorithms.observers.skipped import SkippedCounts
from limbeck.algorithms.run import Observer, ObserverConfig
from limbeck.utils.logger import LoggerConfig
from limbeck.utils.state import fitting


def make_observers(config: BaseModel) -> list[Observer]:
    """The observers of a run: those of every run, and one for each section that asks for one."""
    logger = next(section for section in _sections(config) if isinstance(section, LoggerConfig))
    usual: list[Observer] = [SkippedCounts(), Profile(logger), MemoryMonitor(logger), Compilation()]
    return usual + [section.observer() for section in _sections(config) if isinstance(section, ObserverConfig)]


def load_states(observers: Iterable[Observer], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Have observers go on from what a checkpoint holds of them.

    Raises:
        CheckpointError: a state is damaged.
    """
    for observer in observers:
        if observer.name in states:
            with fitting(f"what {observer.name!r} has kept in the checkpoint"):
                observer.load_state_dict(states[observer.name])


def stop_reason(observers: Iterable[Observer]) -> str | None:
    """Why a run is over before its last step; None where it is not."""
    return next((why for why in (observer.stop_reason() for observer in observers) if why is not None), None)


def _sections(config: BaseModel) -> Iterator[BaseModel]:
    """All sections of a run file, however deep."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        for section in value if isinstance(value, list) else [value]:
            if isinstance(section, BaseModel):
                yield section
                yield from _sections(section)
