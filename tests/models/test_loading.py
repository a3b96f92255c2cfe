import json
import math
import re
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from limbeck.errors import ConfigError
from limbeck.models.causal import body_of
from limbeck.models.loading import check_head, load_model, model_identity
from tests.helpers.tiny import LLAMA, QWEN3


def random_config(arch=LLAMA, **more):
    return {"init": "random", "model_overrides": {**arch, **more}}


def test_random_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    a = load_model(random_config(), vocab_size=50, seed=3)
    before = torch.get_rng_state()
    b = load_model(random_config(), vocab_size=50, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    c = load_model(random_config(), vocab_size=50, seed=4)
    same = [torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert a.lm_head.weight.shape[0] == 50
    assert not a.training


def test_folder_round_trip_and_types(tmp_path):
    model = load_model(random_config(QWEN3), vocab_size=50, seed=3)
    model.save_pretrained(tmp_path)
    again = load_model({"model_name": str(tmp_path)})
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
    half = load_model({"model_name": str(tmp_path)}, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    # the loader's dtype leaves the RoPE buffers alone; converting afterwards would round them
    assert body_of(half).rotary_emb.inv_freq.dtype == torch.float32
    from_config = load_model(
        {"model_name": str(tmp_path), "init": "random", "model_overrides": {"num_hidden_layers": 1}}
    )
    assert len(from_config.model.layers) == 1


def test_identity_follows_weights_and_config_but_not_the_folder(tmp_path):
    model = load_model(random_config(), vocab_size=50, seed=3)
    first = model_identity(model)
    model.save_pretrained(tmp_path / "a")
    assert model_identity(load_model({"model_name": str(tmp_path / "a")})) == first
    assert model_identity(load_model(random_config(), vocab_size=50, seed=4))["config"] == first["config"]
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    changed = model_identity(model)
    assert changed["weights"] != first["weights"]
    other = model_identity(load_model(random_config(rms_norm_eps=1e-4), vocab_size=50, seed=3))
    assert other["config"] != first["config"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_name": "/nowhere/at/all"}, "does not exist"),
        ({"model_name": "missing.gguf"}, "does not exist"),
        ({}, "model_name is missing"),
        ({"init": "random", "model_overrides": {"model_type": "nonsense"}}, "nonsense"),
    ],
)
def test_bad_models(config, message):
    with pytest.raises(ConfigError, match=message):
        load_model(config)


@pytest.mark.parametrize("init", ["pretrained", "random", "drawn"])
def test_a_mistyped_key_of_the_configuration_is_refused(tmp_path, init):
    load_model(random_config(), vocab_size=50).save_pretrained(tmp_path)
    named = {} if init == "drawn" else {"model_name": str(tmp_path)}
    arch = LLAMA if init == "drawn" else {}
    config = {**named, "init": init.replace("drawn", "random"), "model_overrides": {**arch, "num_hiden_layers": 2}}
    with pytest.raises(ConfigError, match=r"'model_overrides\.num_hiden_layers': .*did you mean 'num_hidden_layers'"):
        load_model(config, vocab_size=50)


def test_a_key_of_older_configurations_is_read() -> None:
    model = load_model(random_config(rope_theta=5e3), vocab_size=50)
    assert model.config.rope_parameters["rope_theta"] == 5e3


def test_damaged_folders(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path)) + ".*loaded"):
        load_model({"model_name": str(tmp_path)})
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(ConfigError, match=r"no \.gguf"):
        load_model({"model_name": str(tmp_path / "x.bin")})


def test_weights_that_are_cut_off_or_pickled_are_refused_in_one_line(tmp_path):
    model = load_model(random_config(), vocab_size=50, seed=3)
    model.save_pretrained(tmp_path / "cut")
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    for name in ("cut", "pickled"):
        with pytest.raises(ConfigError, match=f"/{name}.*loaded"):
            load_model({"model_name": str(tmp_path / name)})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": "two"},
        {"rms_norm_eps": []},
        {"num_attention_heads": 0},
        {"hidden_size": -8},
        {"vocab_size": 10**30},
        {"rope_parameters": 3},
        {"model_type": ["llama"]},
    ],
    ids=str,
)
def test_a_configuration_of_other_types_is_one_line(tmp_path, change):
    load_model(random_config(), vocab_size=50, seed=3).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))) as caught:
        load_model({"model_name": str(tmp_path)})
    assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    load_model(random_config(), vocab_size=50, seed=3).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"50 embeddings .*60 ids"):
        load_model({"model_name": str(tmp_path)}, vocab_size=60)


