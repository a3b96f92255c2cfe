"""Every block of README and docs is run, or says why it is only parsed; what it shows is what comes out.

| language | run | otherwise |
|---|---|---|
| `sh` | `limbeck` and `python` commands, in `stage.make_stage` | options and arguments are those of the command, files of this tree exist, targets of `make` and extras of `pip` too |
| `yaml` | merged over the run file of the stage, and validated | |
| `python` | page by page in one namespace | compiled, imports of limbeck resolved |
| `json`, `jsonl` | parsed | |
| `text` | compared with what was printed, where marked as output | |
"""  # noqa: E501

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from limbeck.algorithms.dispatch import resolve_run
from limbeck.cli import application
from limbeck.config import load_config, merge, parse_yaml, read_settings, recipe_file
from tests.docs.blocks import LANGUAGES, PAGES, ROOT, Block, read_blocks, shows
from tests.docs.pages import names_for, placeholders
from tests.docs.stage import RUN, RUN_FOLDERS, make_stage, smaller
from tests.helpers.runs import limbeck

BLOCKS = {str(path.relative_to(ROOT)): read_blocks(path) for path in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
RUN_FILE_VERBS = ("train", "cache", "plan")

NOT_RUN = {
    "docs/checkpoints.md": 1,
    "docs/evaluate.md": 1,
    "docs/coming_from.md": 1,
    "docs/scaling.md": 1,
    "docs/teachers.md": 2,
}
"""How many blocks of each page are parsed only: a new one is a decision, and changes this table."""


def of(*languages: str) -> list[Block]:
    return [block for block in ALL if block.language in languages]


# ---- parsed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_every_block_names_its_language(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.where} is ```{block.language}; one of {LANGUAGES} is needed"


def test_blocks_that_are_not_run_are_counted() -> None:
    found = {page: [b for b in blocks if b.not_run] for page, blocks in BLOCKS.items()}
    for blocks in found.values():
        for block in blocks:
            print(f"{block.where}: {block.not_run}")
    assert {page: len(blocks) for page, blocks in found.items() if blocks} == NOT_RUN


USAGE_ERROR = typer.BadParameter.__mro__[1]  # typer brings click, or has it inside


@pytest.fixture(scope="module")
def commands() -> TyperGroup:
    group = typer.main.get_command(application())
    assert isinstance(group, TyperGroup)
    return group


def parse_limbeck(group: TyperGroup, words: list[str]) -> None:
    """Fail on an unknown command, option or number of arguments; of recipes in this tree, on unknown keys too."""
    command: Any = group
    context, rest = command.context_class(command, info_name="limbeck"), list(words)
    while isinstance(command, TyperGroup):
        if not rest or rest[0].startswith("-"):
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.context_class(command, info_name=name, parent=context)
    command.parse_args(context, rest)
    if words[0] in RUN_FILE_VERBS:
        given, overrides = str(context.params["run_file"]), list(context.params["overrides"] or [])
        if context.params.get("student") is not None:
            return
        resolve_run(load_config(given) if recipe_file(given) else RUN, read_settings(overrides))


def without_environment(words: list[str]) -> list[str]:
    return words[next((i for i, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word)), 0) :]


def check_command(group: TyperGroup, words: list[str]) -> None:
    """What can be said of a command without running it."""
    words = without_environment(words)
    program = words[0]
    if program == "limbeck":
        parse_limbeck(group, words[1:])
    elif program == "torchrun":
        parse_limbeck(group, words[words.index("limbeck") + 1 :])
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {w for w in words[1:] if "=" not in w} <= set(targets), words
    elif program == "pip":
        assert words[1] == "install"
        known = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
        for word in words[2:]:
            for extras in re.findall(r"(?:limbeck|\.)\[([a-z,]+)\]", word):
                assert set(extras.split(",")) <= set(known), word
    elif program.endswith("python") and len(words) > 1 and words[1].endswith(".py"):
        assert (ROOT / words[1]).exists(), words[1]


@pytest.mark.parametrize("block", of("sh"), ids=lambda block: block.where)
def test_commands_have_these_options(block: Block, commands: TyperGroup) -> None:
    for words in block.commands():
        check_command(commands, words)


@pytest.mark.parametrize("block", of("yaml"), ids=lambda block: block.where)
def test_run_files_are_valid(block: Block) -> None:
    given = parse_yaml(block.code, block.where)
    base = {key: value for key, value in RUN.items() if not (key == "teacher" and "teachers" in given)}
    if given.get("algorithm") == "trace_distillation":
        base = {"policy": RUN["policy"], "traces": {"train": "traces.jsonl"}}
    if "holdout" in given.get("data", {}):
        base = {**base, "data": {key: value for key, value in RUN["data"].items() if key != "validation"}}
    resolve_run(merge(base, given))


