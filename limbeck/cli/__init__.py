"""The ``limbeck`` command: parse, call, print.

Every verb ends with exit code 0, or with 1 and one clear line on standard error; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck import __version__
from limbeck.errors import ConfigError, DataError, LimbeckError

app = typer.Typer(
    name="limbeck",
    help="Distil any language model into any other, across tokenizers and across contexts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

StudentOption = Annotated[str, typer.Option("--student", "-s", help="Model folder, tokenizer file or hub id.")]
TeacherOption = Annotated[str, typer.Option("--teacher", "-t", help="Model folder, tokenizer file or hub id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Set-up that all verbs share."""
    if version:
        typer.echo(f"limbeck {__version__}")
        raise typer.Exit


@app.command()
def align(
    student: StudentOption,
    teacher: TeacherOption,
    text: Annotated[str | None, typer.Argument(help="Text to align; '-' reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text from a file.")] = None,
    messages: Annotated[
        Path | None, typer.Option("--messages", "-m", help="JSON file: a list of messages, or {messages, tools}.")
    ] = None,
    json_output: JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a self-contained page.")] = None,
) -> None:
    """Show two tokenizations of one text side by side, chunk by chunk.

    Example: limbeck align --student ./Llama-3.2-1B --teacher ./Qwen3-4B "In 2011 the café had 1,024 visitors."
    """
    from limbeck.align.view import view_messages, view_text
    from limbeck.report.alignment import print_alignment, write_alignment_page
    from limbeck.tokens import load_tokenizer

    if sum(x is not None for x in (text, file, messages)) != 1:
        raise ConfigError("give exactly one of a text, --file or --messages.")
    if messages:
        conversation, tools = _read_messages(messages)
        view = view_messages(load_tokenizer(student), load_tokenizer(teacher), conversation, tools)
    else:
        content = _read_text(text, file)
        view = view_text(load_tokenizer(student), load_tokenizer(teacher), content)
    names = _short(student), _short(teacher)
    if html:
        write_alignment_page(view, html, names)
    if json_output:
        typer.echo(json.dumps(view, ensure_ascii=False))
    else:
        print_alignment(view, _console(), names)
        if html:
            typer.echo(f"page: {html}")


@app.command()
def train(
    run_file: Annotated[Path, typer.Argument(help="YAML run file; see recipes/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that replace the file's: key.sub=value.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the resolved run file.")] = False,
) -> None:
    """Distil: train the student of a run file; resumes by itself where a checkpoint lies.

    Example: limbeck train recipes/cpu_smoke.yaml distillation.max_num_steps=5
    """
    from limbeck.algorithms.dispatch import resolve_run
    from limbeck.config import dump_yaml, load_config
    from limbeck.distributed.launch import launch
    from limbeck.report.run_page import write_report

    config, run = resolve_run(load_config(run_file, overrides or []))
    if not quiet and os.environ.get("RANK", "0") == "0":
        typer.echo(dump_yaml(config), err=True)
    folder = launch(run, config)
    if os.environ.get("RANK", "0") == "0":
        page = write_report(folder)
        typer.echo(f"run folder: {folder}\nreport: {page}")


@app.command()
def cache(
    run_file: Annotated[Path, typer.Argument(help="YAML run file whose teachers name a cache folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that replace the file's: key.sub=value.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Store the teachers' signals once; train many students on them without the teachers' weights.

    Example: limbeck cache recipes/cached_teacher.yaml teacher.cache=cache/qwen3-4b
    """
    from limbeck.algorithms.caching import cache_teachers
    from limbeck.algorithms.master_config import MasterConfig
    from limbeck.config import load_config, resolve

    config = resolve(MasterConfig, load_config(run_file, overrides or []))
    summary = cache_teachers(config, say=lambda line: typer.echo(line, err=True))
    if json_output:
        typer.echo(json.dumps({"caches": summary}))
    else:
        for row in summary:
            typer.echo(f"teacher {row['teacher']}: {row['documents']} documents in {row['folder']}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the run; must not hold an earlier demo.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="Optimizer steps of each of the two trainings.", min=1)] = 150,
    documents: Annotated[int, typer.Option(help="Training documents.", min=8)] = 120,
    json_output: JsonOption = False,
) -> None:
    """Distil a real teacher into a small student on this machine: no network, no GPU, about five minutes.

    Example: limbeck demo --out runs/demo
    """
    from limbeck.demo import run_demo
    from limbeck.report.run_page import write_report

    result = run_demo(_fresh(out), steps=steps, documents=documents, say=lambda line: typer.echo(line, err=True))
    page = write_report(result["run_dir"])
    _print_demo(result)
    typer.echo(f"report: {page}")
    if json_output:
        typer.echo(json.dumps(result))


def _fresh(folder: Path) -> Path:
    """The default folder gets a number where earlier demos lie; a folder that the user named is taken as it is."""
    if folder != Path("runs/demo"):
        return folder
    number = 1
    while (candidate := folder if number == 1 else Path(f"{folder}-{number}")).exists():
        number += 1
    return candidate


def _print_demo(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="bits per byte on held-out text (lower is better)", title_justify="left")
    table.add_column("student")
    table.add_column("bits per byte", justify="right")
    for name, key in (
        ("before training", "bpb_start"),
        ("cross-entropy alone", "bpb_ce"),
        ("distilled", "bpb_distilled"),
        ("the teacher itself", "bpb_teacher"),
    ):
        table.add_row(name, f"{result[key]:.3f}")
    _console().print(table)
    typer.echo(f"{result['seconds']:.0f} s; everything is in {result['run_dir']}")


@app.command()
def doctor(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models whose tokenizer, head and template to check.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check this installation and, if given, models: versions, devices, extras, tokenizers, heads, chat templates.

    Example: limbeck doctor ./Llama-3.2-1B ./Qwen3-4B
    """
    from limbeck.doctor import examine, print_findings

    findings = examine(models or [])
    if json_output:
        typer.echo(json.dumps({"findings": findings}))
    else:
        print_findings(findings, _console())
    if any(f["level"] == "bad" for f in findings):
        raise typer.Exit(1)


def _register() -> None:
    """Verbs whose parameters live beside the code they call."""
    from limbeck.cli.evaluate import eval_command, report_command
    from limbeck.cli.plan import plan_command
    from limbeck.cli.project import project_command
    from limbeck.cli.traces import traces_app

    app.command("project")(project_command)
    app.command("eval")(eval_command)
    app.command("report")(report_command)
    app.command("plan")(plan_command)
    app.add_typer(traces_app, name="traces")


def _console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=False)


def _short(spec: str) -> str:
    path = Path(spec)
    return path.parent.name if path.name in ("tokenizer.json", "tekken.json") else path.name or spec


def _read_text(text: str | None, file: Path | None) -> str:
    if file is None:
        return sys.stdin.read() if text == "-" else str(text)
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}; convert it first.") from error


def _read_messages(path: Path) -> tuple[list[dict[str, Any]], Any]:
    try:
        data = json.loads(_read_text(None, path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno} is no JSON: {error.msg}.") from error
    messages, tools = (data.get("messages"), data.get("tools")) if isinstance(data, dict) else (data, None)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(f"{path} holds no list of messages; expected [{{role, content}}, ...] or {{messages: [...]}}.")
    return messages, tools


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run the command and turn an expected error into one line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    _register()
    try:
        app(args=arguments, prog_name="limbeck", standalone_mode=True)
    except LimbeckError as error:
        if debug:
            raise
        typer.echo(f"limbeck: {error}", err=True)
        raise SystemExit(1) from None
    except (BrokenPipeError, KeyboardInterrupt):
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
