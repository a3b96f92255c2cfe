"""``limbeck eval``: figures of models on files, side by side."""

from __future__ import annotations

import glob
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck.cli.options import JsonOption, console, print_json
from limbeck.errors import ConfigError


class EvalMode(str, Enum):
    """Kind of a file's records."""

    auto = "auto"
    text = "text"
    chat = "chat"
    choice = "choice"
    pairs = "pairs"
    answers = "answers"


class Bos(str, Enum):
    """Whether texts stand behind a model's BOS token."""

    auto = "auto"
    expected = "expected"


class Precision(str, Enum):
    """Type of weights and computation."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def eval_command(
    models: Annotated[
        list[str], typer.Argument(help="Model folders, GGUF files, hub ids or run folders.", metavar="MODEL")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="File, glob, folder or hf:owner/name; repeatable.", metavar="FILE"),
    ] = None,
    mode: Annotated[
        EvalMode, typer.Option(help="What the records are; auto looks at each file's first.")
    ] = EvalMode.auto,
    text_key: Annotated[str, typer.Option(help="Key of a record's text.")] = "text",
    messages_key: Annotated[str, typer.Option(help="Key of a record's conversation.")] = "messages",
    split_paragraphs: Annotated[
        bool, typer.Option("--split-paragraphs", help="Plain text: blank lines part documents.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="Longest window in tokens (default: the model's limit, at most 2048).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens a window moves on in long documents (default: half the context).")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one forward pass (default: what memory takes).")
    ] = None,
    max_documents: Annotated[int | None, typer.Option(help="Read this many documents of each file.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Read about this many bytes of each file.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run folder: best, latest or a step.")] = "best",
    precision: Annotated[
        Precision | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on an accelerator.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Take random numbers for weights that a model's folder lacks.")
    ] = False,
    bos: Annotated[
        Bos, typer.Option(help="BOS token: as the tokenizer does, or as the weights expect (by a short text).")
    ] = Bos.auto,
    traces: Annotated[
        list[Path] | None,
        typer.Option("--traces", help="Agent traces: log p of failed messages and of better ones; repeatable."),
    ] = None,
    generate: Annotated[
        int, typer.Option(min=0, help="With --traces: failed states at which each model writes an answer; 0 for none.")
    ] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    chat_template: Annotated[
        str | None, typer.Option(help="Template (.jinja) for models without tool calls in theirs; with --traces.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="YAML with tasks: name, data, verifier; how many problems are solved; repeatable."),
    ] = None,
    lm_eval: Annotated[
        list[str] | None, typer.Option("--lm-eval", help="Also run this task of the lm-eval harness; repeatable.")
    ] = None,
    lm_eval_include: Annotated[Path | None, typer.Option(help="Folder with harness tasks of your own.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Compare models on files, whatever their tokenizers: bits per byte, multiple choice, preference pairs, answers.

    Example: limbeck eval runs/mine ./SmolLM2-135M -d val.jsonl -d arc_easy_val.jsonl --max-documents 200
    """
    from limbeck.cli.progress import display
    from limbeck.evaluation.bits import EvalOptions
    from limbeck.evaluation.files import evaluate

    models, data = split_arguments(models, data or [])
    if not data and not lm_eval and not traces and not task:
        raise ConfigError(
            "there is nothing to evaluate on; give --data FILE, --task FILE, --traces FILE or --lm-eval TASK."
        )
    options = EvalOptions(
        mode=mode.value,
        text_key=text_key,
        messages_key=messages_key,
        split_documents="blank_lines" if split_paragraphs else "file",
        context=context,
        stride=stride,
        batch_tokens=batch_tokens,
        max_documents=max_documents,
        max_bytes=max_bytes,
        checkpoint=checkpoint,
        precision=precision.value if precision else None,
        device=device,
        allow_missing=allow_missing,
        bos=bos.value,
        max_new_tokens=max_new_tokens,
    )
    if lm_eval:
        from limbeck.evaluation.harness import check_harness

        # before long work: the harness itself comes last
        check_harness(lm_eval, lm_eval_include)
    result: dict[str, Any] = {"models": {spec: {} for spec in models}}
    _silence_other_bars()
    with display() as screen:

        def begin(model: str, file: str, documents: int) -> Callable[[float], None]:
            return screen.begin(f"{Path(model).name}  {Path(file).name}", documents).advance

        if data:
            result = evaluate(models, data, options, begin)
        if traces:
            result["traces"] = _traces(models, traces, options, begin, chat_template=chat_template, generate=generate)
        if task:
            from limbeck.evaluation.tasks import evaluate_tasks, read_tasks

            tasks = [one for path in task for one in read_tasks(path)]
            result["tasks"] = evaluate_tasks(models, tasks, options)
        if lm_eval:
            result["lm_eval"] = _harness(models, lm_eval, lm_eval_include, options)
    _print(result, json_output=json_output)


def _traces(models: list[str], paths: list[Path], options: Any, begin: Any, **choices: Any) -> dict[str, Any]:
    from limbeck.evaluation.traces import evaluate_traces
    from limbeck.traces.files import find_files

    files = find_files(paths)
    return evaluate_traces(models, files, options, max_new_tokens=options.max_new_tokens, begin=begin, **choices)


def _print(result: dict[str, Any], *, json_output: bool) -> None:
    if json_output:
        print_json(result)
        return
    from limbeck.cli.evaluation_tables import print_evaluation

    print_evaluation(result, console())


def _silence_other_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def split_arguments(models: list[str], data: list[str]) -> tuple[list[str], list[str]]:
    """``--data a.txt b.txt`` (as a shell writes ``--data *.txt``) gives b.txt as a model: what can be none is data."""

    def is_data(name: str) -> bool:
        path = Path(name).expanduser()
        # a .gguf file is a model
        return name.startswith("hf:") or glob.has_magic(name) or (path.is_file() and path.suffix != ".gguf")

    files = [name for name in models if is_data(name)] if data else []
    left = [name for name in models if name not in files]
    if not left:
        raise ConfigError(f"no model is given, only data files ({', '.join(files[:3])}); write the models first.")
    return left, [*data, *files]


def _harness(models: list[str], tasks: list[str], include: Path | None, options: Any) -> dict[str, Any]:
    from limbeck.evaluation.bits import pick_device
    from limbeck.evaluation.harness import run_harness

    device = pick_device(options.device)
    precision = options.precision or ("float32" if device.type == "cpu" else "bfloat16")
    return run_harness(
        models,
        tasks,
        checkpoint=options.checkpoint,
        limit=options.max_documents,
        include=include,
        precision=precision,
        device=str(device),
        allow_missing=options.allow_missing,
    )
