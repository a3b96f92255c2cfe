"""Benchmarks of the lm-eval harness on any model that ``limbeck eval`` accepts; the harness is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from limbeck.errors import ConfigError
from limbeck.evaluation.models import find_model
from limbeck.models.loading import load_model, parse_dtype
from limbeck.tokens import load_tokenizer


def check_harness(tasks: Sequence[str], include: str | Path | None = None) -> Any:
    """The harness' task manager, if the harness can be imported and knows all tasks; call it before long work."""
    try:
        import lm_eval.models.huggingface  # noqa: F401
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"--lm-eval needs the lm-eval harness, which cannot be imported ({error}); pip install 'limbeck[eval]'."
        ) from error
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ConfigError(f"the harness knows no task {unknown[0]!r}; give one of its tasks or --lm-eval-include DIR.")
    return manager


def run_harness(
    models: Sequence[str],
    tasks: Sequence[str],
    *,
    checkpoint: str = "best",
    limit: int | None = None,
    include: str | Path | None = None,
    precision: str = "float32",
    device: str = "cpu",
    allow_missing: bool = False,
) -> dict[str, dict[str, dict[str, float]]]:
    """``{model: {task: {metric: value}}}`` of the harness' own tasks.

    ``limit``: documents per task. ``include``: folder with task files of your own, such as local jsonl.
    """
    manager = check_harness(tasks, include)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    out: dict[str, dict[str, dict[str, float]]] = {}
    for spec in models:
        source = find_model(spec, checkpoint)
        settings = {"model_name": source.weights, "allow_missing": allow_missing}
        model = load_model(settings, dtype=parse_dtype(precision), device=device)
        wrapped = HFLM(pretrained=model, tokenizer=load_tokenizer(source.tokenizer), batch_size=8, device=device)
        evaluated: Any = lm_eval.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, task_manager=manager)
        out[spec] = {task: _figures(values) for task, values in evaluated["results"].items()}
    return out


def _figures(values: dict[str, Any]) -> dict[str, float]:
    """The harness names figures ``acc,none`` (after the comma: its filter); counts and names are left out."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "," in name
    }
