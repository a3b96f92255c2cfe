"""``limbeck traces ...``: agent logs to canonical traces, secrets, failed calls, preference pairs, a page of all."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limbeck.cli.options import JsonOption, console, note, print_json
from limbeck.errors import PartlyDone, TraceError, one_line

if TYPE_CHECKING:
    from limbeck.traces import ComposerDataCollator
    from limbeck.traces.endpoint import Budget
    from limbeck.traces.failed_calls import FailedCall
    from limbeck.traces.files import IngestStats
    from limbeck.traces.hints import HintGenerator
    from limbeck.traces.judge import EndpointJudge
    from limbeck.traces.readers import ReadLog
    from limbeck.traces.redact import Redactor
    from limbeck.traces.replay import Proposer, Replayer
    from limbeck.traces.schema import Trace
    from limbeck.utils.files import JsonCache

# lazy, so that an @ inside the URL stays there
_MODEL_AT_URL = r"(?P<model>.+?)@(?P<url>https?://.+)"

traces_app = typer.Typer(
    help="Agent logs: canonical traces, failed calls, preference pairs.\n\nExample: limbeck traces ingest logs/*.jsonl",
    no_args_is_help=True,
)


class DetectorSet(str, Enum):
    """Which signs of failure count."""

    standard = "standard"
    extended = "extended"


class States(str, Enum):
    """Which recorded messages are replayed."""

    errors = "errors"
    all = "all"


FilesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Log files, folders or quoted globs; - is standard input, .gz and .zst are unpacked.", metavar="FILES..."
    ),
]
ToolsOption = Annotated[
    Path | None, typer.Option("--tools", help="JSON list of tool schemas, for logs that lack them.")
]
SystemOption = Annotated[
    Path | None, typer.Option("--system", help="Text file with the system prompt, for logs that lack one.")
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", "-f", help="Log format, such as claude_code or openai_chat; default: by its content."),
]
RedactOption = Annotated[bool, typer.Option("--redact/--no-redact", help="Take keys, tokens and passwords out.")]
PiiOption = Annotated[
    bool,
    typer.Option(
        "--redact-pii",
        help="Also e-mail addresses, names in home paths, phone, card, IBAN and social security numbers.",
    ),
]
RulesOption = Annotated[
    list[Path] | None,
    typer.Option("--redact-rules", help="YAML file with patterns of your own, beside the kept ones; repeatable."),
]
ReasoningOption = Annotated[bool, typer.Option("--strip-reasoning", help="Take hidden reasoning out of all messages.")]
AllFailuresOption = Annotated[
    bool, typer.Option("--all-failures", help="Count checks that found something and interruptions as mistakes.")
]
DetectorsOption = Annotated[
    DetectorSet, typer.Option("--detectors", help="extended: also failures that the log states without a flag.")
]


@traces_app.command("ingest")
def ingest_command(
    files: FilesArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write canonical traces, one per line.")] = None,
    format: FormatOption = None,
    redact: RedactOption = True,
    redact_pii: PiiOption = False,
    redact_rules: RulesOption = None,
    strip_reasoning: ReasoningOption = False,
    detectors: DetectorsOption = DetectorSet.standard,
    tools: ToolsOption = None,
    system: SystemOption = None,
    judge: Annotated[
        str | None, typer.Option(help="MODEL@URL of a chat endpoint that scores traces without a reward, 0 to 1.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps the judge's answers.")] = None,
    api_key_env: Annotated[str, typer.Option(help="Environment variable with the judge's key.")] = "OPENAI_API_KEY",
    json_output: JsonOption = False,
) -> None:
    """Read agent logs into canonical traces and show what is in them.

    Example: limbeck traces ingest session.jsonl airline.jsonl -o traces.jsonl
    """
    from limbeck.cli.progress import display
    from limbeck.traces.files import IngestOptions, IngestStats, LogReadingConfig, find_files, ingest
    from limbeck.utils.files import JsonCache, Output

    stats = IngestStats()
    logs, inputs = find_files(files), [path for path in (tools, system, *(redact_rules or [])) if path]
    redactor = _redactor(redact_pii, redact_rules)
    reading = LogReadingConfig(format=format, detectors=detectors.value, redact=redact, strip_reasoning=strip_reasoning)
    options = IngestOptions(reading, redactor, **_lacking(tools, system))
    scorer = None
    if judge is not None:
        # a judge may repeat a secret of the trace, and its answers stay on disk
        answers = None if cache is None else JsonCache(cache, redactor.value if redact else None)
        scorer = _endpoint(judge, api_key_env, answers)
        if scorer is None:
            raise TraceError(f"--judge {judge!r} is not understood: expected MODEL@http://host:port/v1")
    with Output(out, [*logs, *inputs]) as output, display() as progress:
        bar = progress.begin("traces")
        for trace in ingest(logs, options, stats):
            output.line((trace if scorer is None else scorer.scored(trace)).to_json())
            bar.advance()
    if scorer is not None:
        scorer.close()
        stats.rewarded += scorer.counts["scored"]
    if json_output:
        print_json(stats.summary())
    else:
        _print_ingest(stats)
    if scorer is not None:
        for reason, count in scorer.failures.most_common():
            note(f"the judge gave no score, {count} times: {reason}")
    if stats.traces and not stats.rewarded:
        note("no trace has a reward, so the policy channel is off for them; --judge MODEL@URL scores whole traces")
    _warn(stats.log)
    # last: one file of no known format is an error, and what the others gave is written by now
    _require_traces(stats, logs)


@traces_app.command("secrets")
def secrets_command(
    files: FilesArgument,
    format: FormatOption = None,
    redact_pii: PiiOption = False,
    redact_rules: RulesOption = None,
    json_output: JsonOption = False,
) -> None:
    """List what redaction takes out of agent logs, without writing anything; of a secret only its beginning is shown.

    Example: limbeck traces secrets session.jsonl --redact-pii
    """
    from rich.markup import escape
    from rich.table import Table

    from limbeck.traces.files import IngestOptions, IngestStats, LogReadingConfig, find_files, ingest

    stats = IngestStats()
    logs = find_files(files)
    redactor = _redactor(redact_pii, redact_rules)
    hits: list[dict[str, Any]] = []
    for trace in ingest(logs, IngestOptions(LogReadingConfig(format=format, redact=False)), stats):
        for message, hit in redactor.hits(trace):
            hits.append({"trace": redactor.id(trace.id), "message": message, "kind": hit.kind, "secret": hit.preview})
    if json_output:
        print_json({"traces": stats.traces, "hits": hits})
    else:
        table = Table(title=f"{len(hits)} secrets in {stats.traces} traces", title_justify="left")
        for column in ("trace", "message", "kind", "secret"):
            table.add_column(column)
        for row in hits:
            table.add_row(*(escape("-" if cell is None else str(cell)) for cell in row.values()))
        console().print(table if hits else f"no secret in {stats.traces} traces")
    _warn(stats.log)
    _require_traces(stats, logs)


@traces_app.command("sites", hidden=True)
@traces_app.command("errors")
def errors_command(
    files: FilesArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write failed calls, one per line.")] = None,
    format: FormatOption = None,
    recovery_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of the message that put it right, as a second target.")
    ] = 0.0,
    hints: Annotated[str, typer.Option(help="Hint generators in order, from: template, raw.")] = "template,raw",
    hook: Annotated[
        str | None, typer.Option(help="module:function (error_kind, error_meta) -> text or None; asked first.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="MODEL@URL of a chat endpoint, or module:function (HintRequest) -> text or None; asked where "
            "templates are weak."
        ),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps the judge's answers.")] = None,
    api_key_env: Annotated[str, typer.Option(help="Environment variable with the judge's key.")] = "OPENAI_API_KEY",
    all_failures: AllFailuresOption = False,
    redact: RedactOption = True,
    redact_pii: PiiOption = False,
    redact_rules: RulesOption = None,
    strip_reasoning: ReasoningOption = False,
    detectors: DetectorsOption = DetectorSet.standard,
    tools: ToolsOption = None,
    system: SystemOption = None,
    json_output: JsonOption = False,
) -> None:
    """Find the messages whose tool calls failed and write a hint for each.

    Example: limbeck traces errors traces.jsonl -o errors.jsonl
    """
    from limbeck.cli.progress import display
    from limbeck.traces.failed_calls import FailedCallFinder
    from limbeck.traces.files import IngestOptions, IngestStats, LogReadingConfig, find_files, ingest
    from limbeck.traces.hints import LayeredHints
    from limbeck.utils.files import JsonCache, Output

    stats = IngestStats()
    logs, inputs = find_files(files), [path for path in (tools, system, *(redact_rules or [])) if path]
    redactor = _redactor(redact_pii, redact_rules)
    clean: Callable[[Any], Any] = redactor.value if redact else lambda value: value
    answers = None if cache is None else JsonCache(cache, clean)
    generators = _generators(hints, hook, judge, answers, api_key_env)
    finder = FailedCallFinder(LayeredHints(generators), recovery_weight, all_failures=all_failures)
    reading = LogReadingConfig(format=format, detectors=detectors.value, redact=redact, strip_reasoning=strip_reasoning)
    options = IngestOptions(reading, redactor, **_lacking(tools, system))
    with Output(out, [*logs, *inputs]) as output, display() as progress:
        bar = progress.begin("traces")
        for trace in ingest(logs, options, stats):
            for failed_call in finder.find(trace):
                # the trace is clean already; the hint of a hook or a judge is not
                row = clean(failed_call.model_dump(mode="json", exclude_defaults=True))
                output.line(json.dumps(row, ensure_ascii=False))
            bar.advance()
    summary = finder.summary()
    if json_output:
        print_json(summary)
    else:
        _print_counts(
            f"{summary['failed_calls']} failed calls in {stats.traces} traces", "error kind", summary["by_kind"]
        )
        _print_counts("hints", "source", summary["by_hint_source"])
        _print_counts("skipped", "reason", summary["skipped"])
    for problem, count in finder.hints.problems.most_common():
        note(f"hint not usable, {count} times: {problem}")
    _warn(stats.log)
    _require_traces(stats, logs)


@traces_app.command("pairs")
def pairs_command(
    files: FilesArgument,
    teacher: Annotated[
        list[str],
        typer.Option("--teacher", "-t", help="MODEL@URL of a chat endpoint, or py:module:function; repeatable."),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write preference pairs, one per line.")] = None,
    format: FormatOption = None,
    states: Annotated[States, typer.Option("--at", help="errors: messages whose calls failed; all: every one.")] = (
        States.errors
    ),
    all_failures: AllFailuresOption = False,
    quorum: Annotated[
        int | None, typer.Option(min=1, help="Equal answers that it takes (default: a majority).")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps the endpoints' answers, to resume from.")
    ] = None,
    api_key_env: Annotated[str, typer.Option(help="Environment variable with the endpoints' key.")] = "OPENAI_API_KEY",
    requests_per_minute: Annotated[float, typer.Option(min=0.0, help="Per endpoint; 0 for no limit.")] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight per endpoint.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds per request.")] = 120.0,
    retries: Annotated[int, typer.Option(min=0, help="Further attempts after a failed one.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    price_in: Annotated[float, typer.Option(min=0.0, help="Money per million prompt tokens.")] = 0.0,
    price_out: Annotated[float, typer.Option(min=0.0, help="Money per million answer tokens.")] = 0.0,
    max_cost: Annotated[float | None, typer.Option(min=0.0, help="Stop asking before this much is spent.")] = None,
    keep_reasoning: Annotated[bool, typer.Option("--keep-reasoning", help="Keep reasoning on both sides.")] = False,
    redact: RedactOption = True,
    redact_pii: PiiOption = False,
    redact_rules: RulesOption = None,
    tools: ToolsOption = None,
    system: SystemOption = None,
    json_output: JsonOption = False,
) -> None:
    """Ask teachers what they would have done, and pair their agreed action with the recorded one.

    Example: limbeck traces pairs traces.jsonl -t qwen3-32b@http://localhost:8000/v1 -o pairs.jsonl --cache answers
    """
    import asyncio

    from limbeck.cli.progress import display
    from limbeck.traces.endpoint import Budget
    from limbeck.traces.files import IngestOptions, IngestStats, LogReadingConfig, find_files, ingest
    from limbeck.traces.replay import Replayer, assistant_targets, error_targets
    from limbeck.utils.files import JsonCache, Output

    logs, inputs = find_files(files), [path for path in (tools, system, *(redact_rules or [])) if path]
    budget = Budget(max_cost)
    settings: dict[str, Any] = {
        "api_key_env": api_key_env,
        "timeout": timeout,
        "max_retries": retries,
        "requests_per_minute": requests_per_minute,
        "concurrency": concurrency,
        "max_tokens": max_tokens,
        "price_in": price_in,
        "price_out": price_out,
    }
    redactor = _redactor(redact_pii, redact_rules)
    answers = None if cache is None else JsonCache(cache, redactor.value if redact else None)
    teachers = [_teacher(spec, settings, answers, budget) for spec in teacher]
    replayer = Replayer(teachers, quorum, not keep_reasoning, redactor=redactor if redact else None)
    stats = IngestStats()
    targets = partial(error_targets, all_failures=all_failures) if states is States.errors else assistant_targets
    options = IngestOptions(LogReadingConfig(format=format, redact=redact), redactor, **_lacking(tools, system))
    traces = ingest(logs, options, stats)
    with Output(out, [*logs, *inputs]) as output, display() as progress:
        asyncio.run(_replay(replayer, traces, targets, output.line, progress.begin("pairs").advance))
        silent = _silent_teachers(replayer)
    summary = {
        **replayer.summary(),
        **_endpoint_figures(replayer.teachers),
        "redacted": replayer.redacted.total(),
        "cost": round(budget.spent, 6),
    }
    if json_output:
        print_json(summary)
    else:
        _print_pairs(summary)
    _warn(stats.log)
    _require_traces(stats, logs)
    if silent:
        raise PartlyDone(f"{len(silent)} of {len(teachers)} teachers never answered: {', '.join(silent)}")


@traces_app.command("view")
def view_command(
    files: FilesArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Page to write.")] = Path("traces.html"),
    format: FormatOption = None,
    student: Annotated[
        str | None, typer.Option(help="Tokenizer whose template writes the traces: folder, file, hub id or run folder.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="Tokenizer of a hinted teacher of another family.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Template (.jinja) of the student.")] = None,
    failed_calls: Annotated[
        Path | None,
        typer.Option(
            "--errors", "--sites", help="File of `traces errors`; by default failed calls and hints are found here."
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder: log-probabilities at its start and at its best checkpoint.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Traces shown, those with the most failed calls first.")] = 50,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Window in tokens.")] = 4096,
    redact: RedactOption = True,
    redact_pii: PiiOption = False,
    redact_rules: RulesOption = None,
    detectors: DetectorsOption = DetectorSet.standard,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Write a page of traces: what failed, the hints, what student and teacher read, and what is compared.

    Example: limbeck traces view session.jsonl --student ./SmolLM2-135M-Instruct -o traces.html
    """
    from limbeck.report.trace_page import TraceView
    from limbeck.traces.files import IngestOptions, IngestStats, LogReadingConfig, find_files, ingest
    from limbeck.utils.files import refuse_inputs

    logs = find_files(files)
    refuse_inputs(out, logs)
    stats = IngestStats()
    reading = LogReadingConfig(format=format, detectors=detectors.value, redact=redact)
    options = IngestOptions(reading, _redactor(redact_pii, redact_rules))
    traces = list(ingest(logs, options, stats))
    if not traces:
        _require_traces(stats, logs)
    chosen = sorted(traces, key=lambda trace: -sum(m.is_error for _, m in trace.new_messages()))[:most]
    reader = student or (None if run is None else str(run))
    collator, names = _view_collator(reader, teacher, chat_template, max_seq_len)
    view = TraceView(
        chosen,
        collator,
        None if failed_calls is None else _by_trace(failed_calls),
        {} if run is None else _view_scores(run, logs, max_seq_len),
        names,
        [f"{len(traces) - len(chosen):,} further traces are not shown."] if len(chosen) < len(traces) else [],
    )
    page = view.page(", ".join(path.name for path in logs[:3])).write(out)
    if json_output:
        print_json({"page": str(page), "traces": len(chosen)})
    else:
        typer.echo(f"page: {page}")
    _warn(stats.log)
    if open_page:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    # last: one file of no known format is an error, and the page of the others is written by now
    _require_traces(stats, logs)


