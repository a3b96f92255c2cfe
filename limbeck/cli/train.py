"""``limbeck train`` and ``limbeck cache``: run files."""

from __future__ import annotations

import gc
import importlib.util
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck.cli.options import JsonOption, OverridesArgument, RunFileArgument, note, print_json
from limbeck.errors import ExitCode, LimbeckError, StoppedEarly


def train_command(
    run_file: RunFileArgument,
    overrides: OverridesArgument = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Results, warnings and errors alone: no summary, no progress.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all that the run needs, say what would happen, and stop.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Show where the time of ten steps goes: a table, a page and a trace."),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Distil: train the student of a run file; resumes by itself where a checkpoint lies.

    Ctrl-C and SIGTERM save after the running step; the same command goes on from there.

    Example: limbeck train cpu_smoke distillation.max_num_steps=5
    """
    from limbeck.cli.progress import display
    from limbeck.utils.collector import rare_collections

    overrides = [*(["logger.profile_steps=10"] if profile else []), *(overrides or [])]
    if dry_run:
        _look(run_file, overrides, json_output=json_output)
        return
    if importlib.util.find_spec("torch") is None:
        # told alone, before a run says its first word
        raise ModuleNotFoundError(name="torch")
    first = os.environ.get("RANK", "0") == "0"
    stopped: StoppedEarly | None = None
    with display(lines=True, quiet=quiet) as shown:
        with shown.stage("starting") if first else nullcontext(), rare_collections():
            from limbeck.algorithms.dispatch import resolve_run
            from limbeck.algorithms.summary import summary
            from limbeck.config import load_config
            from limbeck.distributed.launch import launch
            from limbeck.report.profile_page import write_profile
            from limbeck.report.run_page import write_report

            config: Any
            config, run = resolve_run(load_config(run_file, overrides))
        gc.freeze()  # modules stay until the end: no collection need look at them again
        if first and not quiet:
            shown.say("\n".join(summary(config)))
        folder = Path(config.logger.log_dir)
        try:
            folder = launch(run, config)
        except StoppedEarly as error:
            stopped = error
        except KeyboardInterrupt:
            checkpoints = Path(config.checkpointing.checkpoint_dir or folder / "checkpoints")
            raise StoppedEarly(_ended_at_once(checkpoints), interrupted=True) from None
    if first:
        page = write_report(folder)
        profiled = write_profile(folder) if config.logger.profile_steps else None
        if json_output:
            pages = {"report": str(page), **({} if profiled is None else {"profile": str(profiled)})}
            print_json({"run_folder": str(folder), **pages, "stopped_early": stopped is not None})
        else:
            typer.echo(f"run folder: {folder}\nreport: {page}")
            if profiled is not None:
                typer.echo(f"profile: {profiled}")
    if stopped is not None:
        raise stopped


def _look(run_file: Path, overrides: list[str], *, json_output: bool) -> None:
    """The dry run: all problems, and what would happen without them."""
    from limbeck.algorithms.dispatch import resolve_run
    from limbeck.algorithms.dry_run import dry_run
    from limbeck.algorithms.summary import summary
    from limbeck.cli.progress import display
    from limbeck.config import load_config

    told: list[str] = []
    with display(lines=True, quiet=json_output) as shown:

        def say(line: str) -> None:
            told.append(line)
            if not json_output:
                shown.say(line)

        try:
            config, _ = resolve_run(load_config(run_file, overrides))
        except LimbeckError as error:
            problems = [str(error)]
        else:
            if not json_output:
                shown.say("\n".join(summary(config)))
            problems = dry_run(config, say)
    if json_output:
        print_json({"problems": problems, "found": told})
    for problem in problems:
        note(f"problem: {problem}")
    if problems:
        raise typer.Exit(ExitCode.USAGE)
    if not json_output:
        typer.echo("nothing is wrong; without --dry-run the run would start")


def _ended_at_once(checkpoints: Path) -> str:
    """What a user who did not wait for the end of a step will find."""
    steps = [int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*")]
    begins = f"goes on from step {max(steps)}" if steps else "begins at step 1"
    return f"ended at once, nothing was saved; the next start {begins}"


def cache_command(
    run_file: RunFileArgument,
    overrides: OverridesArgument = None,
    json_output: JsonOption = False,
) -> None:
    """Store the teachers' signals once; train many students on them without the teachers' weights.

    Example: limbeck cache cached_teacher teacher.cache=cache/qwen3-4b
    """
    from limbeck.algorithms.caching import cache_teachers
    from limbeck.algorithms.config import MasterConfig
    from limbeck.config import load_config, resolve

    config = resolve(MasterConfig, load_config(run_file, overrides or []))
    summary = cache_teachers(config, say=note)
    if json_output:
        print_json({"caches": summary})
        return
    for row in summary:
        typer.echo(f"teacher {row['teacher']}: {row['documents']} documents in {row['folder']}")
