"""Checks of ``limbeck doctor``: versions, devices, extras, and whether models can be used; each with a remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from limbeck.errors import CheckpointError, LimbeckError, one_line
from limbeck.report.run_data import is_run
from limbeck.tokens import ByteTokenizer, ByteVocab, read_tokenizer
from limbeck.tokens.chat import render_chat
from limbeck.utils.hub import kept_files
from limbeck.utils.manifest import check_manifest

Finding = dict[str, str]

_CORE = ("numpy", "tokenizers", "safetensors", "jinja2", "pydantic")
_TRAIN = ("torch", "transformers", "torchdata", "datasets", "pyarrow")
_EXTRAS = {
    "peft": ("peft", "LoRA students"),
    "bitsandbytes": ("quantized", "teachers in 4 or 8 bits"),
    "ray": ("ray", "training and caching past one machine"),
    "httpx": ("server", "teachers and judges behind a server"),
    "wandb": ("wandb", "logging to Weights & Biases"),
    "trackio": ("trackio", "logging to trackio"),
    "lm_eval": ("eval", "multiple-choice benchmarks in limbeck eval"),
    "sentencepiece": ("sentencepiece", "folders whose tokenizer is only a .model file"),
}
_PROBE = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


def _finding(level: str, what: str, text: str, remedy: str = "") -> Finding:
    return {"level": level, "what": what, "found": text, "remedy": remedy}


def examine(models: list[str]) -> list[Finding]:
    """All findings: ``level`` is ``ok``, ``note`` or ``bad``; ``remedy`` is one line, empty where none is needed."""
    findings = [_finding("ok", "python", platform.python_version())]
    findings += [_version(name) for name in (*_CORE, *_TRAIN)]
    findings += _devices()
    findings += [_extra(module, *use) for module, use in _EXTRAS.items()]
    for model in models:
        findings += examine_run(model) if is_run(Path(model)) else examine_model(model)
    return findings


def _version(name: str) -> Finding:
    try:
        return _finding("ok", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if name in _TRAIN:
            return _finding("note", name, "not installed", "pip install 'limbeck[train]' to train and run models")
        return _finding("bad", name, "missing", f"pip install {name}")


def _devices() -> list[Finding]:
    try:
        import torch
    except ImportError:
        return [_finding("ok", "cpu", f"{os.cpu_count()} cores"), _disk()]
    from limbeck.models.fp8 import lacking

    findings = [_finding("ok", "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            fp8 = "" if lacking(torch.device("cuda", i)) is None else "no "
            findings.append(_finding("ok", f"cuda:{i}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, {fp8}fp8"))
    else:
        findings.append(_finding("note", "gpu", "none visible", "runs use the CPU; small models only"))
    return [*findings, _disk()]


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 2**30
    level, remedy = ("ok", "") if free > 5 else ("note", "checkpoints and teacher caches need room; free some disk")
    return _finding(level, "disk", f"{free:.0f} GiB free here", remedy)


def _extra(module: str, extra: str, use: str) -> Finding:
    if importlib.util.find_spec(module) is not None:
        return _finding("ok", module, "installed")
    return _finding("note", module, "not installed", f"pip install 'limbeck[{extra}]' for {use}")


def examine_run(spec: str) -> list[Finding]:
    """Whether the checkpoints of a run folder are what was saved."""
    folder = Path(spec) / "checkpoints"
    steps = [(int(path.name[5:]), path) for path in folder.glob("step_*") if path.name[5:].isdigit()]
    findings = []
    for step, path in sorted(steps):
        try:
            check_manifest(path, step)
        except CheckpointError as error:
            remedy = "training goes on from an older one and sets this aside"
            findings.append(_finding("bad", f"{spec}: {path.name}", str(error), remedy))
            continue
        findings.append(_finding("ok", f"{spec}: {path.name}", "is what was saved"))
    for path in sorted(folder.glob("damaged_step_*")):
        findings.append(_finding("note", f"{spec}: {path.name}", "was set aside", "remove it once nobody needs it"))
    return findings or [_finding("note", f"{spec}: checkpoints", "none", "the run has not saved yet")]


def examine_model(spec: str) -> list[Finding]:
    """Tokenizer, head width, BOS token and chat template of one model."""
    try:
        tokenizer = read_tokenizer(spec)
        vocab = tokenizer.vocab
    except LimbeckError as error:
        return [_finding("bad", f"{spec}: tokenizer", str(error), "give a folder with a tokenizer.json")]
    kind = f"{vocab.family}, {vocab.size} ids, fingerprint {vocab.fingerprint[:12]}"
    level, remedy = ("ok", "") if vocab.lossless else ("note", "lossy: most chunks will not be exact")
    return [
        _finding(level, f"{spec}: tokenizer", kind, remedy),
        _proof(spec, tokenizer),
        *_head(spec, vocab),
        *_weights(spec),
        *_quantized(spec),
        *_bos(spec, tokenizer),
        _template(spec, tokenizer),
    ]


def _proof(spec: str, tokenizer: ByteTokenizer) -> Finding:
    # what normalisers change: composed letters, superscripts, a joined emoji, \r\n; and a special token's name as text
    rendering = tokenizer.encode("Naïve café, 1,024 = 2¹⁰; 日本語 👩‍🔬\r\n\tdone  <pad>")
    changed = rendering.skipped.get("inexact_tokens", 0)
    if not changed:
        return _finding("ok", f"{spec}: bytes", "joined token bytes reproduce the text")
    return _finding(
        "note",
        f"{spec}: bytes",
        f"a normaliser changes {changed} of {len(rendering)} probe tokens",
        "chunks it touches are counted and left out of the loss",
    )


def _head(spec: str, vocab: ByteVocab) -> list[Finding]:
    folder = kept_files(spec)
    if folder is None or not (folder / "config.json").is_file():
        return []
    try:
        config = json.loads((folder / "config.json").read_bytes())
        width = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        damage = f"config.json is damaged ({one_line(error)})"
        return [_finding("bad", f"{spec}: head", damage, "fetch the model again")]
    # isinstance would take true for a width
    if type(width) is not int or width < 1:
        return [_finding("note", f"{spec}: head", "config.json names no vocab_size", "check the folder")]
    report = vocab.head_report(width)
    text = f"{report['width']} rows for {report['tokens']} tokens"
    if report["missing_ids"]:
        return [
            _finding(
                "note",
                f"{spec}: head",
                f"{text}: the last {report['missing_ids']} ids have no row",
                "texts that use them are refused; resize the embedding if they are needed",
            )
        ]
    extra = (
        f"; {report['extra_rows']} rows are no token and take no part in any softmax" if report["extra_rows"] else ""
    )
    return [_finding("ok", f"{spec}: head", text + extra)]


def has_weights(spec: str) -> bool:
    """Whether a model's weights lie here: a GGUF file, or a folder with one or with safetensors."""
    path = kept_files(spec)
    if path is None:
        return False
    return path.suffix == ".gguf" or any(path.glob("*.safetensors")) or any(path.glob("*.gguf"))


