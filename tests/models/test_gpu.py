"""The same step on an accelerator: equal to the CPU in float32, close to it in bfloat16."""

import pytest
import torch

from benchmarks.gpu.loss import synchronisations
from benchmarks.gpu.step import compiled_graphs
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.models.fp8 import lacking, quantize_rows, reference_product, scaled_product
from limbeck.models.policy import Policy
from limbeck.teachers.cache.fill import spec_for, write_cache
from limbeck.teachers.cached import CachedTeacher
from limbeck.teachers.live import LiveTeacher
from limbeck.tokens import ByteVocab
from limbeck.tokens.classes import class_table
from tests.helpers.tiny import QWEN3, batch, config, loss_fn, tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUTS = {
    "fixed": {},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 130, "sequence_length_round": 8}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 140, "sequence_length_round": 8}},
    "checkpointed": {"dtensor_cfg": {"activation_checkpointing": True}},
    "compiled": {"compile": {"enabled": True, "dynamic": True}},
}


def losses(device, steps=3, source=None, **more):
    policy = Policy(config(**more), tokenizer(300), device=device, seed=0)
    if source is None:
        teacher_cfg = config(QWEN3, precision=more.get("precision", "float32"))
        source = LiveTeacher(Policy(teacher_cfg, tokenizer(340), device=device, seed=1, init_optimizer=False))
    return [policy.train(batch(), loss_fn(), teachers=[source])["loss"] for _ in range(steps)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_equals_the_cpu(layout):
    expected = losses("cpu")
    assert losses("cuda", **LAYOUTS[layout]) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_close(layout):
    expected = losses("cpu")
    assert losses("cuda", precision="bfloat16", **LAYOUTS[layout]) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("layout", ["fixed", "packed", "compiled"])
def test_a_teacher_in_fp8_is_close(layout):
    settings = config(QWEN3, precision="fp8", param_dtype="float32", **LAYOUTS[layout])
    teacher = Policy(settings, tokenizer(340), device="cuda", seed=1, init_optimizer=False)
    assert teacher.body.layers[0].mlp.up_proj.native == (lacking(torch.device("cuda")) is None)
    found = losses("cuda", precision="bfloat16", source=LiveTeacher(teacher), **LAYOUTS[layout])
    assert found == pytest.approx(losses("cpu"), rel=3e-2)


@pytest.mark.parametrize(("rows", "inside", "out"), [(1, 16, 16), (17, 48, 80), (300, 576, 1536), (33, 2560, 1040)])
def test_fp8_products_of_the_device_are_the_reference(rows, inside, out):
    if lacking(torch.device("cuda")) is not None:
        pytest.skip("needs a device that multiplies fp8")
    x, w = (torch.randn(n, inside, device="cuda", dtype=torch.bfloat16) for n in (rows, out))
    factors = (*quantize_rows(x), *quantize_rows(w))
    wanted = reference_product(*factors, torch.float32)
    for fast_sums, tolerance in ((False, 2e-2), (True, 4e-2)):
        found = scaled_product(*factors, torch.bfloat16, fast_sums=fast_sums).float()
        assert float((found - wanted).norm() / wanted.norm()) < tolerance


def test_cross_entropy_alone_is_validated_by_class():
    found = {}
    for device in ("cpu", "cuda"):
        policy = Policy(config(), tokenizer(300), device=device, seed=0, init_optimizer=False)
        alone = CrossTokenizerDistillationLossFn({}, projections=[])
        alone.count_by_class(class_table(ByteVocab.from_tokenizer(policy.tokenizer)))
        metrics = policy.train(batch(), alone, teachers=[], eval_mode=True)["metrics"]
        found[device] = {name: float(total) for name, (total, _) in metrics.items() if name.startswith("ce_loss")}
    assert len(found["cpu"]) > 2
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-3)


def test_a_cache_from_the_gpu_serves_the_cpu(tmp_path):
    policy = Policy(config(QWEN3), tokenizer(340), device="cuda", seed=1, init_optimizer=False)
    write_cache(policy, [batch()], tmp_path, spec_for(policy, k=340))
    stored = CachedTeacher(tmp_path)
    expected = losses("cpu")
    assert losses("cpu", source=stored) == pytest.approx(expected, rel=2e-3)
    assert losses("cuda", source=stored) == pytest.approx(expected, rel=2e-3)
    on_cpu = Policy(config(QWEN3), tokenizer(340), device="cpu", seed=1, init_optimizer=False)
    assert on_cpu.identity() == policy.identity()


@pytest.mark.parametrize("layout", ["fixed", "packed"])
@pytest.mark.parametrize("kind", ["live", "cached"])
def test_a_step_waits_for_the_device_once(layout, kind, tmp_path):
    narrow = {"precision": "bfloat16"}
    policy = Policy(config(**LAYOUTS[layout], **narrow), tokenizer(300), device="cuda", seed=0)
    taught = Policy(
        config(QWEN3, **narrow, **LAYOUTS[layout]), tokenizer(340), device="cuda", seed=1, init_optimizer=False
    )
    source = LiveTeacher(taught)
    if kind == "cached":
        write_cache(taught, [batch()], tmp_path, spec_for(taught, k=16))
        source = CachedTeacher(tmp_path)
    loss = loss_fn()
    for _ in range(2):
        policy.train(batch(), loss, teachers=[source], mbs=2)
    assert synchronisations(lambda: policy.train(batch(), loss, teachers=[source], mbs=2)) == 1


def test_one_graph_serves_micro_batches_of_any_length():
    """The compiler likes to choose kernels by the number of tokens, and to choose anew where that changes."""
    wide = {"hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 1}
    settings = config(precision="bfloat16", **LAYOUTS["compiled"])
    settings["model_overrides"] = {**settings["model_overrides"], **wide, "max_position_embeddings": 8192}
    policy = Policy(settings, tokenizer(300), device="cuda", seed=0)
    alone = CrossTokenizerDistillationLossFn({}, projections=[])
    made = []
    for length in (8192, 6144, 512, 24):
        ids = torch.randint(0, 300, (1, length))
        rows = {"input_ids": ids, "input_lengths": torch.tensor([length]), "token_mask": torch.ones_like(ids)}
        policy.train(BatchedDataDict(**rows, sample_mask=torch.ones(1), idx=[0]), alone)
        made.append(compiled_graphs())
    assert made == made[:1] * len(made)
