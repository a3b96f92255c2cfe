"""A run file out of another library's configuration: NeMo RL's x-token distillation, TRL's GOLD and GKD.

Every line that is not the same says so in a comment, and a table at the end has them all. What a key is here is said in
:mod:`limbeck.foreign_keys`; this module knows what becomes of values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from limbeck.config import merge, read_yaml, resolve_value
from limbeck.errors import ConfigError
from limbeck.foreign_keys import LIBRARIES, NEMO_RL, TRL, canonical, find
from limbeck.key_names import stored_keys

FILL_IN = "FILL_IN"
_SIGNS_OF_TRL = {"teacher_model_name_or_path", "lmbda", "beta", "use_uld_loss", "model_name_or_path", "output_dir"}
_WIDEST = 120
_V6 = ("prefix_bidir", "common_indices_from_subtoks", "kl_chunk_shift")
_FREE = ("policy.optimizer.kwargs", "policy.scheduler", "logger.wandb", "policy.tokenizer.chat_template_kwargs")


@dataclass
class Port:
    """A run file that is being made.

    Attributes:
        values: its keys.
        said: dotted key -> comment of its line.
        left_out: section -> lines that are comments alone.
        rows: (key of the other library, key here or "", what is to be said) of the table at the end.
    """

    library: str
    values: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def put(self, here: str, value: Any, *, was: str = "", note: str = "") -> None:
        """Set a key; ``was``: its name in the other library, where that or the value is another one."""
        node, parts = self.values, here.split(".")
        for part, below in pairwise(parts):
            node = self._step(node, part, [] if below.isdigit() else {})
        node[parts[-1]] = value
        if was or note:
            comment = "; ".join(text for text in ((f"was {was}" if was not in ("", here) else ""), note) if text)
            self.said[here] = comment
            self.rows.append((was or here, here, note))

    @staticmethod
    def _step(node: Any, part: str, empty: Any) -> Any:
        if isinstance(node, list):
            node.extend({} for _ in range(int(part) + 1 - len(node)))
            return node[int(part)]
        return node.setdefault(part, empty)

    def leave_out(self, key: str, value: Any, note: str) -> None:
        """Tell of a key without a counterpart, where it stood."""
        section, _, name = key.rpartition(".")
        text = "..." if isinstance(value, Mapping) else json.dumps(value, ensure_ascii=False, default=str)
        self.left_out.setdefault(section, []).append(f"{name}: {text}  # {note}")
        self.rows.append((key, "", note))

    def get(self, here: str) -> Any:
        """The value of a key so far."""
        node: Any = self.values
        for part in here.split("."):
            if isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, Mapping) and part in node:
                node = node[part]
            else:
                return None
        return node

    def text(self, source: str) -> str:
        """The run file."""
        lines = [
            f"# Made by limbeck init --from {source}, a configuration of {self.library}.",
            "# What differs is said beside the line and in the table at the end; all keys: limbeck docs configuration",
        ]
        self._move_up()
        lines += self._section(self.values, "", 0)
        if self.rows:
            lines += ["", f"# {self.library} -> here, where something was changed, mapped or left out", "#"]
            width = min(max(len(key) for key, _, _ in self.rows), 44)
            lines += [
                f"# {key:<{width}}  {here if here != key else 'the same'}{': ' * bool(note and here)}{note}"
                if here
                else f"# {key:<{width}}  left out: {note}"
                for key, here, note in self.rows
            ]
        return "\n".join(lines) + "\n"

    def _move_up(self) -> None:
        """Put what was left out of a section that is not in the run file into the next one around it."""
        # a list, as sections move while they are gone through
        for section in list(self.left_out):
            around, name = section, ""
            while around and not isinstance(self.get(around), Mapping):
                around, _, last = around.rpartition(".")
                name = f"{last}.{name}"
            if name:
                self.left_out.setdefault(around, []).extend(f"{name}{line}" for line in self.left_out.pop(section))

    def _section(self, node: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        pad = "  " * depth
        for key, value in node.items():
            here = f"{path}.{key}" if path else key
            if isinstance(value, Mapping) and value and not here.startswith(_FREE):
                yield f"{pad}{key}:"
                yield from self._section(value, here, depth + 1)
            elif key == "teachers":
                yield f"{pad}{key}:"
                for number, item in enumerate(value):
                    first, *rest = self._section(item, f"{here}.{number}", depth + 2)
                    yield f"{pad}  - {first.strip()}" if not first.lstrip().startswith("#") else f"{pad}  -\n{first}"
                    yield from rest
            elif key == "scheduler" and isinstance(value, list):
                yield f"{pad}{key}:"
                yield from (f"{pad}  - {json.dumps(item, ensure_ascii=False)}" for item in value)
            else:
                below = (
                    [f"{name}: {said}" for name in value if (said := self.said.get(f"{here}.{name}"))]
                    if isinstance(value, Mapping)
                    else []
                )
                comment = "; ".join(text for text in (self.said.get(here), *below) if text)
                yield from _commented(f"{pad}{key}: {json.dumps(value, ensure_ascii=False)}", comment, pad)
        for line in self.left_out.get(path, []):
            text, _, note = line.partition("  # ")
            yield from _commented(f"{pad}# {text}", note, pad)


def _commented(line: str, comment: str | None, pad: str) -> Iterator[str]:
    if comment and len(line) + len(comment) + 4 > _WIDEST:
        yield f"{pad}# {comment}"
    yield f"{line}  # {comment}" if comment and len(line) + len(comment) + 4 <= _WIDEST else line


def port_file(path: Path) -> Port:
    """The run file of a configuration of NeMo RL (YAML) or TRL (YAML or JSON)."""
    source, missing = _read(path, ())
    if isinstance(source.get("policy"), Mapping):
        return _port_nemo(source, missing)
    if _SIGNS_OF_TRL & source.keys():
        return _port_trl(source)
    raise ConfigError(
        f"{str(path)!r} is no configuration of {' or '.join(LIBRARIES)}: it has neither a section 'policy' nor one of "
        f"{', '.join(sorted(_SIGNS_OF_TRL))}; give NeMo RL's YAML, or the arguments of TRL's GOLDConfig or GKDConfig"
    )


def _read(path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], list[str]]:
    """A file merged over those that its ``defaults`` name, and those of them that are not there."""
    where = f"configuration {str(path)!r}"
    if path in chain:
        raise ConfigError(f"{where} names itself in 'defaults'; break the circle")
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where} cannot be read as JSON: {error}") from None
    else:
        content = read_yaml(path, where)
    if not isinstance(content, dict):
        raise ConfigError(f"{where} holds a {type(content).__name__}; expected keys with their values")
    bases = content.pop("defaults", None) or []
    merged, missing = dict[str, Any](), list[str]()
    for base in [bases] if isinstance(bases, str) else bases:
        file = path.parent / str(base)
        if file.is_file():
            below, more = _read(file, (*chain, path))
            merged, missing = merge(merged, below), [*missing, *more]
        else:
            missing.append(str(base))
    return merge(merged, content), missing


# ---- NeMo RL ---------------------------------------------------------------------------------------------------------


def _port_nemo(source: dict[str, Any], missing: list[str]) -> Port:
    port = Port("NeMo RL")
    for base in missing:
        port.leave_out("defaults", base, "not found beside the file: what it sets is not in here")
    teachers = source.get("teachers") or ([source["teacher"]] if source.get("teacher") else [])
    kept = {key: value for key, value in source.items() if key not in ("teacher", "teachers")}
    if teachers:
        kept["teachers"] = teachers
    flags = [
        {key: section[key] for key in ("gold_loss", "xtoken_loss") if section.get(key) is not None}
        for section in teachers
        if isinstance(section, Mapping)
    ]
    first = flags[0] if flags else {}
    mode = _mode({**(kept.get("loss_fn") or {}), **first})
    if mode == "partition":
        note = "the arithmetic nearest to v6; the default here is tree_kl: limbeck docs losses"
        port.put("loss_fn.mode", mode, was="loss_fn.prefix_bidir_*", note=note)
    elif not {"gold_loss", "xtoken_loss", "mode"} & {**(kept.get("loss_fn") or {}), **first}.keys():
        port.put("loss_fn.mode", mode, note="NeMo RL's where no flag selects another; the default here is tree_kl")
    known = set(stored_keys("xtoken_off_policy_distillation").dotted())
    for path, value in _leaves(kept, (), known):
        if path[0] != "loss_fn" or path[-1] not in first:  # a teacher's own flag counts
            _port_leaf(port, path, value, {**source, **kept}, mode, known)
    _put_objectives(port, flags, kept.get("loss_fn") or {}, mode)
    _put_teacher_weights(port, kept)
    _require(port)
    return port


def _put_objectives(port: Port, flags: Sequence[Mapping[str, Any]], loss: Mapping[str, Any], mode: str) -> None:
    """Objectives of teachers whose own flags select another than the first's."""
    for number, teacher_flags in enumerate(flags):
        theirs = _mode({**loss, **teacher_flags})
        if theirs == mode:
            continue
        was = f"teachers.{number}.gold_loss"
        port.put(f"teachers.{number}.loss_fn.mode", theirs, was=was, note="the run's loss_fn is the first teacher's")
        for key, modes in _OF_MODES.items():
            if theirs in modes and loss.get(key) is not None:
                port.put(f"teachers.{number}.loss_fn.{key}", loss[key], was=f"loss_fn.{key}")
        if loss.get("reverse_kl"):
            port.put(f"teachers.{number}.loss_fn.direction", "reverse", was="loss_fn.reverse_kl")