def rewritten(folder, change):
    """A model folder whose tensors ``change`` has edited in place."""
    load_model(random_config(QWEN3), vocab_size=50, seed=3).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return {"model_name": str(folder)}


def stored(folder, arch=LLAMA, **config):
    """A model folder with keys of its configuration written over."""
    load_model(random_config(arch), vocab_size=50, seed=3).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return {"model_name": str(folder)}


def indexed(folder, name):
    """The same with its weights behind an index that calls their file by ``name``."""
    config = stored(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)})
    )
    return config, tensors


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "../w.safetensors", "a/../../w.safetensors", 7, None])
def test_an_index_names_safetensors_of_its_folder_alone(tmp_path, name):
    config, tensors = indexed(tmp_path / "model", name)
    save_file(tensors, tmp_path / "w.safetensors", {"format": "pt"})
    torch.save(tensors, tmp_path / "model" / "w.bin")
    with pytest.raises(ConfigError):
        load_model(config)
    config, tensors = indexed(tmp_path / "model", str(tmp_path / "w.safetensors"))
    with pytest.raises(ConfigError):
        load_model(config)


def test_an_index_of_the_usual_kind_is_followed(tmp_path):
    config, tensors = indexed(tmp_path, "part-1.safetensors")
    save_file(tensors, tmp_path / "part-1.safetensors", {"format": "pt"})
    assert torch.equal(load_model(config).lm_head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("name", ["adapter_model.bin", "../model.safetensors", "x.index.json", 3])
def test_a_configuration_names_no_other_weights(tmp_path, name):
    config = stored(tmp_path / "model", transformers_weights=name)
    load_model(random_config(), vocab_size=50, seed=4).save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "model" / "adapter_model.bin")
    with pytest.raises(ConfigError):
        load_model(config)


def test_an_adapter_in_a_model_folder_is_not_applied(tmp_path):
    config = stored(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"}))
    with pytest.raises(ConfigError):
        load_model(config)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
def test_a_kernel_that_a_configuration_names_is_not_fetched(tmp_path, key):
    config = stored(tmp_path, **{key: "kernels-community/anything"})
    assert load_model(config).config._attn_implementation in ("sdpa", "eager")
    drawn = {**config, "init": "random", "model_overrides": {"num_hidden_layers": 1}}
    assert load_model(drawn).config._attn_implementation in ("sdpa", "eager")
    assert load_model({**config, "attn_implementation": "eager"}).config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 3000},
        {"intermediate_size": 1 << 22},
        {"vocab_size": 1 << 24},
    ],
    ids=str,
)
def test_a_configuration_of_other_sizes_costs_no_memory(tmp_path, change):
    config = stored(tmp_path, **change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError):
        load_model(config)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


def test_a_configuration_without_sizes_costs_no_memory(tmp_path):
    config = stored(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError):
        load_model(config)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_called_so(tmp_path, value):
    config = rewritten(tmp_path, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(value))
    with pytest.raises(ConfigError) as caught:
        check_head(load_model(config), 50)
    assert "not finite" in str(caught.value)


def test_weights_that_do_not_fit_are_named(tmp_path):
    q_proj, norm = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
    lacking = rewritten(tmp_path / "lacking", lambda tensors: tensors.pop(q_proj))
    with pytest.raises(ConfigError, match=rf"1 are missing \({q_proj}\)"):
        load_model(lacking)
    other = rewritten(tmp_path / "other", lambda tensors: tensors.update({norm: torch.ones(31)}))
    with pytest.raises(ConfigError, match=rf"1 have another shape \({norm} \[31\] for \[32\]\)"):
        load_model(other)
    more = rewritten(tmp_path / "more", lambda tensors: tensors.update({"extra.weight": torch.ones(3)}))
    with pytest.raises(ConfigError, match=r"1 are unknown \(extra.weight\)"):
        load_model(more)
    for config in (lacking, other, more):
        assert load_model({**config, "allow_missing": True}).dtype == torch.float32
    # a tied head is not stored, and nothing of it is missing
    assert load_model(rewritten(tmp_path / "whole", lambda tensors: tensors.pop("lm_head.weight", None)))
