import json
import random
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from limbeck.config import (
    apply_overrides,
    dump_yaml,
    load_config,
    merge,
    parse_yaml,
    resolve,
    resolve_references,
    with_settings,
)
from limbeck.errors import ConfigError
from limbeck.key_names import Keys


class Opt(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = "torch.optim.AdamW"
    kwargs: dict = {}


class Policy(BaseModel):
    model_config = ConfigDict(extra="forbid")
    max_grad_norm: float | None = None
    optimizer: Opt | None = None
    steps: int = Field(default=1, ge=1)


class Master(BaseModel):
    model_config = ConfigDict(extra="forbid")
    policy: Policy
    teachers: list[Policy] = []


def write(path, text):
    path.write_text(text)
    return path


def test_overrides_are_typed_by_yaml(tmp_path):
    path = write(
        tmp_path / "run.yaml", "policy:\n  max_grad_norm: 1.0\n  optimizer: {kwargs: {lr: 5e-6}}\nlist: [1, 2]\n"
    )
    cfg = load_config(
        path, ["policy.max_grad_norm=2e-1", "policy.optimizer.kwargs.betas=[0.9, 0.95]", "a.b=null", "list.1=x", "e="]
    )
    assert cfg == {
        "policy": {"max_grad_norm": 0.2, "optimizer": {"kwargs": {"lr": 5e-6, "betas": [0.9, 0.95]}}},
        "list": [1, "x"],
        "a": {"b": None},
        "e": None,
    }


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.5E+3", 1500.0), ("-2e4", -2e4), (".5e1", 5.0)])
def test_exponents_are_numbers(text, value):
    assert parse_yaml(text, "x") == value
    assert isinstance(parse_yaml(text, "x"), float)


def test_defaults_are_merged_below(tmp_path):
    write(tmp_path / "base.yaml", "policy: {a: 1, b: 2}\nlist: [1]\n")
    path = write(tmp_path / "run.yaml", "defaults: base.yaml\npolicy: {b: 3}\nlist: [2]\n")
    assert load_config(path) == {"policy": {"a": 1, "b": 3}, "list": [2]}
    write(tmp_path / "loop.yaml", "defaults: loop.yaml\n")
    with pytest.raises(ConfigError, match=r"loop\.yaml' .*'defaults'"):
        load_config(tmp_path / "loop.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b\n", "holds a list"),
        ("a: 1\na: 2\n", "'a' .* twice, .* line 2"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("? [a, b]\n: 1\n", "key on line 1 is a list"),
        ("{a: 1}: 2\n", "key on line 1 is a dict"),
        ("defaults: 3\n", "'defaults' is 3; give a run file"),
        ("defaults: [[a]]\n", r"'defaults' is \[\['a'\]\]; give a run file"),
        (f"a: {'9' * 5000}\n", "line 1 .* 1,000 digits"),
        (f"a: 0x{'f' * 5000}\n", "line 1 .* 1,000 digits"),
        ("a: 2001-99-99\n", "not valid YAML"),
        (f"a: {'[' * 150}{']' * 150}\n", "100 deep"),
        (f"a: {'[' * 20_000}\n", "nested too deeply"),
        ("a: &a [*a]\n", "line 1 contains itself"),
        ("a: &a [" * 60 + "x" + "]" * 60 + "\n", "not valid YAML"),
        (f"a: {'x' * (5 << 20)}\n", "has 5,242,884 characters"),
        (bytes(range(256)), "cannot be read"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def alias_bomb(item="[{}]", levels=12):
    """Every level holds the one before ten times."""
    lines = ["l0: &l0 [x]"]
    lines += [f"l{n}: &l{n} {item.format(', '.join([f'*l{n - 1}'] * 10))}" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_that_stand_for_too_much(tmp_path, item):
    text = alias_bomb(item)
    text = text if "<<" not in item else text.replace("[x]", "{x: 1}")
    with pytest.raises(ConfigError, match=r"aliases .* line [78] has more than"):
        load_config(write(tmp_path / "run.yaml", text))
    deep = "".join(f"l{n}: &l{n} {'[' * 90}{f'*l{n - 1}' if n else 'x'}{']' * 90}\n" for n in range(40))
    with pytest.raises(ConfigError, match=r"line 2 .* 100 deep"):
        load_config(write(tmp_path / "run.yaml", deep))
    assert load_config(write(tmp_path / "run.yaml", "a: &a {lr: 1}\nb: {<<: *a, k: 2}\nc: [*a, *a]\n")) == {
        "a": {"lr": 1},
        "b": {"lr": 1, "k": 2},
        "c": [{"lr": 1}, {"lr": 1}],
    }


def test_a_long_value_is_shown_by_its_beginning():
    with pytest.raises(ConfigError, match=r"'policy.steps' is 'x{299}\.\.\.: Input should be") as caught:
        resolve(Master, {"policy": {"steps": "x" * 20_000}})
    assert len(str(caught.value)) < 500


def test_a_folder_in_place_of_a_run_file(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert "limbeck init" in str(caught.value)
    for name in ("config.yaml", "run.yaml"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path)
        assert repr(str(tmp_path / name)) in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml' cannot be read"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("a", "not of the form"),
        ("=1", "not of the form"),
        ("a..b=1", "not of the form"),
        ("n.x=1", "'n' .* 3 "),
        ("l.5=1", "'l' .* 1 .*'5'"),
        ("l.0.x=1", "'l.0' .* 1 "),
        ("a={", "not valid YAML"),
    ],
)
def test_bad_overrides(item, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides({"n": 3, "l": [1]}, [item])


def test_overrides_do_not_write_to_the_input():
    base = {"a": {"b": [1, {"c": 2}]}}
    assert apply_overrides(base, ["a.b.1.c=3"]) == {"a": {"b": [1, {"c": 3}]}}
    assert base == {"a": {"b": [1, {"c": 2}]}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"policy": {"max_grad_nrm": 1}}, r"unknown key 'policy.max_grad_nrm': did you mean 'max_grad_norm'\?"),
        ({"policy": {"optimizer": {"kwarg": {}}}}, r"unknown key 'policy.optimizer.kwarg': did you mean 'kwargs'\?"),
        ({"policy": {}, "teachers": [{}, {"step": 1}]}, r"unknown key 'teachers.1.step': did you mean 'steps'\?"),
        ({"policy": {}, "polcy": {}}, r"unknown key 'polcy': did you mean 'policy'\?"),
        ({"policy": {"zzzz": 1}}, r"unknown key 'policy.zzzz': it is not a key there"),
        ({}, r"key 'policy' is missing"),
        ({"policy": {"steps": 0}}, r"'policy.steps' is 0: .* 1$"),
    ],
)
def test_errors_name_the_path_and_the_near_name(data, message):
    with pytest.raises(ConfigError, match=message):
        resolve(Master, data)


def test_all_errors_are_told_at_once():
    with pytest.raises(ConfigError, match=r"polcy.*policy.*missing|missing.*polcy"):
        resolve(Master, {"polcy": {}})


def test_resolved_config_reads_back():
    model = resolve(Master, {"policy": {"max_grad_norm": 1e-05, "optimizer": {"kwargs": {"lr": 1e-07, "s": "1e5"}}}})
    again = resolve(Master, parse_yaml(dump_yaml(model), "dump"))
    assert again == model


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), plain, max_size=3))
def test_dumped_yaml_reads_back_to_the_same_values(data):
    assert parse_yaml(dump_yaml(data), "dump") == data


