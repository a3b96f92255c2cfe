"""``limbeck train`` and ``limbeck cache``: run files."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from limbeck.cli.options import JsonOption, OverridesArgument, RunFileArgument, note, print_json
from limbeck.errors import StoppedEarly


def train_command(
    run_file: RunFileArgument,
    overrides: OverridesArgument = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the resolved run file.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Distil: train the student of a run file; resumes by itself where a checkpoint lies.

    Example: limbeck train cpu_smoke distillation.max_num_steps=5
    """
    from limbeck.algorithms.dispatch import resolve_run
    from limbeck.cli.progress import display
    from limbeck.config import dump_yaml, load_config
    from limbeck.distributed.launch import launch, stopped_early
    from limbeck.report.run_page import write_report

    config, run = resolve_run(load_config(run_file, overrides or []))
    first = os.environ.get("RANK", "0") == "0"
    if not quiet and first:
        note(dump_yaml(config))
    stopped_early.clear()
    with display(lines=True):
        folder = launch(run, config)
    if first:
        page = write_report(folder)
        if json_output:
            print_json({"run_folder": str(folder), "report": str(page), "stopped_early": stopped_early.is_set()})
        else:
            typer.echo(f"run folder: {folder}\nreport: {page}")
    if stopped_early.is_set():
        raise StoppedEarly("the run was stopped and has saved its state; the same command goes on from there")


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