@pytest.mark.parametrize("block", of("python"), ids=lambda block: block.where)
def test_programs_compile_and_import_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "limbeck":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("block", of("json", "jsonl"), ids=lambda block: block.where)
def test_json_is_json(block: Block) -> None:
    for part in [block.code] if block.language == "json" else block.code.splitlines():
        json.loads(part)


def test_outputs_follow_a_block_that_prints() -> None:
    for blocks in BLOCKS.values():
        for before, block in zip([None, *blocks], blocks, strict=False):
            if block.is_output:
                assert block.language == "text", block.where
                assert before is not None, block.where
                assert before.language in ("sh", "python"), block.where


@pytest.mark.parametrize(
    ("shown", "printed", "fault"),
    [
        ("loss 1.5 in 3 s", "x\nloss  0.25 in 12 s\n", None),
        ("a ... c", "a b b c", None),
        ("first\n...\nsecond", "first\n\nthird\nsecond", None),
        ("second\nfirst", "first\nsecond", "first"),
        ("los 1.5", "loss 1.5", "los 1.5"),
        ("───── x", "── x", None),
    ],
)
def test_what_counts_as_shown(shown: str, printed: str, fault: str | None) -> None:
    assert shows(shown, printed) == fault


@pytest.mark.parametrize(
    "line",
    ["limbeck trian run.yaml", "limbeck align --pupil S -t T x", "limbeck train run.yaml policy.lrr=1", "make dmeo",
     "pip install 'limbeck[trian]'", "torchrun -m limbeck plan run.yaml --gpu-count 3"],
)  # fmt: skip
def test_mistakes_are_found(line: str, commands: TyperGroup) -> None:
    from limbeck.errors import LimbeckError

    block = Block("page", 1, "sh", line, None, None, False)
    with pytest.raises((USAGE_ERROR, LimbeckError, AssertionError)):
        check_command(commands, block.commands()[0])


# ---- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage")
    make_stage(folder)
    here = Path.cwd()
    os.chdir(folder)
    try:
        code, _, err = limbeck("train", "run.yaml", "logger.log_dir=runs/mine")
    finally:
        os.chdir(here)
    assert code == 0, err
    for name in RUN_FOLDERS:
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / name)
    return folder


def run_limbeck(words: list[str]) -> str:
    if words[0] in ("train", "cache") and "--student" not in words:
        overrides = [word for word in words[2:] if "=" in word and not word.startswith("-")]
        words = [*words, *smaller(words[1], overrides)]
    if words[0] == "demo":
        words = [*words, "--steps", "2", "--documents", "8"]
    if words[0] == "write":
        words = [*words, "--limit", "8", "--max-new-tokens", "12"]
    code, out, err = limbeck(*words)
    assert code == 0, f"limbeck {' '.join(words)} ended with {code}:\n{err[-2000:]}"
    return out + err


def run_command(words: list[str]) -> str:
    environment = [word for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
    words = without_environment(words)
    if words[0] == "limbeck":
        return run_limbeck(words[1:])
    if words[0] in ("make", "pip"):
        return ""  # would install into this environment; `check_command` has looked at it
    assert words[0] in ("python", "cat", "head", "ls", "mkdir", "wc"), f"{words[0]} is neither run nor marked 'not run'"
    program = [sys.executable, *words[1:]] if words[0] == "python" else words
    more = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **dict(part.split("=", 1) for part in environment)}
    done = subprocess.run(program, env={**os.environ, **more}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def run_program(block: Block, namespace: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.code, block.where, "exec"), namespace)
    return out.getvalue()


RUNNABLE = [page for page, blocks in BLOCKS.items() if any(b.language in ("sh", "python") for b in blocks)]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE)
def test_page_runs(page: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    shutil.copytree(prepared, place, symlinks=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with names_for(page) as namespace, placeholders() as stand_ins:
        printed = ""
        for block in BLOCKS[page]:
            if block.title and not block.not_run:
                target = place / block.title
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.code, encoding="utf-8")
            if block.is_output:
                missing = shows(block.code, printed)
                assert missing is None, f"{block.where}: {missing!r} is not what was printed:\n{printed[-4000:]}"
            elif block.not_run:
                continue
            elif block.language == "sh":
                commands = [[stand_ins.get(word, word) for word in words] for words in block.commands()]
                printed = "".join(map(run_command, commands))
            elif block.language == "python":
                printed = run_program(block, namespace)