@given(st.dictionaries(st.text(), plain, max_size=3), st.dictionaries(st.text(), plain, max_size=3))
def test_merge_keeps_all_keys_and_the_later_one_wins(a, b):
    out = merge(a, b)
    assert set(out) == set(a) | set(b)
    assert all(out[k] == v for k, v in b.items() if not isinstance(v, dict))
    assert merge(a, {}) == a
    assert merge({}, b) == b


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("logger.wandb.api_key", True),
        ("policy.model_overrides.token", True),
        ("teacher.hf_token", True),
        ("a.client_secret", True),
        ("a.headers.Authorization", True),
        ("teacher.server.api_key_env", False),
        ("policy.tokenizer.chat_template_kwargs.pad_token", False),
        ("data.tokens", False),
    ],
)
def test_keys_are_refused_and_not_repeated(tmp_path, path, refused):
    file = tmp_path / "run.yaml"
    file.write_text("x: 1\n")
    if not refused:
        load_config(file, [f"{path}=sk-12345"])
        return
    with pytest.raises(ConfigError, match=f"'{re.escape(path)}' holds a key") as found:
        load_config(file, [f"{path}=sk-12345"])
    assert "sk-12345" not in str(found.value)
    *above, last = path.split(".")
    value = {last: "sk-12345"}
    for name in reversed(above):
        value = {name: [value]}
    file.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=re.escape(f"'{'.0.'.join(path.split('.'))}'")):
        load_config(file)


def _drawn(length: int, seed: int = 3) -> str:
    """Made at run time, so that no scanner takes it for a real key."""
    return "aB3" + "".join(random.Random(seed).choices(string.ascii_letters + string.digits, k=length - 3))