def _view_collator(
    student: str | None, teacher: str | None, chat_template: str | None, limit: int
) -> tuple[ComposerDataCollator | None, tuple[str, str]]:
    if student is None:
        if teacher is not None or chat_template is not None:
            raise TraceError("--teacher and --chat-template need --student, whose tokens are shown")
        return None, ("", "")
    from limbeck.tokens.tokenizer import read_template
    from limbeck.traces import CollatorConfig, ComposerDataCollator

    student_tokenizer = _view_tokenizer(student)
    other = None if teacher is None else _view_tokenizer(teacher)
    if chat_template is not None:
        student_tokenizer.chat_template = read_template(chat_template)
    config = CollatorConfig(max_seq_len=limit, enable_replay_dpo=False)
    collator = ComposerDataCollator(student_tokenizer, config, teacher_tokenizer=other)
    return collator, (Path(student).name, Path(teacher or student).name)


def _view_tokenizer(spec: str) -> Any:
    """A tokenizer by its folder, file or hub id, or that of a run's best checkpoint."""
    from limbeck.tokens import load_tokenizer

    if not (Path(spec) / "checkpoints").is_dir():
        return load_tokenizer(spec)
    from limbeck.evaluation.models import find_model

    return load_tokenizer(find_model(spec).tokenizer)


