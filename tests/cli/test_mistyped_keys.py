"""A mistyped key is told before torch is imported, by every command that takes a run file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from limbeck.config import RECIPES, load_config, read_settings, refuse_unknown_keys
from limbeck.errors import ConfigError
from limbeck.key_names import STORED

HEAVY = ("torch", "transformers", "datasets", "numpy", "pyarrow", "peft", "ray")
MOST_MODULES = 600
"""A command that ends on a mistyped key has imported fewer; one that imports torch has some 3,000."""

_COUNTED = f"""
import sys
from limbeck.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print(len(sys.modules), *heavy)
"""

WRONG = {
    "policy.lrr=1": "unknown key 'policy.lrr': did you mean 'lr'?",
    "loss_fn.tempereture=2": "unknown key 'loss_fn.tempereture': did you mean 'temperature'?",
    "teacher.server.modle=x": "unknown key 'teacher.server.modle': did you mean 'model'?",
    "distilation.seed=2": "unknown key 'distilation': did you mean 'distillation'?",
    "warmup=2": "unknown key 'warmup': did you mean 'warmup_steps'?",
    "algorithm=trace_distilation": "'algorithm' is 'trace_distilation', which is unknown; "
    "did you mean 'trace_distillation'?",
}


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code and both outputs of the command in an interpreter where torch cannot be imported."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')\n", encoding="utf-8")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])])
    found = subprocess.run(
        [sys.executable, "-c", _COUNTED, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("override", WRONG)
def test_it_is_told_before_torch_is_imported(tmp_path: Path, override: str) -> None:
    code, out, err = run(tmp_path, "train", "cpu_smoke", override)
    assert (code, err) == (1, f"limbeck: {WRONG[override]}\n")
    number, *heavy = out.split()
    assert heavy == []
    assert int(number) < MOST_MODULES


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["plan"], ["cache"]])
def test_every_command_that_takes_a_run_file_tells_it(tmp_path: Path, command: list[str]) -> None:
    code, out, err = run(tmp_path, *command, "cpu_smoke", "policy.lrr=1")
    assert code == (2 if "--dry-run" in command else 1)
    assert "unknown key 'policy.lrr': did you mean 'lr'?" in err
    assert "Traceback" not in err
    assert int(out.split()[0]) < MOST_MODULES


def test_a_pair_without_a_run_file_tells_it(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "train", "--student", "s", "--teacher", "t", "--data", "f", "policy.lrr=1")
    assert code == 1
    assert "unknown key 'policy.lrr': did you mean 'lr'?" in err
    number, *heavy = out.split()
    assert heavy == []
    assert int(number) < MOST_MODULES


def test_recipes_and_short_forms_have_known_keys() -> None:
    for path in RECIPES.glob("*.yaml"):
        refuse_unknown_keys(load_config(path), {})
    short = ["lr=1e-4", "scheduler=cosine", "warmup_steps=2", "policy.compile=true", "max_num_steps=3"]
    refuse_unknown_keys(load_config("on_policy_cpu"), read_settings([*short, "policy.model_overrides.any_thing=3"]))


def test_several_at_once_are_told_together() -> None:
    with pytest.raises(ConfigError) as error:
        refuse_unknown_keys({"policy": {"qq": 1}, "teachers": [{}, {"step": 1}]}, {})
    assert str(error.value).count("unknown key") == 2
    assert "'teachers.1.step'" in str(error.value)


@pytest.mark.train
@pytest.mark.parametrize("override", [o for o in WRONG if "algorithm" not in o])
def test_the_sentence_is_that_of_the_classes(override: str) -> None:
    from limbeck.algorithms.config import MasterConfig
    from limbeck.config import resolve

    given = load_config("cpu_smoke", [override])
    given.pop("algorithm", None)
    with pytest.raises(ConfigError) as error:
        resolve(MasterConfig, given)
    assert WRONG[override] in str(error.value)


def test_the_stored_file_is_json_with_every_class() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    named = {name for keys in stored["sections"].values() for below in keys.values() for name in below}
    assert named | set(stored["runs"].values()) == set(stored["sections"])
