"""``limbeck train`` and ``limbeck cache``: run files."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck.cli.options import (
    JsonOption,
    OverridesArgument,
    RunFileArgument,
    distillation_of,
    note,
    print_json,
    read_run_file,
)
from limbeck.errors import ConfigError, ExitCode, LimbeckError, StoppedEarly

RunFile = tuple[dict[str, Any], dict[str, Any]]
"""The keys of a run file, and settings over them."""


def train_command(
    run_file: Annotated[
        str | None, typer.Argument(help="YAML run file, or a recipe's name (limbeck recipes list).")
    ] = None,
    overrides: OverridesArgument = None,
    student: Annotated[
        str | None, typer.Option("--student", "-s", help="In place of a run file: model folder, GGUF file or hub id.")
    ] = None,
    teacher: Annotated[str | None, typer.Option("--teacher", "-t", help="The same; none: cross-entropy alone.")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="Training files, globs or hf:owner/name.")] = None,
    validation: Annotated[list[str] | None, typer.Option("--validation", help="Held-out files.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Run folder; none: runs/STUDENT-from-TEACHER.")] = None,
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
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Then train by cross-entropy alone on the same records, to compare with."),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Distil: train the student of a run file; resumes by itself where a checkpoint lies.

    Ctrl-C and SIGTERM save after the running step; the same command goes on from there.

    With --student and --data it is limbeck init and limbeck train in one: the run file is left in the run folder. The
    same call goes on with its run, another one has a folder of its own.

    Example: limbeck train cpu_smoke max_num_steps=5

    Example: limbeck train --student ./Llama-3.2-1B --teacher ./Qwen3-4B --data train.jsonl
    """
    settings = [*(overrides or []), *(["distillation.baseline=true"] if baseline else [])]
    if student is not None or data is not None:
        settings, run_file = [*([] if run_file is None else [run_file]), *settings], None
    named = {"--student": student, "--teacher": teacher, "--data": data, "--validation": validation, "--out": out}
    _check_call(run_file, settings, named)
    profiled_steps = ["logger.profile_steps=10"] if profile else []

    def read(*, write: bool = True) -> RunFile:
        if run_file is not None:
            return read_run_file(run_file, [*profiled_steps, *settings])
        return _read_pair(named, settings, profiled_steps, write=write)

    if dry_run:
        _look(read, json_output=json_output)
        return
    if importlib.util.find_spec("torch") is None:
        # reported alone, before a run prints its first line
        raise ModuleNotFoundError(name="torch")
    first = os.environ.get("RANK", "0") == "0"
    # a run file's mistakes are reported before anything is shown; a pair is looked at under the progress of the start
    loaded = read() if run_file is not None else None
    config, folder, stopped = _train(loaded, read, first=first, quiet=quiet)
    if first:
        _print_pages(config, folder, stopped=stopped is not None, json_output=json_output)
    if stopped is not None:
        raise stopped


def _read_pair(named: dict[str, Any], settings: list[str], profiled_steps: list[str], *, write: bool) -> RunFile:
    """The run file of --student, --teacher and --data. write: leave it in the run folder."""
    from limbeck.config import read_settings, refuse_unknown_keys

    values = read_settings(settings)
    refuse_unknown_keys({}, values)
    from limbeck.tools.pair import Pair, values_of

    taught = None if named["--teacher"] in (None, "none") else named["--teacher"]
    files = tuple(named["--data"] or ()), tuple(named["--validation"] or ())
    pair = Pair(named["--student"], taught, *files, tuple(settings), values, named["--out"])
    return values_of(pair, write=write), read_settings(profiled_steps)


