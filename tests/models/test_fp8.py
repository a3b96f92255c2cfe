"""Frozen layers in fp8: how far they may be from float64, what is converted, refused and given way, and what knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.run_folder import differences
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.errors import ConfigError
from limbeck.models.causal import body_of
from limbeck.models.fp8 import LARGEST, Fp8Linear, convert_layers, lacking, quantize_rows, reference_product
from limbeck.models.loading import ModelConfig, check_settings, fit_to_device, load_model
from limbeck.models.policy import Policy
from limbeck.teachers.cache.fill import spec_for
from limbeck.tools.workload import workload_of
from tests.helpers import runs, tiny

CPU = torch.device("cpu")
IDS = torch.arange(24).reshape(2, 12) * 7 % 300
DATA: BatchedDataDict = BatchedDataDict(input_ids=IDS, input_lengths=torch.tensor([12, 9]))


def random(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Numbers of widely different size, as activations have."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen) * torch.exp(spread * torch.randn(*shape, generator=gen))


def rounding(x: Tensor) -> Tensor:
    """How far e4m3 may be from ``x`` with a scale per row: half of the last of four digits, or of the smallest step."""
    scale = x.abs().amax(-1, keepdim=True) / LARGEST
    return torch.maximum(x.abs() / 16, scale * 2.0**-10)


def linear(inside: int, out: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(inside, out, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(random(out, inside, seed=1))
        if bias:
            made.bias.copy_(random(out, seed=2))
    return made.requires_grad_(False)


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_four_digits(dtype: torch.dtype) -> None:
    x = random(7, 33, spread=2.0).to(dtype)
    values, scale = quantize_rows(x)
    exact = x.double()
    assert (values.dtype, scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, torch.float32, (7, 1))
    assert ((values.double() * scale.double() - exact).abs() <= rounding(exact) * (1 + 1e-6)).all()
    assert torch.equal(values.float().abs().amax(-1), torch.full((7,), LARGEST))


def test_rows_without_numbers() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-20, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1.0, -2.0]])
    values, scale = quantize_rows(x)
    back = values.float() * scale
    assert torch.equal(back[0], x[0])
    assert back[1].isfinite().all()
    assert not back[2].isfinite().all()
    assert not back[3].isfinite().all()
    assert torch.equal(back[4], x[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "inside", "out"), [((1,), 16, 16), ((2, 3), 48, 80), ((5, 1, 7), 112, 16), ((0,), 32, 16)]
)
def test_a_product_stays_within_the_rounding_of_its_factors(
    rows: tuple[int, ...], inside: int, out: int, bias: bool, dtype: torch.dtype
) -> None:
    plain = linear(inside, out, bias=bias, dtype=dtype)
    x = random(*rows, inside, seed=3).to(dtype)
    found = Fp8Linear(plain, native=False)(x)
    assert (found.dtype, tuple(found.shape)) == (torch.bfloat16, (*rows, out))
    a, w = x.double(), plain.weight.double()
    a_error, w_error = rounding(a), rounding(w)
    wanted = a @ w.T + (plain.bias.double() if bias else 0)
    allowed = a_error @ w.abs().T + a.abs() @ w_error.T + a_error @ w_error.T
    # and of the result to bfloat16, twice with a bias
    allowed += 2.0**-8 * (2 * allowed + a.abs() @ w.abs().T + 2 * wanted.abs())
    assert ((found.double() - wanted).abs() <= allowed).all()


def test_a_token_does_not_change_its_neighbours() -> None:
    layer = Fp8Linear(linear(48, 32, bias=False), native=False)
    x = random(6, 48)
    other = x.clone()
    other[2] *= 1e4
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(layer(x)[kept], layer(other)[kept])


@pytest.mark.parametrize(("rows", "inside", "out"), [(1, 16, 16), (17, 48, 80), (64, 112, 32)])
def test_the_product_of_the_device_is_the_reference(rows: int, inside: int, out: int) -> None:
    plain, x = linear(inside, out, bias=True), random(rows, inside, seed=3)
    try:
        found = Fp8Linear(plain, native=True)(x)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this torch multiplies no fp8 on the CPU ({error})")
    wanted = Fp8Linear(plain, native=False)(x)
    torch.testing.assert_close(found, wanted, rtol=2.0**-6, atol=2.0**-6 * float(wanted.abs().mean()))


def test_the_reference_multiplies_what_is_stored() -> None:
    (a, a_scale), (b, b_scale) = quantize_rows(random(5, 32)), quantize_rows(random(16, 32, seed=1))
    wanted = (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).T
    found = reference_product(a, a_scale, b, b_scale, torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_layers_compile_as_one_graph() -> None:
    layer = Fp8Linear(linear(32, 16, bias=True), native=False)
    x = random(2, 5, 32)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


# -- models ------------------------------------------------------------------------------------------------------------


def teacher(precision: str = "fp8", **more: Any) -> Policy:
    return tiny.teacher(precision=precision, **more)


def test_the_layers_of_a_teacher_and_nothing_else() -> None:
    few, plain = teacher(), teacher("bfloat16")
    kinds = {
        name: type(module) for name, module in few.model.named_modules() if isinstance(module, (nn.Linear, Fp8Linear))
    }
    assert kinds.pop("lm_head") is nn.Linear
    assert set(kinds.values()) == {Fp8Linear}
    assert len(kinds) == 2 * 7
    assert torch.equal(few.head().weight, plain.head().weight)
    assert (few.precision, few.model.dtype, few.head().weight.dtype) == (torch.bfloat16,) * 3


def test_a_teacher_says_nearly_the_same() -> None:
    # parameters of one type, for random ones may depend on it
    plain, few = teacher("float32"), teacher(param_dtype="float32")
    assert few.model.dtype == torch.float32  # so it runs under autocast
    wanted, found = (policy.get_logprobs(DATA)["logprobs"] for policy in (plain, few))
    assert 0 < float((wanted - found).abs().max()) < 0.02


def test_packed_rows_are_allowed() -> None:
    teacher().allow_packing()


def test_maps_of_other_sizes_stay_as_they_are_and_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    few = teacher(model_overrides=tiny.QWEN3 | {"intermediate_size": 40})
    kinds = {name.split(".")[-1]: type(m) for name, m in few.body.named_modules() if name.endswith("_proj")}
    assert {name for name, kind in kinds.items() if kind is nn.Linear} == {"gate_proj", "up_proj", "down_proj"}
    told = capsys.readouterr().err
    assert told.startswith(
        "(random qwen3): 6 of 14 linear maps stay in bfloat16, for their sizes are no multiples of 16 "
    )
    assert "layers.0.mlp.down_proj" in told
    assert few.get_hidden(DATA).isfinite().all()


def test_a_body_without_linear_maps_is_refused() -> None:
    sizes = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    with pytest.raises(ConfigError, match=r"fp8, .*no.* linear map"):
        teacher(model_overrides=sizes)


def test_a_converted_model_is_taken_as_it_is() -> None:
    first = teacher()
    again = Policy({"precision": "fp8"}, tiny.tokenizer(340), init_optimizer=False, model=first.model)
    assert again.identity() == first.identity()
    found = convert_layers(body_of(first.model), CPU)
    assert (len(found.fp8), found.plain) == (14, [])


def test_a_cache_knows_the_precision() -> None:
    few, plain = teacher(), teacher("bfloat16")
    assert few.identity() == teacher().identity()
    assert few.identity()["weights"] != plain.identity()["weights"]
    assert spec_for(few, k=4).model_identity != spec_for(plain, k=4).model_identity


# -- settings ----------------------------------------------------------------------------------------------------------


def check(*, trained: bool = False, name: str = "teacher_0", **settings: Any) -> None:
    config = {"init": "random", "model_overrides": tiny.LLAMA, "precision": "fp8", **settings}
    check_settings(config, None, name=name, trained=trained)


def test_what_is_trained_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        check(trained=True, name="student")
    assert str(error.value) == (
        "student: precision is fp8, in which only a frozen model computes; set bfloat16, float32 or auto"
    )
    with pytest.raises(ConfigError, match=r"fp8, .*frozen"):
        tiny.student(precision="fp8")


@pytest.mark.parametrize("layout", [{"fsdp": True}, {"tensor_parallel_size": 2}, {"context_parallel_size": 2}])
def test_layers_are_not_split_over_ranks(layout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fp8, and quantised weights"):
        check(dtensor_cfg=layout)


def test_few_bits_of_two_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision is fp8, but quantization is 8bit"):
        check(quantization="8bit")
    model = load_model({"init": "random", "model_overrides": tiny.LLAMA}, vocab_size=300)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ConfigError, match=r"teacher_0: .*fp8.*gptq"):
        check_settings({"model_name": "m", "precision": "fp8"}, None, name="teacher_0", trained=False, model=model)


def fitted_to(device: str) -> tuple[str, list[str]]:
    found, told = fit_to_device(ModelConfig(model_name="m", precision="fp8"), torch.device(device))
    return found.precision, told


def test_a_cpu_computes_in_its_own_precision() -> None:
    assert fitted_to("cpu") == (
        "float32",
        ["float32 in place of fp8, which needs a CUDA device of compute capability 8.9"],
    )


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_device_without_fp8_computes_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert (lacking(torch.device("cuda")) is None) == able
    told = f"bfloat16 in place of fp8, which needs compute capability 8.9, not {capability[0]}.{capability[1]}"
    assert fitted_to("cuda") == (("fp8", []) if able else ("bfloat16", [told]))


def test_a_run_knows_its_teachers_precision(tmp_path: Path) -> None:
    runs.write_tokenizers(tmp_path)
    config = runs.resolved(runs.settings(tmp_path, tmp_path / "run", teacher={"precision": "fp8"}))
    assert workload_of(config).teachers[0].layer_bytes == 1.0
    old, new = config.model_dump(), config.model_dump()
    new["teacher"]["precision"] = "bfloat16"
    assert differences(MasterConfig, old, new) == ["teacher.precision: 'fp8' -> 'bfloat16'"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its device multiplies fp8")
def test_a_run_on_a_cpu_goes_on_after_a_sentence(tmp_path: Path) -> None:
    code, _, told = runs.limbeck("train", runs.write_run(tmp_path, teacher={"precision": "fp8"}))
    assert code == 0
    assert "on the CPU: float32 in place of fp8, which needs a CUDA device of compute capability 8.9\n" in told