def _view_scores(run: Path, files: list[Path], limit: int) -> dict[str, Any]:
    """Rows of log-probabilities by model: the start of a run, where it was stored, and its best checkpoint."""
    from limbeck.evaluation.bits import EvalOptions
    from limbeck.evaluation.traces import evaluate_traces

    start = run / "checkpoints" / "step_0"
    if not start.is_dir():
        note(f"{run} has no checkpoints/step_0 (distillation.save_start), so the page shows the end of the run alone")
    models = {"before": str(start), "after": str(run)} if start.is_dir() else {"after": str(run)}
    scores = evaluate_traces(list(models.values()), files, EvalOptions(context=limit))
    return {name: scores[spec]["rows"] for name, spec in models.items()}


def _by_trace(path: Path) -> dict[str, list[FailedCall]]:
    from limbeck.traces.files import read_failed_calls

    by_trace: dict[str, list[FailedCall]] = {}
    for failed_call in read_failed_calls(path):
        by_trace.setdefault(failed_call.trace_id, []).append(failed_call)
    return by_trace


async def _replay(
    replayer: Replayer,
    traces: Iterable[Trace],
    targets: Callable[[Trace], list[int]],
    write: Callable[[str], None],
    advance: Callable[[], None],
) -> None:
    from limbeck.traces.endpoint import EndpointProposer

    try:
        async for pair in replayer.pairs(traces, targets):
            write(json.dumps(pair.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False))
            advance()
    finally:
        # inside the loop that their connections belong to
        for teacher in replayer.teachers:
            if isinstance(teacher, EndpointProposer):
                await teacher.close()