def _train(
    loaded: RunFile | None, read: Callable[[], RunFile], *, first: bool, quiet: bool
) -> tuple[Any, Path, StoppedEarly | None]:
    """(resolved run file, run folder, why the run ended before its last step). loaded: the run file, where it has been
    read already; first: whether this is the process that speaks."""
    from limbeck.cli.progress import display
    from limbeck.utils.collector import rare_collections

    with display(lines=True, quiet=quiet) as screen:
        with screen.stage("starting") if first else nullcontext(), rare_collections():
            loaded = loaded or read()  # ahead of imports that take seconds: it refuses unknown keys
            from limbeck.algorithms.dispatch import resolve_run
            from limbeck.distributed.launch import launch
            from limbeck.tools.summary import rate_by_default, summary

            config: Any
            config, run = resolve_run(*loaded)
            said = [*summary(config), *rate_by_default(config, *loaded)] if first and not quiet else []
        gc.freeze()  # modules stay until the end: no collection need look at them again
        if said:
            screen.say("\n".join(said))
        folder = Path(config.logger.log_dir)
        try:
            return config, launch(run, config), None
        except StoppedEarly as error:
            return config, folder, error
        except KeyboardInterrupt:
            checkpoints = Path(config.checkpointing.checkpoint_dir or folder / "checkpoints")
            raise StoppedEarly(_ended_at_once(checkpoints), interrupted=True) from None


def _print_pages(config: Any, folder: Path, *, stopped: bool, json_output: bool) -> None:
    """Write the report, and the profile where one was taken, and say where they lie."""
    from limbeck.report.profile_page import write_profile
    from limbeck.report.run_page import write_report

    page = write_report(folder)
    profile = write_profile(folder) if config.logger.profile_steps else None
    if json_output:
        pages = {"report": str(page), **({} if profile is None else {"profile": str(profile)})}
        print_json({"run_folder": str(folder), **pages, "stopped_early": stopped})
        return
    typer.echo(f"run folder: {folder}\nreport: {page}")
    if profile is not None:
        typer.echo(f"profile: {profile}")


def _check_call(run_file: str | None, settings: list[str], named: dict[str, Any]) -> None:
    """Refuse a call that names neither a run file nor a pair, or both."""
    options = [option for option, value in named.items() if value]
    if run_file is not None and options:
        raise ConfigError(f"{options[0]} goes with --student and --data, not with the run file {run_file!r}")
    missing = [option for option in ("--student", "--data") if not named[option]]
    if run_file is None and missing:
        also = f"{options[0]} is given without {missing[0]}; " if options else ""
        raise ConfigError(f"{also}give a run file, a recipe's name (limbeck recipes list), or --student and --data")
    files = [text for text in settings if "=" not in text]
    if run_file is None and files:
        raise ConfigError(f"{files[0]!r} is no setting (key=value); with --student no run file is given")


def _look(read: Callable[..., RunFile], *, json_output: bool) -> None:
    """The dry run: all problems, and what would happen without them."""
    from limbeck.cli.progress import display

    lines: list[str] = []
    with display(lines=True, quiet=json_output) as screen:

        def say(line: str) -> None:
            lines.append(line)
            if not json_output:
                screen.say(line)

        try:
            loaded = read(write=False)
            from limbeck.algorithms.dispatch import resolve_run
            from limbeck.tools.dry_run import dry_run
            from limbeck.tools.summary import rate_by_default, summary

            config, _ = resolve_run(*loaded)
        except LimbeckError as error:
            problems = [str(error)]
        else:
            if not json_output:
                screen.say("\n".join([*summary(config), *rate_by_default(config, *loaded)]))
            problems = dry_run(config, say)
    if json_output:
        print_json({"problems": problems, "found": lines})
    for problem in problems:
        note(f"problem: {problem}")
    if problems:
        raise typer.Exit(ExitCode.USAGE)
    if not json_output:
        typer.echo("nothing is wrong; without --dry-run the run would start")


def _ended_at_once(checkpoints: Path) -> str:
    """Line for a user who did not wait for the end of a step."""
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
    loaded = read_run_file(run_file, overrides)
    from limbeck.algorithms.caching import cache_teachers

    config = distillation_of(loaded)
    summary = cache_teachers(config, say=note)
    if json_output:
        print_json({"caches": summary})
        return
    for row in summary:
        typer.echo(f"teacher {row['teacher']}: {row['documents']} documents in {row['folder']}")
