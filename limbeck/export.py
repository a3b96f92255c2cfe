"""A run's student as a folder for others: weights, tokenizer, a model card, and the adapters of a LoRA run.

out/                a transformers folder (adapters merged): config, safetensors, tokenizer, generation_config.json
out/README.md       the model card: what was distilled from what, data, loss, figures
out/adapter/        where the run trained adapters: what `peft.PeftModel.from_pretrained` reads
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from limbeck import __version__
from limbeck.data.readers import HUB_PREFIX
from limbeck.errors import ConfigError, one_line
from limbeck.evaluation.models import find_model, is_run_folder
from limbeck.models.checkpoint import ADAPTER
from limbeck.report.run_data import RunData, read_run
from limbeck.utils.files import follow_umask, new_folder, write_atomic
from limbeck.utils.hub import parse_id, within

CARD = "README.md"
_PUSH_SECONDS = 20.0  # for the hub's first answer, for which its client would wait for ever
_NEEDED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def export_run(run_dir: str | Path, out: str | Path, *, checkpoint: str = "best", license: str | None = None) -> Path:
    """Copy one checkpoint of a run to the new folder ``out`` and write its card.

    Args:
        checkpoint: ``best`` (by the run's own metric), ``latest``, or a step.
        license: of the result, by its short name on the hub (``apache-2.0``); default: as the student's card says.

    Raises:
        ConfigError: ``out`` holds something already, or the checkpoint lacks what other programs read.
    """
    run, target = Path(run_dir), Path(out)
    if not is_run_folder(run):
        raise ConfigError(f"{str(run)!r} is no run folder; give one that limbeck train wrote")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{str(target)!r} is not empty; give another --out")
    source = find_model(str(run), checkpoint)
    data = read_run(run)
    with new_folder(target) as folder:
        shutil.copytree(source.weights, folder, dirs_exist_ok=True)
        if source.tokenizer != source.weights:
            shutil.copytree(source.tokenizer, folder, dirs_exist_ok=True)
        problems = missing_parts(folder)
        if problems:
            raise ConfigError(
                f"the checkpoint {source.weights!r} is not whole for other programs: {'; '.join(problems)}"
            )
        describe_for_version_4(folder)
        chat = (folder / "chat_template.jinja").is_file() and data.setting("data.mode") != "text"
        adapter = (folder / ADAPTER).is_dir()
        card = model_card(data, step=source.step, license=license, adapter=adapter, chat=chat)
        write_atomic(folder / CARD, card)
        # last, over all that was copied or written by libraries
        follow_umask(folder)
    return target


def missing_parts(folder: str | Path) -> list[str]:
    """Parts that transformers, vLLM or llama.cpp's converter would miss in a model folder, one sentence each."""
    path = Path(folder)
    missing = [f"{name} is missing" for name in _NEEDED if not (path / name).is_file()]
    if missing:
        return missing
    config = json.loads((path / "config.json").read_bytes())
    if not config.get("architectures"):
        missing.append("config.json names no architectures")
    if not any(path.glob("*.safetensors")):
        missing.append("there is no safetensors file")
    ends = json.loads((path / "generation_config.json").read_bytes()).get("eos_token_id")
    if ends is None and config.get("eos_token_id") is None:
        missing.append("neither config.json nor generation_config.json has an eos_token_id")
    return missing


def describe_for_version_4(folder: Path) -> None:
    """Add to a folder of transformers 5 what version 4 reads, which other programs still come with.

    Version 4 does not know the class that 5 names for every fast tokenizer, has another name for a list of special
    tokens, and takes a model without ``rope_theta`` for one with its default: worse text without a word.
    """
    tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokenizer.get("extra_special_tokens"), list):
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    config = json.loads((folder / "config.json").read_bytes())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    for name, content in (("tokenizer_config.json", tokenizer), ("config.json", config)):
        write_atomic(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# -- the card ----------------------------------------------------------------------------------------------------------


def model_card(run: RunData, *, step: int | None, license: str | None, adapter: bool, chat: bool = False) -> str:
    """The model card of a run's student, with the hub's fields in front. ``chat``: it is asked in conversations."""
    student, teachers = _public(run.student), [_public(name) for name in run.teachers]
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": license or _license_of(run.student) or "other",
        "tags": ["limbeck", "distillation"],
    }
    new = run.setting("policy.init") == "random"
    if not new:
        # the hub links a repository, and knows no revision of it
        head |= {"base_model": student.partition("@")[0], "base_model_relation": "finetune"}
    mode = run.setting("loss_fn.mode", "unknown") if teachers else "cross-entropy"
    taught = f"from {_joined(teachers)} " if teachers else "on text alone "
    files = _public_data(run.setting("data.train") or run.setting("traces.train"))
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {student}, distilled" if teachers else f"# {student}, trained",
        "",
        f"{student} was trained {taught}with Limbeck {__version__}.",
        "",
        *_table(("", ""), _facts(run, step, mode, files)),
        "",
        *_figures(run, step),
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")',
        _prompt(chat),
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=64)[0], skip_special_tokens=True))",
        "```",
        "",
    ]
    if adapter:
        lines += [
            f"`{ADAPTER}/` holds the same as LoRA adapters of {student}, for peft; the weights here are merged.",
            "",
        ]
    lines += [
        "## Licence",
        "",
        f"The licences of {_joined([*([] if new else [student]), *teachers, 'the data'])} hold for this model.",
        "",
    ]
    return "\n".join(lines)