@pytest.mark.parametrize(
    "value",
    [
        f"teacher.tokenizer.chat_template_kwargs.x=sk-proj-{_drawn(40)}",
        f"teacher.tokenizer.chat_template_kwargs.x={_drawn(40)}",
        f"teacher.tokenizer.chat_template_kwargs.deep.er={_drawn(32)}",
        f"teacher.tokenizer.chat_template_kwargs.my_pass={_drawn(12)}",
        f"teacher.server.url=http://host:1/{_drawn(40)}/v1",
        f"teacher.server.url=https://host/sk-{_drawn(30)}/v1",
        f"on_policy.reward.judge.url=https://host/proxy/hf_{_drawn(34)}",
        f"logger.wandb.notes=see hf_{_drawn(34)}",
        f"logger.wandb.tags=[a, ghp_{_drawn(36)}]",
    ],
)
def test_keys_are_known_by_what_they_are(tmp_path, value):
    (tmp_path / "run.yaml").write_text("x: 1\n")
    with pytest.raises(ConfigError) as found:
        load_config(tmp_path / "run.yaml", [value])
    assert value.rpartition("/")[2].rpartition("=")[2] not in str(found.value)
    assert value.partition("=")[0] in str(found.value)


@pytest.mark.parametrize(
    "value",
    [
        "teacher.server.url=http://host:8000/v1",
        "teacher.server.url=https://host/openai/deployments/Qwen2.5-Coder-32B-Instruct-AWQ/v1",
        "teacher.server.url=https://gateway.example/v1/0123456789abcdef0123456789abcdef/name/openai",
        "teacher.server.url=https://host/123e4567-e89b-12d3-a456-426614174000/v1",
        "teacher.tokenizer.chat_template_kwargs.date=26 July 2024",
        "teacher.tokenizer.chat_template_kwargs.system=You are Qwen2, a helpful assistant of Alibaba-Cloud",
        "policy.model_name=org/SmolLM2-135M-Instruct-Finetuned-2025-11-16",
        "logger.log_dir=runs/task-sk-learn-with-a-very-long-name-v12",
        "policy.model_name=/data/AKmodels/a1B2c3d4e5F6g7H8i9J0k1L2m3N4",
    ],
)
def test_names_and_addresses_are_no_keys(tmp_path, value):
    (tmp_path / "run.yaml").write_text("x: 1\n")
    load_config(tmp_path / "run.yaml", [value])


REFERENCES = {
    "policy": {"model_name": "S", "length": 8, "dtensor_cfg": {"tp": 2, "cp": 3}},
    "data": {"length": 5},
}


@pytest.mark.parametrize(
    ("where", "text", "value"),
    [
        ("data.x", "${policy.length}", 8),
        ("data.x", "${.length}", 5),
        ("data.x", "${..policy.length}", 8),
        ("policy.tokenizer.name", "${..model_name}", "S"),
        ("data.x", "${policy.dtensor_cfg}", {"tp": 2, "cp": 3}),
        ("data.x", "a-${policy.model_name}-${policy.length}", "a-S-8"),
        ("policy.div", "${mul:${mul:${.dtensor_cfg.tp}, ${.dtensor_cfg.cp}}, 2}", 12),
        ("policy.div", "${mul:${policy.length},0.5}", 4.0),
        ("data.x", r"\${policy.length}", "${policy.length}"),
        ("data.x", "$HOME {x}", "$HOME {x}"),
    ],
)
def test_references(where, text, value):
    config = apply_overrides(REFERENCES, [])
    section, _, key = where.partition(".")
    node = config[section]
    *inner, last = key.split(".")
    for name in inner:
        node = node.setdefault(name, {})
    node[last] = text
    for part in where.split("."):
        config = resolve_references(config) if part == section else config
        config = config[part]
    assert config == value


def test_a_reference_may_lead_to_another_or_into_a_list_or_to_a_short_form(tmp_path):
    path = write(
        tmp_path / "run.yaml",
        "student: S\nteachers: [{model_name: '${student}'}, {model_name: '${teachers.0.model_name}'}]\n"
        "data: {train: x, mode: '${teachers[1].model_name}'}\n",
    )
    keys = Keys("M", {"M": {"policy": [], "teachers": [], "data": []}})
    found = with_settings(keys, load_config(path), {"policy.model_name": "T"})
    assert found["data"]["mode"] == "T", "an override counts before references are resolved"
    assert [teacher["model_name"] for teacher in found["teachers"]] == ["T", "T"]


@pytest.mark.parametrize(
    "text",
    ["${policy.nothing}", "${oc.env:HOME}", "${mul:2}", "${mul:a,b}", "${data.x}", "${policy.back}", "${data}"],
)
def test_references_that_lead_nowhere_or_round_are_refused(text):
    config = merge(REFERENCES, {"data": {"x": text}, "policy": {"back": "${data.x}"}})
    with pytest.raises(ConfigError) as error:
        resolve_references(config)
    assert text.strip("${}").partition(":")[0].split(",")[0] in str(error.value) or "data.x" in str(error.value)
