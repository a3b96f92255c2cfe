"""``limbeck write``: a teacher answers prompts, a verifier keeps what is right."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from limbeck.cli.options import JsonOption, print_json
from limbeck.errors import ConfigError


class Keep(str, Enum):
    """Which answers are kept."""

    verified = "verified"
    all = "all"


class Reasoning(str, Enum):
    """Treatment of the part in front of the answer."""

    keep = "keep"
    remove = "strip"


class ContextAs(str, Enum):
    """Where the text stands that a teacher alone reads."""

    system = "system"
    user = "user"
    hint = "hint"


class Engine(str, Enum):
    """Engine that samples."""

    auto = "auto"
    generate = "generate"
    continuous = "continuous"
    vllm = "vllm"


def write_command(
    prompts: Annotated[list[str], typer.Argument(help="Files, globs, folders or hf:owner/name.", metavar="PROMPTS")],
    output: Annotated[str, typer.Option("--output", "-o", help="JSON lines to write; data.train reads them.")],
    teacher: Annotated[
        str | None, typer.Option("--teacher", help="Model folder or hub id; with --server the model's name there.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="OpenAI-compatible server, up to and including /v1.", metavar="URL")
    ] = None,
    answers: Annotated[int, typer.Option("-n", "--answers", min=1, help="Answers to each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Choose among the tokens of this much probability.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    verify: Annotated[
        str | None,
        typer.Option("--verify", help="number, choice, exact, python, ..., module:function, or {name: ..., ...}."),
    ] = None,
    keep: Annotated[Keep, typer.Option(help="Right answers alone, or all with their verdicts.")] = Keep.verified,
    prompt_key: Annotated[str | None, typer.Option(help="Key of the prompt in a record.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Key of the right answer, for the verifier.")] = None,
    reasoning: Annotated[Reasoning, typer.Option(help="What stands before </think>.")] = Reasoning.keep,
    context_as: Annotated[ContextAs, typer.Option(help="What a record's teacher_context becomes.")] = ContextAs.system,
    engine: Annotated[Engine, typer.Option(help="What samples, without a server.")] = Engine.auto,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Answers that are written at a time; else chosen.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all answers.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    hub_subset: Annotated[str | None, typer.Option(help="hf: data: the configuration.")] = None,
    hub_split: Annotated[str, typer.Option(help="hf: data: the split.")] = "train",
    json_output: JsonOption = False,
) -> None:
    """Let a teacher answer prompts and keep what a verifier finds right, as data to train on.

    Started again it goes on where it was ended; started several times at once it shares the prompts.

    Example: limbeck write gsm8k.jsonl --teacher Qwen/Qwen2.5-1.5B-Instruct -o written.jsonl -n 4 --verify number
    """
    from limbeck.algorithms.writing import WriteConfig, write
    from limbeck.cli.progress import display
    from limbeck.config import resolve

    settings: dict[str, Any] = {
        "prompts": prompts,
        "output": output,
        "teacher": teacher,
        "answers": answers,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "verifier": _verifier(verify, answer_key),
        "keep": keep.value,
        "prompt_key": prompt_key,
        "teacher_context_as": context_as.value,
        "reasoning": reasoning.value,
        "engine": "server" if server else engine.value,
        "server": {"url": server, "concurrency": batch_size or 32} if server else None,
        "batch_size": batch_size,
        "seed": seed,
        "limit": limit,
        "hub_subset": hub_subset,
        "hub_split": hub_split,
    }
    with display(lines=not json_output) as progress:
        counts = write(resolve(WriteConfig, settings), progress)
    totals = counts.as_dict()
    if json_output:
        rate = counts.right / counts.answers if verify is not None and counts.answers else None
        print_json({**totals, "pass_rate": rate})
        return
    for line in summary(totals, judged=verify is not None, output=output):
        typer.echo(line)


def _verifier(spec: str | None, answer_key: str | None) -> Any:
    """Verifier that ``--verify`` names: a name, ``module:function``, or settings as YAML in braces."""
    import yaml

    if spec is None:
        if answer_key is not None:
            raise ConfigError("--answer-key is what --verify compares with; give both")
        return None
    settings: Any = spec
    if spec.lstrip().startswith("{"):
        try:
            settings = yaml.safe_load(spec)
        except yaml.YAMLError as error:
            raise ConfigError(f"--verify {spec!r} is neither a name nor settings in braces: {error}") from error
    if answer_key is None:
        return settings
    return {**(settings if isinstance(settings, dict) else {"name": settings}), "answer_key": answer_key}


def summary(counts: dict[str, Any], *, judged: bool, output: str) -> list[str]:
    """Outcome of all answers, in a few lines."""
    answers = counts["answers"]
    lines = [f"{output}: {counts['kept']:,} records of {answers:,} answers to {counts['prompts']:,} prompts"]
    if judged and answers:
        lines.append(f"right: {counts['right']:,} of {answers:,} ({counts['right'] / answers:.1%})")
    names = {"cut_off": "cut off", "no_answer": "no answer found"}
    reasons = ", ".join(f"{names.get(name, name)} {number:,}" for name, number in sorted(counts["reasons"].items()))
    lines += [f"not kept, or not right: {reasons}"] if reasons else []
    bad = ", ".join(f"{name} {number:,}" for name, number in sorted(counts["bad"].items()))
    lines += [f"prompts left out: {bad}"] if bad else []
    return [*lines, f"tokens: {counts['tokens']:,}"]