def _prompt(chat: bool) -> str:
    """The line that makes the ids of a prompt."""
    if not chat:
        return 'ids = tokenizer.encode("Distillation is", return_tensors="pt")'
    return (
        'ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is distillation?"}], '
        # transformers 5 returns a mapping by default, which generate does not take as ids
        'add_generation_prompt=True, return_tensors="pt", return_dict=False)'
    )


def _facts(run: RunData, step: int | None, mode: str, files: list[str]) -> list[tuple[str, str]]:
    rows = [
        ("loss", f"`{mode}`"),
        ("training data", ", ".join(f"`{name}`" for name in files) or "unknown"),
        ("steps", f"{run.last_step if step is None else step:,} of {run.total_steps or run.last_step:,}"),
        ("records per step", str(run.setting("distillation.num_prompts_per_step", "unknown"))),
    ]
    rate = run.setting("policy.optimizer.kwargs.lr")
    if rate is not None:
        rows.append(("learning rate", f"{rate:g}" if isinstance(rate, float | int) else str(rate)))
    return rows


def _figures(run: RunData, step: int | None) -> list[str]:
    """Held-out bits per byte before, after and of the teacher, where the run was validated."""
    bits = [(at_step, value) for at_step, value in run.points("val/bpb") if step is None or at_step <= step]
    if not bits:
        return ["The run had no validation data, so nothing was measured on held-out text.", ""]
    rows = [("before training", f"{bits[0][1]:.3f}")] if bits[0][0] == 0 and len(bits) > 1 else []
    rows.append((f"at step {bits[-1][0]:,}", f"{bits[-1][1]:.3f}"))
    last = bits[-1][0]
    alone = None if run.baseline is None else dict(run.baseline.points("val/bpb")).get(last)
    if alone is not None:
        rows.append(("cross-entropy alone on the same records", f"{alone:.3f}"))
        rows.append(("difference to it", run.shown_gain(last)))
    teacher = run.points("val/teacher_bpb")
    if teacher:
        rows.append(("the teacher", f"{teacher[-1][1]:.3f}"))
    held_out = ", ".join(f"`{name}`" for name in _public_data(run.setting("data.validation")))
    where = f"Bits per byte on {held_out or 'held-out text'} (lower is better):"
    table = ["## Figures", "", where, "", *_table(("model", "bits per byte"), rows), ""]
    if run.teachers and alone is None:
        # most of what a run gains is the format of its text, with a teacher or without
        table += [
            "The student was not trained without the teacher as well, so these figures do not say what it added.",
            "",
        ]
    return table


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]


def _listed(value: Any) -> list[str]:
    return [] if value is None else [str(v) for v in value] if isinstance(value, list) else [str(value)]


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _public(name: str) -> str:
    """A model without the folders of this machine: hub ids stay, of a path the last part."""
    path = Path(name).expanduser()
    hub = "/" in name and not path.exists() and parse_id(name) is not None
    return name if hub or not path.name else path.name


def _public_data(names: Any) -> list[str]:
    """Data files without their folders; hub ids stay."""
    return [name if name.startswith(HUB_PREFIX) else Path(name).name or name for name in _listed(names)]


def _license_of(student: str) -> str | None:
    """The licence that a local model folder's card states."""
    card = Path(student).expanduser() / CARD
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---"):
        return None
    try:
        head = yaml.safe_load(text.split("---", 2)[1])
    except yaml.YAMLError:
        return None
    license = head.get("license") if isinstance(head, Mapping) else None
    return str(license) if license else None


# -- the hub -----------------------------------------------------------------------------------------------------------


def require_token() -> str:
    """The token of the hub; refuse to begin what ends in a push that the hub would not take."""
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        raise ConfigError("no token for the hub is set; log in with `hf auth login`, or put one into HF_TOKEN")
    return token


def push_folder(folder: str | Path, name: str, *, private: bool = True) -> str:
    """Upload an exported folder to the model hub as ``owner/name``; returns its address.

    Raises:
        ConfigError: there is no token, or the hub refuses.
    """
    from huggingface_hub import HfApi

    token = require_token()
    api = HfApi()
    try:
        address = within(_PUSH_SECONDS, lambda: api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(folder_path=str(folder), repo_id=name, commit_message="A student distilled with Limbeck")
    except Exception as error:  # the client's own, and those of the library that it speaks HTTP with
        # a server may say back what it was sent
        said = one_line(error, 200).replace(token, "[the token]")
        # from None: a traceback of the cause would show the token
        raise ConfigError(f"{name!r} could not be pushed: {said}") from None
    return str(address)