def _bos(spec: str, tokenizer: ByteTokenizer) -> list[Finding]:
    """Whether the weights, where they lie here, expect the BOS token."""
    if not has_weights(spec) or tokenizer.bos_id is None or importlib.util.find_spec("torch") is None:
        return []
    from limbeck.evaluation.bits import EvalModel, EvalOptions
    from limbeck.evaluation.bos import bos_bits
    from limbeck.evaluation.models import find_model

    what = f"{spec}: BOS token"
    try:
        bits = bos_bits(EvalModel(find_model(spec), EvalOptions()).policy, tokenizer)
    except LimbeckError as error:
        return [_finding("bad", what, str(error), "replace the weights")]
    assert bits is not None
    if bits.expected is None or bits.expected == tokenizer.adds_bos:
        return [_finding("ok", what, str(bits))]
    wanted = "true" if bits.expected else "false"
    remedy = (
        f"set policy.tokenizer.bos: {wanted} in the run file (teacher.tokenizer.bos where it teaches); "
        "the tokenizer by itself does otherwise"
    )
    return [_finding("note", what, str(bits), remedy)]


def _weights(spec: str) -> list[Finding]:
    """Files that are cut off or no longer what their headers say; what a model computes is not looked at."""
    folder = kept_files(spec)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    for path in files:
        try:
            # opening is the check: the header must fit the length of the file
            with safe_open(path, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            damage = f"{path.name} is damaged ({one_line(error)})"
            return [_finding("bad", f"{spec}: weights", damage, "fetch the model again")]
    return [_finding("ok", f"{spec}: weights", f"{len(files)} safetensors files, whole")] if files else []


def _quantized(spec: str) -> list[Finding]:
    """How the weights are quantised where they are stored."""
    folder = kept_files(spec)
    if folder is None:
        return []
    try:
        config = json.loads((folder / "config.json").read_bytes())
        stored = config.get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    if not isinstance(stored, dict):
        return []
    method = str(stored.get("quant_method") or "bitsandbytes")
    what, text = f"{spec}: quantised", f"{method}; usable as a teacher, one copy in each process"
    if method == "bitsandbytes" and importlib.util.find_spec(method) is None:
        return [_finding("bad", what, method, "pip install 'limbeck[quantized]' to load it")]
    return [_finding("ok", what, text)]


def _template(spec: str, tokenizer: ByteTokenizer) -> Finding:
    if not tokenizer.templates:
        return _finding("note", f"{spec}: chat template", "none", "use mode text, or give a template in the run file")
    try:
        rendering = render_chat(tokenizer, _PROBE, name=spec)
    except LimbeckError as error:
        return _finding("bad", f"{spec}: chat template", str(error), "give another template in the run file")
    return _finding(
        "ok",
        f"{spec}: chat template",
        f"usable; {int(rendering.loss_mask.sum())} of {len(rendering)} probe tokens are supervised",
    )
