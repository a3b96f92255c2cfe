"""``limbeck init --from``: a configuration of NeMo RL or TRL becomes a run file that says every difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.config import MasterConfig, OnPolicyMasterConfig
from limbeck.algorithms.dispatch import resolve_run
from limbeck.config import load_config, parse_yaml, read_yaml
from limbeck.errors import ConfigError
from limbeck.foreign_keys import LIBRARIES, canonical
from limbeck.losses.objectives.gold import Gold
from limbeck.tools.port import Port, port_file
from tests.cli.command import run

FOLDER = Path(__file__).parent / "port"
FILES = sorted(FOLDER.iterdir())


def ported(name: str) -> tuple[Port, str, Any]:
    port = port_file(FOLDER / name)
    text = port.text(name)
    return port, text, resolve_run(parse_yaml(text, name))[0]


def leaves(node: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(node, list) and node and isinstance(node[0], dict) and path == ("teachers",):
        for number, item in enumerate(node):
            yield from leaves(item, (*path, str(number)))
    elif node is not None:
        yield path, node


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_loads_and_says_every_difference(file: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run.yaml"
    code, said, _ = run(capsys, "init", "--from", file, "-o", out)
    assert code == 0
    assert str(out) in said
    values = load_config(out)
    resolve_run(values)
    assert (
        max(
            len(line)
            for line in out.read_text().splitlines()
            if ":" in line and not line.lstrip().startswith(("#", "kwargs"))
        )
        <= 120
    )
    table = {key for key, _, _ in port_file(file).rows}
    source = json.loads(file.read_text()) if file.suffix == ".json" else read_yaml(file, "x")
    kept = {".".join(path): value for path, value in leaves(values)}
    for path, value in leaves(source):
        key = ".".join(path).replace("teacher.", "teachers.0.", 1) if "teacher" in source else ".".join(path)
        # as it was, or in the table by itself, by a section around it, or with the weights of all teachers
        around = {".".join(key.split(".")[:end]) for end in range(1, key.count(".") + 2)}
        weight = canonical(path) == "teacher.weight" and "teachers.N.weight" in table
        quiet = path[-1] in ("use_peft", "optim", "teacher_tokenizer_name_or_path", "uld_use_hybrid_loss")
        flags = path[-1].startswith("prefix_bidir_v3_loss_fn") or path[0] == "teacher_model_init_kwargs"
        assert kept.get(key) == value or around & table or weight or quiet or flags or "${" in str(value), key


def test_the_present_form_of_nemo_rl() -> None:
    port, text, config = ported("nemo_rl.yaml")
    assert isinstance(config, MasterConfig)
    assert [teacher.model_name for teacher in config.teachers] == ["owner/teacher", "owner/other"]
    loss = config.loss_fn
    assert (loss.mode, loss.teacher_combination, loss.teacher_scoring) == ("partition", "sum", "static")
    assert loss.teacher_weights == [0.8, 0.2]
    assert config.policy.tokenizer.name == "owner/student", "${..model_name}"
    assert config.policy.make_sequence_length_divisible_by == 2, "${mul:${mul:..},2}"
    assert config.teachers[1].max_total_sequence_length == config.data.max_input_seq_length == 256
    assert (config.data.train, config.data.text_key, config.data.join_to_bytes) == ("hf:owner/corpus", "body", 4096)
    assert config.logger.wandb == {"project": "p", "name": "d-arrow_text"}
    said = {key: note for key, _, note in port.rows}
    assert "--convert /data/first.pt" in said["teachers.0.aligner.projection_matrix_path"]
    assert "starts nothing" in said["cluster.gpus_per_node"]
    # told where it stands and in the table
    for key in ("mlflow_enabled", "save_optimizer", "normalize_teacher_by_vocab", "include_thinking_in_loss"):
        assert text.count(key) == 2


def test_the_older_form_of_nemo_rl() -> None:
    _, _, config = ported("nemo_rl_older.yaml")
    assert (config.loss_fn.mode, config.loss_fn.projection_matrix_path) == ("gold", "W.safetensors")
    assert (config.loss_fn.temperature, config.loss_fn.model_dump()["exact_token_match_only"]) == (2.0, True)
    assert [teacher.model_name for teacher in config.all_teachers] == ["owner/teacher"]
    assert (config.data.train, config.data.validation) == ("texts/*.arrow", "held.jsonl")


def test_the_first_form_of_nemo_rl() -> None:
    port, text, config = ported("nemo_rl_first.yaml")
    loss = config.loss_fn
    assert (loss.mode, loss.temperature, loss.dynamic_loss_scaling) == ("h_kl", 1.5, True)
    assert config.data.train == "shards/part-0[0-5].arrow"
    left_out = {key for key, here, _ in port.rows if not here}
    assert {
        "loss_fn.loss_type",
        "loss_fn.vocab_topk",
        "distillation.topk_logits_k",
        "token_aligner",
        "eval",
    } <= left_out
    assert "no key of that name" not in text
    assert text.count("# of gold losses too") == 2, "ce_loss_scale, dynamic_loss_scaling"


@pytest.mark.parametrize(
    ("flags", "mode", "kept"),
    [
        ([{"gold_loss": True}], "gold", "uncommon_topk"),
        ([{"gold_loss": True, "xtoken_loss": True}], "h_kl", "uncommon_topk"),
        ([{}], "p_kl", "vocab_topk"),
        ([{"gold_loss": False}, {"gold_loss": True}], "p_kl", "vocab_topk"),
    ],
    ids=str,
)
def test_a_teachers_own_flags_count(tmp_path: Path, flags: list[dict[str, bool]], mode: str, kept: str) -> None:
    """Only keys that the objective reads are written; where teachers differ, each has its own."""
    file = tmp_path / "nemo.json"
    loss = {"gold_loss": False, "xtoken_loss": False, "vocab_topk": 96, "uncommon_topk": 97}
    teachers = [{"model_name": "t", "projection_matrix_path": None, **own} for own in flags]
    file.write_text(json.dumps({"policy": {"model_name": "s"}, "teachers": teachers, "loss_fn": loss}))
    port = port_file(file)
    config: Any = resolve_run(parse_yaml(port.text("x"), "x"))[0]
    assert config.loss_fn.mode == mode
    assert {"vocab_topk", "uncommon_topk"} & port.values["loss_fn"].keys() == {kept}
    if len(flags) > 1:
        assert config.modes == ["p_kl", "gold"]
        assert config.teachers[1].loss_fn == Gold.Config(uncommon_topk=97)


def test_the_topk_of_teachers_with_the_same_tokenizer() -> None:
    """The newest form reads vocab_topk for such teachers alone."""
    port, _, config = ported("nemo_rl.yaml")
    assert (config.loss_fn.topk, "vocab_topk" in port.values["loss_fn"]) == (512, False)


def test_x_token_arguments_of_gold() -> None:
    _, text, config = ported("xtoken.json")
    loss = config.loss_fn
    expected = {"mode": "p_kl", "temperature": 2.0, "kl_loss_weight": 0.5, "vocab_topk": 64}
    assert expected.items() <= loss.model_dump().items()
    assert loss.dynamic_loss_scaling
    assert config.teacher.precision == "bfloat16"
    assert (config.data.validation, config.data.hub_validation_split) == ("hf:owner/chats", "test")
    assert config.distillation.val_period == 20
    for key in ("beta", "xtoken_uncommon_topk", "teacher_model_init_kwargs.revision"):
        assert f"# {key}:" in text
    assert "--convert map.pt" in text


def test_gold_off_policy() -> None:
    _, text, config = ported("gold.json")
    assert isinstance(config, MasterConfig)
    assert not isinstance(config, OnPolicyMasterConfig)
    loss = config.loss_fn
    assert (loss.mode, loss.ce_loss_scale, loss.kl_loss_weight) == ("uld", 0.3, 0.7)
    assert config.distillation.num_prompts_per_step == 32
    assert config.distillation.max_num_steps == 200
    assert config.policy.optimizer.kwargs == {"lr": 1e-6, "betas": [0.9, 0.95]}
    assert (config.policy.precision, config.policy.dtensor_cfg.activation_checkpointing) == ("bfloat16", True)
    assert (config.data.train, config.data.hub_split) == ("hf:owner/chats", "train_sft")
    assert config.logger.wandb_enabled
    assert "some_new_argument" in text


def test_gkd_on_policy_with_what_trl_assumes() -> None:
    _, text, config = ported("gkd.yaml")
    assert isinstance(config, OnPolicyMasterConfig)
    own = config.on_policy
    assert (own.fraction, own.temperature, own.max_new_tokens) == (0.5, 0.7, 64)
    expected = {"direction": "jsd", "jsd_beta": 0.5, "ce_loss_scale": 0.0}
    assert expected.items() <= own.loss_fn.model_dump().items()
    assert config.policy.lora is not None
    assert (config.policy.lora.r, config.policy.lora.alpha) == (8, 16)
    assert config.loss_fn.temperature == 1.0, "TRL's temperature is that of sampling"
    assert "FILL_IN.jsonl" in text


@pytest.mark.parametrize(
    ("beta", "settings"), [(0.0, ("forward", 0.5)), (1.0, ("reverse", 0.5)), (0.3, ("jsd", 0.3))], ids=str
)
def test_the_divergence_by_beta(tmp_path: Path, beta: float, settings: tuple[str, float]) -> None:
    file = tmp_path / "gkd.json"
    file.write_text(json.dumps({"teacher_model_name_or_path": "t", "model": "s", "beta": beta, "lmbda": 0.0}))
    loss = resolve_run(parse_yaml(port_file(file).text("x"), "x"))[0].loss_fn.model_dump()
    assert (loss["direction"], loss["jsd_beta"]) == settings


def test_the_file_below_is_read_where_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("distillation: {seed: 5}\npolicy: {model_name: base}\n")
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: base.yaml\npolicy: {precision: bfloat16}\nteachers: [{model_name: t, weight: 0.5}]\n")
    port = port_file(file)
    values = port.values
    assert (values["distillation"]["seed"], values["policy"]["model_name"]) == (5, "base")
    assert values["loss_fn"]["kl_loss_weight"] == 0.5, "the only teacher's weight"


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "a: 1\n"), ("b.json", "{"), ("c.yaml", "- 1\n"), ("d.yaml", "defaults: d.yaml\n")]
)
def test_other_files_are_refused(tmp_path: Path, capsys: Any, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError):
        port_file(tmp_path / name)
    code, _, err = run(capsys, "init", "--from", tmp_path / name, "-o", tmp_path / "out.yaml")
    assert (code, (tmp_path / "out.yaml").exists()) == (1, False)
    assert "Traceback" not in err


def test_models_and_a_file_to_port_exclude_each_other(tmp_path: Path, capsys: Any) -> None:
    code, _, err = run(capsys, "init", "--from", FILES[0], "--student", "s", "-o", tmp_path / "out.yaml")
    assert code == 1
    assert "--student" in err


def test_libraries_are_the_two() -> None:
    assert set(LIBRARIES) == {"NeMo RL", "TRL"}
