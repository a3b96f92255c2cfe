"""Every form in which a run file has named a loss, and the values that it stood for.

    python -m tests.golden.forms    # record anew: only for forms that are new

A form is where it stands (`loss`: alone; `sampled`: `on_policy.loss_fn`; `run`: in a run file with so many teachers and
a student that is pretrained or not) and what is given.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from limbeck.algorithms.config import MasterConfig, SampledLossConfig
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig

FILE = Path(__file__).parent / "forms.json"
MODES = (
    *("tree_kl", "boundary_kl", "p_kl_norm", "alm", "uld", "p_kl", "gold", "h_kl"),
    *("strict", "simct", "escd", "bpm", "partition"),
)
VALUES: dict[str, tuple[Any, ...]] = {
    "projection_matrix_path": ("W.safetensors", ["W.safetensors", None]),
    "temperature": (2.0,),
    "vocab_topk": (64,),
    "uncommon_topk": (64,),
    "reverse_kl": (True,),
    "exact_token_match_only": (True,),
    "kl_loss_weight": (0.5, 0.0),
    "ce_loss_scale": (0.3, 0.5, 1.0, 0.0),
    "dynamic_loss_scaling": (True,),
    "student_vocab_size": (100,),
    "teacher_vocab_size": (100, [100, 200]),
    "allow_inexact": (True,),
    "chunk_weight": (0.5,),
    "chunk_terms": ("all",),
    "root_weight": (0.5,),
    "inner_student_weight": (0.5,),
    "inner_teacher_weight": (0.5,),
    "terminal_weight": (1.0,),
    "first_weight": (1.0,),
    "condition": ("counted", "cheap", "exact"),
    "gate": ("none", "hard", "soft"),
    "strict_topk": (3, None),
    "strict_rest": (True,),
    "span_weight": (0.1,),
    "mask_blanks": (False,),
    "direction": ("forward", "reverse", "jsd"),
    "jsd_beta": (0.9,),
    "jsd_rescale": (True,),
    "jsd_patience": (5,),
    "entry_clip": (0.5,),
    "topk": (9,),
    "topk_by": ("student",),
    "teacher_combination": ("averaged_logits", "select_teacher"),
    "teacher_weights": ([0.8, 0.2],),
    "teacher_scoring": ("static", "ce", "entropy", "max_prob"),
    "scoring_alpha": (2.0,),
    "dynamic_scaling_source": ("running", "first_pass"),
    "dynamic_scaling_decay": (0.5,),
    "learnable_projection": (True,),
    "block_rows": (4096,),
    "probe_every": (50,),
    "fast_path": ("off", "force"),
}
"""Values that are tried of every key but `mode` and the published flags."""
SHIPPED: tuple[dict[str, Any], ...] = (
    {"kl_loss_weight": 0.5, "ce_loss_scale": 0.5},
    {"kl_loss_weight": 1.0, "ce_loss_scale": 1.0, "gate": "soft"},
    {"mode": "boundary_kl", "direction": "jsd", "jsd_beta": 0.5},
    {"mode": "boundary_kl", "direction": "jsd"},
    {"mode": "boundary_kl", "kl_loss_weight": 1.0, "ce_loss_scale": 1.0},
    {"mode": "p_kl", "vocab_topk": 8192, "dynamic_loss_scaling": True},
    {"mode": "tree_kl", "block_rows": 4096},
    {"mode": "tree_kl", "chunk_weight": 1.0, "kl_loss_weight": 1.0, "block_rows": 4096},
    {"mode": "tree_kl", "teacher_combination": "sum", "teacher_weights": [0.8, 0.2], "block_rows": 4096},
    {
        "mode": "p_kl",
        "chunk_weight": 1.0,
        "kl_loss_weight": 1.0,
        "block_rows": 4096,
        "gold_loss": False,
        "xtoken_loss": False,
        "vocab_topk": 8192,
        "temperature": 1.0,
        "dynamic_loss_scaling": True,
        "dynamic_scaling_source": "running",
    },
)
"""What documents and recipes hold."""


def forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, what is given)."""
    flags = [
        {name: value for name, value in zip(("gold_loss", "xtoken_loss"), pair, strict=True) if value is not None}
        for pair in itertools.product((None, False, True), repeat=2)
    ]
    flagged = [{**own, "mode": mode} for own in flags[1:] for mode in MODES]
    reversed_ = [{**own, "reverse_kl": True, "temperature": 2.0} for own in flags]
    single = [{"mode": mode, key: value} for mode in MODES for key, values in VALUES.items() for value in values]
    modes: list[dict[str, Any]] = [{"mode": mode} for mode in MODES]
    contradictions = [
        {"reverse_kl": True, "direction": "jsd"},
        {"direction": "jsd", "jsd_beta": 0.01},
        {"teacher_weights": [1, 1], "teacher_scoring": "ce"},
        {"mode": "nothing"},
    ]
    for given in (*modes, *flags, *flagged, *reversed_, *single, *SHIPPED, *contradictions):
        yield "loss", given
    directions = [{"mode": mode, "direction": direction} for mode in MODES for direction in VALUES["direction"]]
    sampled = ({"ce_loss_scale": 0.5}, {"temperature": 2.0}, {"reverse_kl": True})
    for given in (*modes, *flags, *directions, *sampled, *SHIPPED):
        yield "sampled", given
    settled: list[dict[str, Any]] = [
        {key: value} for key in ("ce_loss_scale", "gate", "kl_loss_weight", "temperature") for value in VALUES[key]
    ]
    settled += [{key: value} for key in ("teacher_combination", "teacher_scoring") for value in VALUES[key]]
    settled += [
        {"gate": "soft", "ce_loss_scale": 0.3},
        {"dynamic_loss_scaling": True},
        {"teacher_weights": [0.8, 0.2]},
    ]
    for init, teachers in itertools.product(("random", "pretrained"), (0, 1, 2)):
        for given in (*modes, *flags, *settled, *SHIPPED):
            yield f"run, {init}, {teachers} teachers", given


def resolved(where: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """Flat values of a form; None where it is refused."""
    try:
        if where == "loss":
            return flat(CrossTokenizerDistillationLossConfig.model_validate(given).settled())
        if where == "sampled":
            return flat(SampledLossConfig.model_validate(given).settled())
        _, init, teachers = where.split(", ")
        model: dict[str, Any] = {"model_name": "some/model"}
        run = {
            "policy": {**model, "init": init},
            "teachers": [model] * int(teachers.split()[0]),
            "data": {"train": "train.jsonl"},
        }
        return flat(MasterConfig.model_validate({**run, "loss_fn": given}).loss_fn)
    except ValidationError:
        return None


def flat(config: CrossTokenizerDistillationLossConfig) -> dict[str, Any]:
    """The values of a resolved loss, by the names that they have in flat run files."""
    return config.model_dump(mode="json")


def load() -> tuple[dict[str, Any], list[tuple[str, dict[str, Any], dict[str, Any] | None]]]:
    """Values of the default loss; and of every form where it stands, what is given, and what differs from them."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return stored["defaults"], [tuple(form) for form in stored["forms"]]


def save() -> None:
    """Record all forms."""
    defaults = resolved("loss", {})
    assert defaults is not None
    lines = []
    for where, given in forms():
        values = resolved(where, given)
        if values is not None:
            values = {key: value for key, value in values.items() if value != defaults[key]}
        lines.append(json.dumps([where, given, values]))
    text = ",\n".join(dict.fromkeys(lines))
    FILE.write_text(f'{{"defaults": {json.dumps(defaults)},\n"forms": [\n{text}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    save()
