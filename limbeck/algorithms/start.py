"""Start of all recipes: ranks, run folder, checkpoint, student; and whether a run is over."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from limbeck.algorithms import run_folder
from limbeck.algorithms.observers import load_states, make_observers, stop_reason
from limbeck.algorithms.preflight import preflight, stored_checkpoints
from limbeck.algorithms.run import RunState, steps_of
from limbeck.distributed.comm import Comm, init_distributed, leave_distributed, naming_silent_ranks
from limbeck.errors import CheckpointError, ConfigError, StoppedEarly
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.tokens import ByteVocab
from limbeck.utils.checkpoint import CheckpointManager
from limbeck.utils.logger import last_step
from limbeck.utils.progress import say, stage
from limbeck.utils.state import seed_everything


def join_ranks(config: Any) -> Comm:
    """All ranks of a run that its file allows; they begin with the same random numbers."""
    ranks = init_distributed(config.cluster.backend, config.cluster.timeout)
    with ranks.fail_together():
        preflight(config)
    seed_everything(config.distillation.seed)
    return ranks


def find_checkpoint(config: Any) -> tuple[CheckpointManager, Checkpoint | None]:
    """The run's checkpoints, and the one that it goes on from. Collective."""
    checkpointer = CheckpointManager(config.checkpointing, run_dir=config.logger.log_dir)
    folder = checkpointer.to_resume()
    return checkpointer, None if folder is None else Checkpoint(folder)


def open_folder(
    config: Any, latest: Checkpoint | None, student_tokenizer: object, teacher_tokenizers: Sequence[Any], **more: Any
) -> None:
    """Store what identifies the run in its folder, and refuse a resumed run of another configuration; ``more``: other
    facts to store. What the run reads is compared by `origins` and `run_folder.check_same_data`."""
    if Comm.world().rank != 0:
        return
    facts = run_folder.versions(
        seed=config.distillation.seed,
        student_fingerprint=ByteVocab.from_tokenizer(student_tokenizer).fingerprint,
        teacher_fingerprints=[ByteVocab.from_tokenizer(t).fingerprint for t in teacher_tokenizers],
        **more,
    )
    run_folder.open_run_folder(config, config.logger.log_dir, has_checkpoint=latest is not None, versions=facts)


def load_student(
    config: Any,
    policy: PolicyConfig,
    tokenizer: object,
    latest: Checkpoint | None,
    *,
    model: nn.Module | None = None,
) -> Policy:
    """The student with its trainer, from the latest checkpoint if there is one. ``policy``: its section, fitted to the
    device; ``model``: in memory, instead of loading it. Collective."""
    with stage(f"loading the student {policy.shown_name}"):
        return Policy(
            policy,
            tokenizer,
            name="student",
            seed=config.distillation.seed,
            weights_path=latest.weights if latest else None,
            optimizer_path=latest.optimizer if latest else None,
            dp_group=Comm.world(),
            model=model,
        )


def log_start(
    config: Any, checkpointer: CheckpointManager, latest: Checkpoint | None, loader: StatefulDataLoader
) -> None:
    """Say where a run begins, and where an earlier one in its folder left nothing to go on from. Before its logger is
    made, which begins the metrics anew."""
    total = steps_of(config, loader)
    line = f"beginning at step 1 of {total}"
    if latest is not None:
        info = checkpointer.load_training_info(latest.folder) or {}
        line = f"resuming from step {info.get('total_steps')} of {total}"
    elif (before := last_step(config.logger.log_dir)) > 0:
        why = "none was due before it ended" if checkpointer.config.enabled else "checkpointing.enabled is false"
        line += f": an earlier run in this folder came to step {before} and left no checkpoint ({why})"
    say(line)


def is_finished(config: Any) -> bool:
    """Whether the run of this configuration has come to its end, as its last checkpoint says; prints a line.

    Looked at before anything is loaded. What such a glance cannot settle (another configuration, a checkpoint that is
    damaged) is no end: the run's start deals with it.
    """
    if not config.checkpointing.enabled:
        return False
    d = config.distillation
    checkpointer = stored_checkpoints(config)
    try:
        latest = checkpointer.latest()
        info = {} if latest is None else checkpointer.load_training_info(latest) or {}
        state, observers = RunState.of(info), make_observers(config)
        load_states(observers, state.observers)
        done = state.total_steps >= d.max_num_steps or state.current_epoch >= d.max_num_epochs
        why = stop_reason(observers)
        if latest is None or not (done or why):
            return False
        if run_folder.changes(config, config.logger.log_dir):
            return False
        checkpointer.check(latest)
    except (CheckpointError, ConfigError, TypeError):
        return False
    more = "raise distillation.max_num_steps or max_num_epochs to go on" if done else f"it ended early: {why}"
    say(f"the run is complete with {state.total_steps} steps; nothing is left to do ({more})")
    return True


@contextmanager
def whole_run(config: Any) -> Iterator[None]:
    """Around a run from its file to its end: its folder for it alone, number formats, a full disk in one line, leaving
    the peers. ``config``: run file with the sections ``logger`` and ``checkpointing``."""
    run_dir = config.logger.log_dir
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    # ranks that the caller has joined are left by the caller
    alone = not dist.is_initialized()
    try:
        elsewhere = config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None
        with run_folder.held(run_dir, elsewhere), naming_silent_ranks():
            yield
    except StoppedEarly:
        if alone:
            leave_distributed()
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"no space left while writing to the run folder {run_dir!r}; free some space and start the same run again: "
            "it goes on from its last checkpoint"
        ) from error
    if alone:
        leave_distributed()
