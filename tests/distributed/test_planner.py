"""The planner's formulas against counted models, and its choices against common sense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from limbeck.algorithms.config import MasterConfig
from limbeck.cli.plan import plan_command
from limbeck.config import load_config, resolve
from limbeck.distributed.mesh import MeshShape
from limbeck.distributed.planner import (
    GIB,
    Layout,
    Machine,
    ModelShape,
    TeacherMemory,
    Workload,
    fitting,
    layer_activation_bytes,
    layouts,
    memory_of,
    plan,
    seconds_of,
)
from limbeck.errors import ConfigError
from limbeck.tools.workload import shape_of, workload_of
from tests.helpers import runs
from tests.helpers.tiny import LLAMA, QWEN3

ROOT = Path(__file__).parents[2]
ONE_B = ModelShape(1_235_814_400, 16, 2048, 8192, 32, 8, 64, 128_256, tied=True)
FOUR_B = ModelShape(4_022_468_096, 36, 2560, 9728, 32, 8, 128, 151_936, tied=True)
SEVENTY_B = ModelShape(70_553_706_496, 80, 8192, 28_672, 64, 8, 128, 128_256)


def work(student=ONE_B, **more):
    defaults = {"compute_bytes": 2, "sequences_per_step": 512, "microbatch_tokens": 4096}
    return Workload(student, **{**defaults, **more})


def test_parameters_are_counted_exactly(tmp_path):
    config = resolve(MasterConfig, load_config(runs.write_run(tmp_path)))
    for policy, arch, size in ((config.policy, LLAMA, 300), (config.teacher, QWEN3, 340)):
        found = shape_of(policy)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**arch, "vocab_size": size}))
        assert found.parameters == sum(p.numel() for p in model.parameters())
        layer = sum(p.numel() for p in model.model.layers[0].parameters())
        assert found.layer_parameters == pytest.approx(layer, abs=found.hidden)


def test_known_shapes():
    assert ONE_B.layer_parameters == 60_821_632
    assert FOUR_B.layer_parameters == pytest.approx(100.9e6, rel=1e-2)


def test_activations_bound_what_autograd_keeps():
    """The formula against the tensors that a real layer saves for its backward pass."""
    shape = ModelShape(0, 1, 64, 160, 4, 2, 16, 300)
    arch = {**LLAMA, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "vocab_size": 300}
    config = AutoConfig.for_model(**arch, attn_implementation="sdpa")
    layer = AutoModelForCausalLM.from_config(config).model
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(input_ids=torch.arange(128)[None], use_cache=False).last_hidden_state.sum().backward()
    found = sum(kept.values())
    expected = 128 * layer_activation_bytes(shape, 4)
    assert 0.5 * found < expected < 2 * found


def test_one_device_holds_everything():
    parts = memory_of(work(), Layout(MeshShape(), False))
    assert parts["parameters"] == 4 * ONE_B.parameters
    assert parts["gradients"] == 4 * ONE_B.parameters
    assert parts["optimizer"] == 8 * ONE_B.parameters
    # five student blocks of 512 rows x 128,256 float32
    assert parts["head_blocks"] == 5 * 512 * 128_256 * 4


def test_head_and_loss_as_measured():
    """Within a quarter of benchmarks/gpu/results.json: 16,384 rows, head gradient included."""
    measured = json.loads((ROOT / "benchmarks" / "gpu" / "results.json").read_text())["boundary_kl"]
    gradient = 4 * ONE_B.head_parameters
    for kernels, row in ((True, measured), (False, measured["plain_path"])):
        job = work(teachers=(TeacherMemory("live", FOUR_B),), microbatch_tokens=16_384, kernels=kernels)
        found = memory_of(job, Layout(MeshShape(), False))["head_blocks"] + gradient
        assert found / GIB == pytest.approx(row["extra_gib"], rel=0.25)


@given(st.sampled_from([1, 2, 4, 8, 64, 1024]), st.booleans())
def test_layouts_use_every_device_once(devices, live):
    teachers = (TeacherMemory("live", FOUR_B),) if live else ()
    job = work(teachers=teachers)
    alone = memory_of(job, Layout(MeshShape(), False))
    found = layouts(devices)
    assert all(layout.mesh.world == devices for layout in found)
    assert len({layout.name for layout in found}) == len(found)
    for layout in found:
        parts = memory_of(job, layout)
        assert all(value >= 0 for value in parts.values())
        # splitting never costs parameters, gradients or optimizer state, and they add up to the whole
        for name in ("parameters", "gradients", "optimizer"):
            assert parts[name] * layout.mesh.tensor * layout.shards == pytest.approx(alone[name])
        assert all(value >= 0 for value in seconds_of(job, layout, Machine()).values())


def test_a_small_student_stays_whole_and_a_large_one_is_split():
    small = fitting(plan(work(), 8, Machine()))
    assert small is not None
    assert small.layout.mesh == MeshShape(8)
    large = fitting(plan(work(SEVENTY_B, checkpointing=True), 64, Machine()))
    assert large is not None
    assert large.layout.sharded
    assert large.total < 80 * GIB
    assert fitting(plan(work(SEVENTY_B), 1, Machine())) is None


def test_a_cached_teacher_frees_its_memory():
    layout = Layout(MeshShape(8), False)
    live = memory_of(work(teachers=(TeacherMemory("live", FOUR_B),)), layout)
    cached = memory_of(work(teachers=(TeacherMemory("cache", signal_bytes=780),)), layout)
    assert live["teacher_0"] > 2 * FOUR_B.parameters
    assert cached["teacher_0"] == 4096 * 780


def test_split_sequences_keep_gathered_keys():
    two, one = (Layout(MeshShape(context=c), sharded=False) for c in (2, 1))
    more = memory_of(work(), two)["activations"] - memory_of(work(), one)["activations"] / 2
    assert more == 16 * 4096 * 2 * 8 * 64 * 2


def test_unusable_layouts_say_why():
    problems = {e.layout.name: e.problem for e in plan(work(sequences_per_step=4), 16, Machine())}
    assert "4 records per step cannot be dealt to 16" in problems["DP 16"]
    assert "leaves the node of 8" in problems["DP 1 x TP 16"]
    odd = replace(ONE_B, kv_heads=3)
    problems = {e.layout.name: e.problem for e in plan(work(odd), 2, Machine())}
    assert "3 key-value heads cannot be split 2 ways" in problems["DP 1 x TP 2"]


def command():
    app = typer.Typer()
    app.command()(plan_command)
    return app


def test_the_command(tmp_path):
    path = runs.write_run(tmp_path)
    plain = CliRunner().invoke(command(), [str(path), "--gpus", "4", "--memory", "8"])
    assert plain.exit_code == 0, plain.output
    assert "best: DP 4" in plain.output
    assert "policy.dtensor_cfg.tensor_parallel_size=1" in plain.output
    told = CliRunner().invoke(command(), [str(path), "--gpus", "4", "--memory", "8", "--json", "--tokens", "1e9"])
    found = json.loads(told.output)
    assert found["best"] == "DP 4"
    assert found["run"]["device_hours"] == pytest.approx(4 * found["run"]["hours"], abs=0.1)
    assert {"DP 4", "FSDP 4", "DP 2 x TP 2"} <= {row["layout"] for row in found["layouts"]}


def test_no_layout_fits(tmp_path):
    path = runs.write_run(tmp_path)
    big = [
        f"policy.model_overrides.{k}={v}"
        for k, v in {
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }.items()
    ]
    result = CliRunner().invoke(command(), [str(path), *big, "--memory", "24"])
    assert isinstance(result.exception, ConfigError)
    assert "no layout of 1 devices with 24 GiB fits; the nearest, DP 1, needs" in str(result.exception)


def test_a_batch_that_cannot_be_dealt_is_not_blamed_on_memory(tmp_path):
    path = runs.write_run(tmp_path, distillation={"num_prompts_per_step": 5})
    result = CliRunner().invoke(command(), [str(path), "--gpus", "3"])
    assert isinstance(result.exception, ConfigError)
    said = str(result.exception)
    assert "5 records per step cannot be dealt to 3 data-parallel ranks" in said
    assert "distillation.num_prompts_per_step" in said
    assert "GiB" not in said


def test_a_narrow_terminal_gets_a_table_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr("limbeck.cli.plan.console", lambda: Console(width=80))
    result = CliRunner().invoke(command(), [str(runs.write_run(tmp_path)), "--gpus", "4", "--memory", "8"])
    lines = result.output.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  policy")) <= 80
    assert any(line.startswith("│ DP 2 x TP 2 ") for line in lines)
    assert "DP 4 holds, in GiB: " in result.output


def test_run_files_become_workloads(tmp_path):
    lora = {"lora": {"r": 4}, "precision": "bfloat16"}
    cached = {"cache": str(tmp_path / "c"), "cache_k": 64}
    config = resolve(MasterConfig, load_config(runs.write_run(tmp_path, policy=lora, teacher=cached)))
    found = workload_of(config)
    assert found.compute_bytes == 2
    assert found.teachers[0].kind == "cache"
    assert found.teachers[0].signal_bytes == 12 + 64 * 6
    from limbeck.models.policy import Policy

    policy = Policy(config.policy, None, device="cpu")
    assert found.trained == sum(p.numel() for p in policy.model.parameters() if p.requires_grad)


def test_teachers_are_laid_out_too():
    """A teacher that no device holds alone is sharded; one that cannot be split like the student is not."""
    machine = Machine(memory=80 * GIB)
    small = fitting(plan(work(teachers=(TeacherMemory("live", FOUR_B, sharded=False),)), 8, machine))
    assert small is not None
    assert not small.teachers[0].sharded
    tight = plan(work(teachers=(TeacherMemory("live", SEVENTY_B, sharded=False),)), 8, Machine(memory=40 * GIB))
    usable = [e for e in tight if not e.problem]
    assert any(e.teachers[0].sharded for e in usable)
    assert all(e.teachers[0].sharded or e.layout.mesh.tensor >= 4 for e in usable)
    mesh = MeshShape(tensor=8)
    assert TeacherMemory("live", SEVENTY_B).tensor(mesh) == 8
    odd = TeacherMemory("live", replace(FOUR_B, kv_heads=2))
    assert odd.tensor(mesh) == 2
    whole, split = (
        seconds_of(work(teachers=(t,)), Layout(mesh, False), machine) for t in (odd, TeacherMemory("live", FOUR_B))
    )
    assert whole["teachers"] == pytest.approx(4 * split["teachers"])


def test_the_settings_of_a_plan_can_be_run(tmp_path):
    path = runs.write_run(tmp_path)
    found = CliRunner().invoke(command(), [str(path), "--gpus", "2", "--json"])
    assert found.exit_code == 0, found.output
    settings = json.loads(found.output)["settings"]
    assert any(item.startswith("teacher.dtensor_cfg.") for item in settings)
    config = resolve(MasterConfig, load_config(path, settings))
    assert config.teacher.dtensor_cfg.tensor_parallel_size == config.policy.dtensor_cfg.tensor_parallel_size