# -- arguments ---------------------------------------------------------------------------------------------------------


def _load_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that ``module:function`` names: the user's code, of the environment or the working folder."""
    from limbeck.utils.plugins import load_object

    function = load_object(spec, option)
    if not callable(function):
        raise TraceError(f"{option} {spec!r} is a {type(function).__name__}: expected a function")
    return function


def _redactor(pii: bool, rules: list[Path] | None) -> Redactor:
    from limbeck.traces.redact import Redactor
    from limbeck.traces.secret_rules import read_rules

    return Redactor(pii=pii, rules=[read_rules(path) for path in rules or []])


def _lacking(tools: Path | None, system: Path | None) -> dict[str, Any]:
    """Tools and system prompt that a user gives for logs that lack them, as settings of ``IngestOptions``."""
    from limbeck.traces.files import read_tools

    settings: dict[str, Any] = {} if tools is None else {"tools": read_tools(tools)}
    if system is not None:
        try:
            settings["system"] = system.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"the system prompt {str(system)!r} cannot be read: {one_line(error)}") from error
    return settings


def _generators(
    hints: str, hook: str | None, judge: str | None, cache: JsonCache | None, api_key_env: str
) -> list[HintGenerator]:
    from limbeck.traces.hints import HookHints, JudgeHints, RawErrorHints, TemplateHints, with_judge

    known: dict[str, Callable[[], HintGenerator]] = {"template": TemplateHints, "raw": RawErrorHints}
    names = [name.strip() for name in hints.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise TraceError(f"unknown hint generator {unknown[0]!r}: expected some of {', '.join(known)}")
    generators: list[HintGenerator] = [HookHints(_load_function(hook, "--hook"))] if hook else []
    generators += [known[name]() for name in names]
    if judge:
        endpoint = _endpoint(judge, api_key_env)
        asked = _load_function(judge, "--judge") if endpoint is None else endpoint.hint
        generators = with_judge(generators, JudgeHints(asked, cache, name=f"judge:{judge}"))
    if not generators:
        raise TraceError("no hint generator is left: give at least one with --hints, --hook or --judge")
    return generators


def _endpoint(spec: str, api_key_env: str, cache: JsonCache | None = None) -> EndpointJudge | None:
    """The judge behind ``MODEL@URL``; None where the text names something else."""
    from limbeck.traces.endpoint import EndpointConfig
    from limbeck.traces.judge import EndpointJudge

    match = re.fullmatch(_MODEL_AT_URL, spec)
    if match is None:
        return None
    return EndpointJudge(EndpointConfig(url=match["url"], model=match["model"], api_key_env=api_key_env), cache)


def _teacher(spec: str, settings: dict[str, Any], answers: JsonCache | None, budget: Budget) -> Proposer:
    from limbeck.traces.endpoint import EndpointConfig, EndpointProposer
    from limbeck.traces.replay import CallableProposer

    if spec.startswith("py:"):
        return CallableProposer(_load_function(spec[3:], "--teacher"), spec[3:])
    match = re.fullmatch(_MODEL_AT_URL, spec)
    if match is None:
        raise TraceError(
            f"--teacher {spec!r} is not understood: expected MODEL@http://host:port/v1 or py:module:function"
        )
    return EndpointProposer(EndpointConfig(url=match["url"], model=match["model"], **settings), answers, budget)


def _endpoint_figures(teachers: Iterable[Proposer]) -> dict[str, int]:
    from limbeck.traces.endpoint import EndpointProposer

    counts: Counter[str] = Counter()
    for teacher in teachers:
        if isinstance(teacher, EndpointProposer):
            counts += teacher.counts
    return {name: counts[name] for name in ("requests", "retries", "cached")}


def _require_traces(stats: IngestStats, files: list[Path]) -> None:
    from limbeck.traces.readers import READERS

    if stats.traces == 0:
        reasons = ", ".join(f"{name} {count}" for name, count in stats.log.skipped.most_common(3))
        names = ", ".join(path.name for path in files[:3])
        raise TraceError(
            f"no trace was found in {names} ({reasons or 'the files are empty'}): check the files, or give --format, "
            f"one of {', '.join(READERS)}"
        )
    if unknown := stats.log.skipped["unknown_format"]:
        raise PartlyDone(f"{unknown} of {len(files)} files are of no known format and were left out: see above")


def _silent_teachers(replayer: Replayer) -> list[str]:
    """Teachers that were asked and never answered; an error where none did."""
    if not replayer.outcomes:
        return []
    silent = [teacher.name for teacher in replayer.teachers if not replayer.answers[teacher.name]]
    if len(silent) == len(replayer.teachers):
        reasons = ", ".join(f"{name} {count} times" for name, count in replayer.failures.most_common(3))
        raise TraceError(f"no teacher answered ({reasons}): check addresses, models and keys")
    return silent


# -- printing ----------------------------------------------------------------------------------------------------------

_SHOWN_PLACES = 10


def _warn(log: ReadLog) -> None:
    """Places of what was skipped, and what a user may want to know besides."""
    noteworthy = [location for location in log.places if ": event_" not in location]
    for location in noteworthy[:_SHOWN_PLACES]:
        note(f"skipped {location}")
    if len(noteworthy) > _SHOWN_PLACES:
        note("further places are not shown; the counts are complete")
    for version, count in log.versions.most_common():
        note(f"{count} events by {version}, a version that this reader was not checked with")
    for detector, count in log.suspected.most_common():
        note(f"{count} more results look failed by {detector}; --detectors extended counts them")


def _print_counts(title: str, column: str, counts: Mapping[str, int]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(column)
    table.add_column("count", justify="right")
    for name, count in counts.items():
        table.add_row(escape(name), f"{count:,}")
    if counts:
        console().print(table)
    else:
        console().print(f"{title}: none", markup=False)


def _print_ingest(stats: IngestStats) -> None:
    from rich.table import Table

    summary = stats.summary()
    totals = {name: summary[name] for name in ("traces", "turns", "tool_calls", "tool_results", "errors", "redacted")}
    _print_counts("traces", "what", {name.replace("_", " "): count for name, count in totals.items()})
    table = Table(title="errors", title_justify="left")
    for column in ("kind", "detector"):
        table.add_column(column)
    table.add_column("count", justify="right")
    for (kind, detector), count in stats.errors.most_common():
        table.add_row(kind, detector, f"{count:,}")
    if stats.errors:
        console().print(table)
    if stats.redacted:
        _print_counts("redacted", "secret", dict(stats.redacted.most_common()))
    _print_counts("skipped", "reason", summary["skipped"])


def _print_pairs(summary: Mapping[str, Any]) -> None:
    states = {"states": summary["states"], "pairs": summary["pairs"], **summary["skipped"]}
    _print_counts("preference pairs", "outcome", states)
    _print_counts("answers", "teacher", summary["answers"])
    _print_counts("failures", "teacher: reason", summary["failures"])
    figures = ", ".join(f"{name} {summary[name]:,}" for name in ("requests", "retries", "cached"))
    console().print(f"{figures}, cost {summary['cost']:.4f}", markup=False)