def _mode(loss: Mapping[str, Any]) -> str:
    """The objective that a configuration asks for: by its flags, or the newer one that has none."""
    if loss.get("gold_loss"):
        return "h_kl" if loss.get("xtoken_loss") else "gold"
    return "partition" if any(key.startswith(_V6) for key in loss) and "gold_loss" not in loss else "p_kl"


_FLAGS = ("teacher.gold_loss", "teacher.xtoken_loss")
_OF_MODES = {
    "vocab_topk": ("p_kl",),
    "uncommon_topk": ("gold", "h_kl"),
    "exact_token_match_only": ("p_kl", "gold", "h_kl"),
}


def _leaves(node: Any, path: tuple[str, ...], known: set[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values by their paths; a section that is one thing here, or none, comes whole."""
    name = canonical(path) if path else ""
    # a teacher's row may be the policy's
    names = {name, "policy" + name.removeprefix("teacher")} if name.startswith("teacher.") else {name}
    below = any(key.startswith(f"{alias}.") for alias in names for key in (*NEMO_RL, *known))
    ends = name in NEMO_RL and not any(key.startswith(f"{name}.") for key in NEMO_RL) and NEMO_RL[name].here is None
    whole = name in _FREE or ends or (path and find("NeMo RL", path) is not None and not below)
    if isinstance(node, Mapping) and node and not whole:
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)), known)
    elif path == ("teachers",):
        for number, item in enumerate(node):
            yield from _leaves(item, (*path, str(number)), known)
    else:
        yield path, node


def _port_leaf(
    port: Port, path: tuple[str, ...], value: Any, source: Mapping[str, Any], mode: str, known: set[str]
) -> None:
    key, name = ".".join(path), canonical(path)
    # a row of a section that has no counterpart holds for what is below it
    above = (parent_row for end in range(len(path) - 1, 0, -1) if (parent_row := find("NeMo RL", path[:end])))
    row = find("NeMo RL", path) or next((parent_row for parent_row in above if parent_row.here is None), None)
    if row is not None and row.here is None and value is not None:
        port.leave_out(key, value, row.note)
        return
    try:
        value = resolve_value(source, path)
    except ConfigError as error:
        port.leave_out(key, value, str(error))
        return
    # null is a word there: static weights
    if value is None and name != "loss_fn.sum_weights_metric":
        return
    last = path[-1]
    if value == "???":
        port.leave_out(key, value, "to be given")
    elif name in ("teacher.weight", "teachers") or (name in _FLAGS and path[1] != "0"):
        return  # all of them together
    elif last in ("projection_matrix_path", "projection_matrix_paths"):
        _put_projection(port, key, value, path)
    elif name in ("data.arrow_files", "data.dataset_name"):
        _put_data(port, key, value, "train", row.note if row else "")
    elif name.startswith(("data.train", "data.validation")):
        _put_data(port, key, value, path[1], row.note if row else "")
    elif key == "loss_fn.vocab_topk" and mode == "partition":
        port.put("loss_fn.topk", value, was=key, note="of teachers with the student's tokenizer")
    elif path[0] == "loss_fn" and mode not in _OF_MODES.get(last, (mode,)):
        port.leave_out(key, value, f"read by {', '.join(_OF_MODES[last])} alone, not by this file's objective")
    elif name == "loss_fn.sum_weights_metric":
        if len(source.get("teachers", [])) > 1 and source["loss_fn"].get("kd_loss_mode", "sum") == "sum":
            port.put("loss_fn.teacher_scoring", value or "static", was=key, note="null is static" * (value is None))
    elif name in ("loss_fn.kd_loss_mode", "loss_fn.alpha") and len(source.get("teachers", [])) < 2:
        port.leave_out(key, value, "of several teachers")
    elif name == "loss_fn.prefix_bidir_v3_loss_fn" and value in ("kl", "jsd"):
        if value == "jsd":
            port.put("loss_fn.direction", "jsd", was=key)
    elif name == "loss_fn.prefix_bidir_v3_jsd_beta" and source["loss_fn"].get("prefix_bidir_v3_loss_fn") != "jsd":
        port.leave_out(key, value, "of direction: jsd")
    elif name in _OF_OTHER_LOSSES:
        port.leave_out(key, value, "not read by the cross-tokenizer loss")
    elif name == "loss_fn.loss_type":
        port.leave_out(key, value, "the objective is that of gold_loss and xtoken_loss")
    elif name == "checkpointing.metric_name" and str(value).startswith("train"):
        port.leave_out(key, value, "checkpoints are ranked by what validations measure, such as val/bpb")
    elif name in ("checkpointing.checkpoint_dir", "logger.gpu_monitoring", "policy.generation_batch_size"):
        port.leave_out(key, value, row.note if row and row.note else "of on-policy runs")
    elif row is not None and row.here is not None and (row.here.startswith("on_policy") or isinstance(value, Mapping)):
        port.leave_out(key, value, row.note)
    elif name == "data.num_packed_rows" or (name in known and _SAME_IF.get(path[-1], _ABSENT) == value):
        if name not in known:
            port.leave_out(key, value, "rows are packed by policy.sequence_packing")
        else:
            port.put(key, value)
    elif row is not None and row.here is not None:
        here = row.here.replace("teacher.", f"teachers.{path[1]}.", 1) if path[0] == "teachers" else row.here
        port.put(here, value, was=key, note=row.note)
    elif name in known or name.startswith(_FREE):
        weighs = mode in ("gold", "h_kl") and name in _FACTORS
        port.put(key, value, note="of gold losses too, which earlier versions of NeMo RL trained without" * weighs)
    else:
        port.leave_out(key, value, "no key of that name is known here")


_OF_OTHER_LOSSES = (
    "loss_fn.kl_type",
    "loss_fn.mixed_kl_weight",
    "loss_fn.zero_outside_topk",
    "distillation.topk_logits_k",
)
_FACTORS = ("loss_fn.kl_loss_weight", "loss_fn.ce_loss_scale", "loss_fn.dynamic_loss_scaling")
_ABSENT = object()
_SAME_IF = {"enabled": True, "num_nodes": 1, "gpus_per_node": 1}
"""Values with which a key does here what it does there."""


def _put_projection(port: Port, key: str, value: Any, path: tuple[str, ...]) -> None:
    files = value if isinstance(value, list) else [value]
    if any(str(file).endswith(".pt") for file in files):
        first = next(str(file) for file in files if str(file).endswith(".pt"))
        port.leave_out(
            key,
            value,
            "not needed, made from the tokenizers; to use it: limbeck project --student S --teacher T "
            f"--convert {first} -o W.safetensors, then loss_fn.projection_matrix_path: W.safetensors",
        )
    elif path[0] == "teachers":
        number = int(path[1])
        so_far = port.get("loss_fn.projection_matrix_path") or []
        port.put("loss_fn.projection_matrix_path", [*so_far, *[None] * (number - len(so_far)), value], was=key)
    else:
        was = "" if key == "loss_fn.projection_matrix_path" else key
        port.put("loss_fn.projection_matrix_path", value, was=was)


def _put_data(port: Port, key: str, value: Any, part: str, note: str) -> None:
    last = key.rpartition(".")[2]
    if last in ("data_files", "data_path", "arrow_files", part):
        files, changed = _data_files(value)
        if files:
            port.put(f"data.{part}", files, was=key, note=changed)
    elif last == "dataset_name" and "/" in str(value):
        port.put(f"data.{part}", f"hf:{value}", was=key)
    elif last == "split" and str(port.get(f"data.{part}")).startswith("hf:"):
        port.put("data.hub_split" if part == "train" else "data.hub_validation_split", value, was=key)
    elif last == "characters_per_sample":
        port.put("data.join_to_bytes", value, was=key, note=note)
    elif part == "train" and last in ("text_key", "chat_key", "tool_key", "subset"):
        here = {"chat_key": "messages_key", "tool_key": "tools_key", "subset": "hub_subset"}.get(last, last)
        port.put(f"data.{here}", value, was=key)
    else:
        port.leave_out(key, value, note or "records are read as they are: limbeck docs data")


_ON_HUB = re.compile(r"hf://datasets/([^/]+/[^/@]+)(?:@[^/]+)?(/.*)?")


def _data_files(value: Any) -> tuple[Any, str]:
    """Files in our form, and what was changed."""
    if isinstance(value, list):
        of_items = [_data_files(item) for item in value]
        return [files for files, _ in of_items], "; ".join({changed for _, changed in of_items if changed})
    if match := _ON_HUB.fullmatch(str(value)):
        inner = match[2]
        note = f"all of the data set; of {inner} alone: data.hub_subset, or download it and give files" if inner else ""
        return f"hf:{match[1]}", note
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(value)) and not Path(str(value)).suffix and not Path(str(value)).exists():
        return f"hf:{value}", "taken for a data set of the hub"
    return value, ""


def _put_teacher_weights(port: Port, source: Mapping[str, Any]) -> None:
    teachers, loss = source.get("teachers", []), source.get("loss_fn") or {}
    weights = [float(1.0 if teacher.get("weight") is None else teacher["weight"]) for teacher in teachers]
    has_weights = any("weight" in teacher for teacher in teachers)
    if len(teachers) == 1 and has_weights and weights[0] != 1.0:
        scale = float(loss.get("kl_loss_weight", 1.0)) * weights[0]
        port.put("loss_fn.kl_loss_weight", scale, was="teachers.0.weight", note="the weight of the only teacher")
    if len(teachers) < 2:
        return
    mode = loss.get("kd_loss_mode", "sum")
    if loss.get("sum_weights_metric") is not None or mode == "select_teacher":
        if has_weights:
            port.leave_out("loss_fn.teacher_weights", weights, "teachers are scored or selected, not weighed")
        return
    port.put("loss_fn.teacher_weights", weights, was="teachers.N.weight")


def _require(port: Port) -> None:
    """The keys without which nothing loads."""
    if not port.get("policy.model_name"):
        port.put("policy.model_name", FILL_IN, note="not in the configuration: the student's folder or hub id")
    if not port.get("data.train"):
        port.put("data.train", f"{FILL_IN}.jsonl", note="not in the configuration: files, globs or hf:owner/name")


# ---- TRL -------------------------------------------------------------------------------------------------------------

_OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW", "adam": "Adam", "sgd": "SGD"}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_DEFAULTS: dict[str, Any] = {
    "lmbda": 0.5,
    "beta": 0.5,
    "temperature": 0.9,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "max_length": 1024,
    "lr_scheduler_type": "linear",
    "save_steps": 500,
}
"""Defaults of TRL's that are others here; of a configuration that does not name them they are written out."""
_GOLD_ALONE = {
    "use_uld_loss",
    "uld_use_hybrid_loss",
    "max_completion_length",
    "teacher_tokenizer_name_or_path",
    "num_generations",
    "use_extended_uld",
    "student_model_revision",
}


def _port_trl(source: dict[str, Any]) -> Port:
    port = Port("TRL")
    # GOLD and GKD have other defaults, and a file names neither: the arguments that only one of them has decide
    gold = any(key in _GOLD_ALONE or key.startswith(("uld_", "xtoken_", "vllm_")) for key in source)
    defaults = {**_DEFAULTS, "learning_rate": 1e-7 if gold else 2e-5, "top_p": 0.95 if gold else 1.0}
    arguments = {**defaults, **{key: value for key, value in source.items() if value is not None}}
    mine = TRL.keys()
    taken: set[str] = set()

    def take(key: str) -> Any:
        taken.add(key)
        return arguments.get(key)

    def put(here: str, value: Any, key: str, note: str = "") -> None:
        taken.add(key)
        default = "" if key in source else f"TRL's default{'; ' * bool(note)}"
        port.put(here, value, was=key, note=default + note)

    student = take("model_name_or_path") or take("model")
    revision = next((r for k in ("student_model_revision", "model_revision") if (r := take(k))), None)
    _put_trl_models(port, arguments, taken, student, revision)
    fraction = float(take("lmbda"))
    for key in _SAME:
        if key in arguments:
            put(str(TRL[key].here), arguments[key], key)
    for key in ("bf16", "fp16", "torch_dtype", "dtype"):
        if key in arguments and arguments[key] not in (False, None):
            word = {"bf16": "bfloat16", "fp16": "float16"}.get(key, arguments[key])
            if word == "auto" or port.get("policy.precision"):
                taken.add(key)
            else:
                put("policy.precision", word, key)
        elif key in arguments:
            taken.add(key)
    if take("use_peft") is False:
        port.values.get("policy", {}).pop("lora", None)
    optimizer = str(take("optim") or "adamw_torch")
    if optimizer in _OPTIMIZERS:
        port.put("policy.optimizer.name", f"torch.optim.{_OPTIMIZERS[optimizer]}")
    else:
        port.put("policy.optimizer.name", "torch.optim.AdamW", was="optim", note=f"{optimizer} is not known here")
    if {"adam_beta1", "adam_beta2"} & arguments.keys():
        betas = [arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999)]
        taken.update(("adam_beta1", "adam_beta2"))
        put("policy.optimizer.kwargs.betas", betas, "adam_beta1" if "adam_beta1" in arguments else "adam_beta2")
    _put_trl_schedule(port, arguments, taken, put)
    _put_trl_batches(port, arguments, taken, put)
    _put_trl_data(port, arguments, taken, put)
    _put_trl_loss(port, arguments, taken, put, fraction)
    _put_trl_logger(port, arguments, taken, put)
    for key, value in source.items():
        if key not in taken and value is not None:
            row = find("TRL", (key,))
            note = "no counterpart here"
            if row is not None and row.here is None:
                note = row.note
            elif row is not None and key in mine:
                note = f"{row.here}{': ' * bool(row.note)}{row.note}"
            port.leave_out(key, value, note)
    _require(port)
    return port


_SAME = (
    "attn_implementation",
    "trust_remote_code",
    "learning_rate",
    "weight_decay",
    "adam_epsilon",
    "max_grad_norm",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_modules_to_save",
    "use_rslora",
    "gradient_checkpointing",
    "chat_template_path",
    "seed",
    "save_total_limit",
    "output_dir",
    "dataloader_num_workers",
    "shuffle_dataset",
    "max_length",
    "num_completions_to_print",
    "eval_on_start",
)
"""Arguments whose value is that of the key here."""


def _put_trl_models(port: Port, arguments: Mapping[str, Any], taken: set[str], student: Any, revision: Any) -> None:
    if student:
        pinned = student if revision in (None, "main") else f"{student}@{revision}"
        port.put("policy.model_name", pinned, was="model_name_or_path")
    else:
        _require(port)
    length = arguments["max_length"]
    port.put("policy.max_total_sequence_length", length, was="max_length")
    taken.update(("teacher_model_name_or_path", "teacher_tokenizer_name_or_path"))
    teacher, tokenizer = arguments.get("teacher_model_name_or_path"), arguments.get("teacher_tokenizer_name_or_path")
    if teacher:
        port.put("teacher.model_name", teacher, was="teacher_model_name_or_path")
        port.put("teacher.max_total_sequence_length", length, was="max_length")
    else:
        note = "TRL takes the student itself without one"
        port.put("teacher.model_name", FILL_IN, was="teacher_model_name_or_path", note=note)
    if tokenizer and tokenizer != teacher:
        port.put("teacher.tokenizer.name", tokenizer, was="teacher_tokenizer_name_or_path")
    for section, key in (("policy", "model_init_kwargs"), ("teacher", "teacher_model_init_kwargs")):
        for name, value in dict(arguments.get(key) or {}).items():
            here = {"dtype": "precision", "torch_dtype": "precision"}.get(name, name)
            if here == "precision" and value in ("float32", "bfloat16", "float16"):
                port.put(f"{section}.precision", value, was=f"{key}.{name}")
            elif here in ("attn_implementation", "trust_remote_code"):
                port.put(f"{section}.{here}", value, was=f"{key}.{name}")
            elif value not in (None, "auto"):
                port.leave_out(f"{key}.{name}", value, f"{section}.model_overrides: of the model's configuration alone")
        taken.add(key)


def _put_trl_schedule(port: Port, arguments: Mapping[str, Any], taken: set[str], put: Any) -> None:
    kind = str(arguments["lr_scheduler_type"])
    if kind in _SCHEDULES:
        put("policy.scheduler", _SCHEDULES[kind], "lr_scheduler_type")
    else:
        put("policy.scheduler", "cosine", "lr_scheduler_type", f"{kind} is not known by that word")
    warm = "warmup_steps" if arguments.get("warmup_steps") else "warmup_ratio"
    taken.update(("warmup_steps", "warmup_ratio"))
    if arguments.get(warm):
        value = arguments[warm] if warm == "warmup_ratio" or float(arguments[warm]) < 1 else int(arguments[warm])
        put("policy.warmup_steps", value, warm)


def _put_trl_batches(port: Port, arguments: Mapping[str, Any], taken: set[str], put: Any) -> None:
    one, several = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    note = f"{one} x gradient_accumulation_steps {several}; times the devices, if there were several"
    put("distillation.num_prompts_per_step", int(one) * int(several), "per_device_train_batch_size", note)
    put("distillation.num_prompts_per_step", int(one) * int(several), "gradient_accumulation_steps", note)
    epochs = float(arguments["num_train_epochs"])
    put("distillation.max_num_epochs", max(1, round(epochs)), "num_train_epochs", "rounded" * (epochs % 1 != 0))
    steps = arguments.get("max_steps", -1)
    if int(steps) > 0:
        put("distillation.max_num_steps", int(steps), "max_steps")
        # TRL goes by the steps alone where they are given
        port.put("distillation.max_num_epochs", 1_000_000, was="num_train_epochs", note="max_steps overrides it")
    else:
        note = "TRL counts epochs; a run ends after these steps at the latest, and the schedule is over them"
        put("distillation.max_num_steps", 1000, "max_steps", note)
    strategy = arguments.get("eval_strategy")
    if strategy == "no":
        put("distillation.val_period", 0, "eval_strategy")
    elif arguments.get("eval_steps"):
        for key in ("eval_strategy", "eval_steps"):
            if key in arguments:
                put("distillation.val_period", int(arguments["eval_steps"]), key)
    elif strategy is not None:
        taken.add("eval_strategy")
        port.leave_out("eval_strategy", strategy, "before and after the run; in between by distillation.val_period")
    if arguments.get("save_strategy") in ("no", "epoch"):
        put("checkpointing.save_period", 0, "save_strategy", "at the end alone")
    else:
        put("checkpointing.save_period", max(int(arguments["save_steps"]), 0), "save_steps")


def _put_trl_data(port: Port, arguments: Mapping[str, Any], taken: set[str], put: Any) -> None:
    name = arguments.get("dataset_name")
    if name:
        files, _ = _data_files(name)
        put("data.train", files, "dataset_name")
        if str(files).startswith("hf:"):
            for key, here in (("dataset_config", "data.hub_subset"), ("dataset_train_split", "data.hub_split")):
                if arguments.get(key):
                    put(here, arguments[key], key)
            if arguments.get("dataset_test_split") or arguments.get("eval_strategy", "no") != "no":
                port.put("data.validation", files, was="dataset_name")
                put("data.hub_validation_split", arguments.get("dataset_test_split", "test"), "dataset_test_split")
    elif not port.get("data.train"):
        port.put("data.train", f"{FILL_IN}.jsonl", note="not in the configuration: files, globs or hf:owner/name")
    if arguments.get("dataset_text_field", "text") != "text":
        put("data.text_key", arguments["dataset_text_field"], "dataset_text_field")
    taken.add("dataset_text_field")


_OF_XTOKEN = {
    "xtoken_temperature": "temperature",
    "xtoken_kl_weight": "kl_loss_weight",
    "xtoken_ce_scale": "ce_loss_scale",
    "xtoken_vocab_topk": "vocab_topk",
    "xtoken_uncommon_topk": "uncommon_topk",
    "xtoken_dynamic_scaling": "dynamic_loss_scaling",
}


def _put_trl_loss(port: Port, arguments: Mapping[str, Any], taken: set[str], put: Any, fraction: float) -> None:
    beta = float(arguments["beta"])
    loss: dict[str, tuple[Any, str, str]] = {}
    if objective := arguments.get("xtoken_loss_type"):
        loss["mode"] = (objective, "xtoken_loss_type", "")
        for name, here in _OF_XTOKEN.items():
            if arguments.get(name) is not None and objective in _OF_MODES.get(here, (objective,)):
                loss[here] = (arguments[name], name, "")
        if path := arguments.get("xtoken_projection_matrix_path"):
            taken.add("xtoken_projection_matrix_path")
            _put_projection(port, "xtoken_projection_matrix_path", path, ("",))
    elif arguments.get("use_uld_loss"):
        mode = "gold" if arguments.get("uld_use_hybrid_loss") else "uld"
        loss["mode"] = (mode, "use_uld_loss", "the nearest to the hybrid loss" * (mode == "gold"))
        loss["ce_loss_scale"] = (float(arguments.get("uld_crossentropy_weight", 0.0)), "uld_crossentropy_weight", "")
        loss["kl_loss_weight"] = (float(arguments.get("uld_distillation_weight", 1.0)), "uld_distillation_weight", "")
        mine, theirs = (float(arguments.get(f"uld_{side}_temperature", 1.0)) for side in ("student", "teacher"))
        note = f"one for both sides; the teacher's was {theirs}" * (mine != theirs)
        if (mine, theirs) != (1.0, 1.0):
            loss["temperature"] = (mine, "uld_student_temperature", note)
    else:
        loss["ce_loss_scale"] = (0.0, "use_uld_loss", "the JSD alone is trained")
        if beta in (0.0, 1.0):
            loss["direction"] = ("forward" if beta == 0 else "reverse", "beta", "")
        else:
            loss["direction"] = ("jsd", "beta", "")
            loss["jsd_beta"] = (beta, "beta", "")
    if "mode" in loss:
        taken.add("beta")
        port.leave_out("beta", beta, f"of the JSD, not of {loss['mode'][0]}")
    used = {key for _, key, _ in loss.values()}
    taken.update(used, {"use_uld_loss", "uld_use_hybrid_loss", "uld_student_temperature", "uld_teacher_temperature"})
    if fraction < 1 or "mode" in loss:
        for name, (value, key, note) in loss.items():
            put(f"loss_fn.{name}", value, key, note)
    if not fraction:
        port.rows.append(("lmbda", "", "0: nothing is sampled, so there is no algorithm key"))
        return
    # in front, as the file is written in this order
    port.values = {"algorithm": "on_policy_distillation", **port.values}
    port.said["algorithm"] = "lmbda is above 0: the student samples"
    put("on_policy.fraction", fraction, "lmbda", "share of the records that are prompts")
    put("on_policy.temperature", float(arguments["temperature"]), "temperature", "of sampling")
    put("on_policy.top_p", float(arguments["top_p"]), "top_p")
    length = "max_completion_length" if "max_completion_length" in arguments else "max_new_tokens"
    put("on_policy.max_new_tokens", int(arguments.get(length, 128)), length)
    if arguments.get("num_generations"):
        put("on_policy.samples_per_prompt", int(arguments["num_generations"]), "num_generations")
    for name, (value, key, note) in loss.items():
        put(f"on_policy.loss_fn.{name}", value, key, note)


def _put_trl_logger(port: Port, arguments: Mapping[str, Any], taken: set[str], put: Any) -> None:
    report = arguments.get("report_to")
    writers = [report] if isinstance(report, str) else list(report or [])
    for writer in ("wandb", "tensorboard", "trackio"):
        if writer in writers or "all" in writers:
            put(f"logger.{writer}_enabled", True, "report_to")
    taken.add("report_to")
    if others := [name for name in writers if name not in ("wandb", "tensorboard", "trackio", "all", "none")]:
        port.leave_out("report_to", others, "metrics.jsonl and report.html are always written")
    for key, name in (("run_name", "name"), ("wandb_project", "project"), ("wandb_entity", "entity")):
        if arguments.get(key):
            put(f"logger.wandb.{name}", arguments[key], key)
    if arguments.get("wandb_run_group"):
        put("logger.wandb.group", arguments["wandb_run_group"], "wandb_run_group")
