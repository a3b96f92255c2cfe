import math

import pytest
import torch

from limbeck.errors import CheckpointError, ConfigError, LossError
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.contract import Teacher
from limbeck.models.language_model import ANY_NUMBER_OF_ROWS, compiler_options
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.teachers.live import LiveTeacher
from limbeck.utils.timer import Timer
from tests.helpers.tiny import LLAMA, QWEN3, batch, config, gradients, loss_fn, student, teacher, tokenizer


def step_gradients(policy, data, loss, teachers, **kwargs):
    """(result, gradients) of one step, taken just before the optimizer moves."""
    found = {}
    real = policy.optimizer.step

    def spy(*args, **kw):
        found.update(gradients(policy))
        return real(*args, **kw)

    policy.optimizer.step = spy
    result = policy.train(data, loss, teachers=teachers, **kwargs)
    return result, found


def plain_gradients(policy, teacher_policy, data, loss):
    """The same step by hand: full logits, the loss's published form, no micro-batches, no blocks."""
    mask = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    logits = policy.model(input_ids=data["input_ids"], attention_mask=mask, use_cache=False).logits
    t_mask = torch.arange(data["teacher_input_ids"].shape[1]) < data["teacher_input_lengths"][:, None]
    with torch.no_grad():
        t_logits = teacher_policy.model(
            input_ids=data["teacher_input_ids"], attention_mask=t_mask, use_cache=False
        ).logits
    value, _ = loss(data, None, None, logits, t_logits)
    value.backward()
    return value.detach(), gradients(policy)


LAYOUTS = {
    "one": {"train_micro_batch_size": 1},
    "four": {"train_micro_batch_size": 4},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 130, "sequence_length_round": 4}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 140, "sequence_length_round": 8}},
    "checkpointed": {"dtensor_cfg": {"activation_checkpointing": True}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_loss_and_gradients_of_the_plain_computation(layout):
    data = batch()
    taught = teacher()
    reference = student(max_grad_norm=None)
    value, expected = plain_gradients(reference, taught, data, loss_fn())
    policy = student(max_grad_norm=None, **LAYOUTS[layout])
    result, found = step_gradients(policy, data, loss_fn(), [LiveTeacher(taught)])
    assert result["loss"] == pytest.approx(float(value), rel=1e-6)
    assert set(found) == set(expected)
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-4, atol=1e-5 * scale), name
    norm = math.sqrt(sum(float((g**2).sum()) for g in expected.values()))
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_self_distillation_has_no_loss_and_no_gradient():
    data = batch(cross=False)
    policy = student(max_grad_norm=None)
    frozen = Policy(config(), tokenizer(300), device="cpu", seed=0, init_optimizer=False)
    result, found = step_gradients(policy, data, loss_fn(cross=False, ce_loss_scale=0.0), [LiveTeacher(frozen)])
    assert abs(result["loss"]) < 1e-6
    assert all(float(g.abs().max()) < 1e-7 for g in found.values())
    other = Policy(config(), tokenizer(300), device="cpu", seed=1, init_optimizer=False)
    result, _ = step_gradients(student(), data, loss_fn(cross=False, ce_loss_scale=0.0), [LiveTeacher(other)])
    assert result["loss"] > 1e-4


def test_training_learns_and_is_the_same_twice():
    def run():
        policy, taught, loss = student(), LiveTeacher(teacher()), loss_fn()
        return [policy.train(batch(), loss, teachers=[taught])["loss"] for _ in range(6)], policy

    first, a = run()
    second, b = run()
    assert first == second
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert first[-1] < first[0] - 0.5


def test_eval_mode_changes_nothing_and_agrees_with_training():
    policy, taught, loss = student(), LiveTeacher(teacher()), loss_fn()
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    evaluated = policy.train(batch(), loss, teachers=[taught], eval_mode=True)
    assert evaluated["grad_norm"] is None
    assert policy.steps == 0
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())
    assert all(p.grad is None for p in policy.model.parameters())
    trained = policy.train(batch(), loss, teachers=[taught])
    assert trained["loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
    assert trained["metrics"]["ce_loss"] == pytest.approx(evaluated["metrics"]["ce_loss"])


def test_several_global_batches_take_several_steps():
    policy, taught, loss = student(), LiveTeacher(teacher()), loss_fn()
    result = policy.train(batch(), loss, teachers=[taught], gbs=4)
    assert policy.steps == 2
    assert result["tokens"] == int(batch()["input_lengths"].sum())
    twin = student()
    for rows in ([0, 1, 2, 3], [4, 5]):
        twin.train(batch(rows), loss_fn(), teachers=[LiveTeacher(teacher())])
    for x, y in zip(policy.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_clipping_and_schedule():
    schedule = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}}
    policy = student(max_grad_norm=1e-3, scheduler=schedule)
    _, found = step_gradients(policy, batch(), loss_fn(), [LiveTeacher(teacher())])
    norm = math.sqrt(sum(float((g**2).sum()) for g in found.values()))
    assert norm == pytest.approx(1e-3, rel=1e-3)
    rates = [policy.train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())])["lr"] for _ in range(2)]
    assert rates == pytest.approx([0.0075, 0.01])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_value_that_is_no_number_stops_before_the_step(where):
    policy = student()
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    loss = loss_fn()
    if where == "loss":
        real = loss.compute_loss

        def broken(*args):
            value, metrics = real(*args)
            return value * float("nan"), metrics

        loss.compute_loss = broken
    else:
        policy.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(LossError, match=rf"{where} .*samples \[0, 1"):
        policy.train(batch(), loss, teachers=[LiveTeacher(teacher())])
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())
    assert policy.steps == 0
    assert not policy.optimizer.state


def test_nan_weights_are_named():
    policy = student()
    with torch.no_grad():
        policy.model.lm_head.weight[3] = float("nan")
    with pytest.raises(LossError, match=r"student: row \d+ .*nan at column 3"):
        policy.train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())])


def test_scores_match_the_full_model():
    policy, data = student(), batch()
    mask = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    with torch.no_grad():
        logits = policy.model(input_ids=data["input_ids"], attention_mask=mask).logits
    logp = logits.log_softmax(-1)
    expected = torch.zeros(data["input_ids"].shape)
    expected[:, 1:] = logp[:, :-1].gather(2, data["input_ids"][:, 1:, None])[..., 0]
    got = policy.get_logprobs(data)["logprobs"]
    assert torch.allclose(got, expected * mask, atol=1e-5)
    assert bool((got[:, 0] == 0).all())
    top = policy.get_topk_logits(data, 5)
    values, ids = logits.topk(5, -1)
    assert torch.allclose(top["topk_logits"][mask], values[mask], atol=1e-5)
    assert torch.equal(top["topk_indices"][mask], ids[mask])
    assert bool((top["topk_logits"][~mask] == 0).all())
    hidden = policy.get_hidden(data)
    with torch.no_grad():
        assert torch.allclose(policy.model.lm_head(hidden)[mask], logits[mask], atol=1e-5)


@pytest.mark.parametrize("layout", ["dynamic", "packed"])
def test_scores_do_not_depend_on_the_layout(layout):
    data = batch()
    plain, other = teacher(), teacher(**LAYOUTS[layout])
    assert torch.allclose(plain.get_logprobs(data)["logprobs"], other.get_logprobs(data)["logprobs"], atol=1e-5)
    assert torch.allclose(
        plain.get_topk_logits(data, 3, prefix="teacher_")["topk_logits"],
        other.get_topk_logits(data, 3, prefix="teacher_")["topk_logits"],
        atol=1e-5,
    )


ADAPTERS = {"r": 4, "dropout": 0.1}


@pytest.mark.parametrize(
    ("arch", "lora"),
    [
        pytest.param(LLAMA, None, id="llama-full"),
        pytest.param(QWEN3, ADAPTERS, id="qwen3-lora"),
        pytest.param(LLAMA, ADAPTERS, id="llama-lora", marks=pytest.mark.slow),
        pytest.param(QWEN3, None, id="qwen3-full", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_policy_ends_with_the_same_bits(tmp_path, arch, lora):
    """dropout in the adapters: the random state must resume too."""
    from limbeck.utils import capture_rng, restore_rng, seed_everything

    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 99}},
        {"milestones": [3]},
    ]
    cfg = config(arch, scheduler=schedule, lora=lora)
    taught, loss = LiveTeacher(teacher()), loss_fn()
    seed_everything(7)
    policy = Policy(cfg, tokenizer(300), device="cpu", seed=0)
    for _ in range(3):
        policy.train(batch(), loss, teachers=[taught])
    policy.save_checkpoint(tmp_path / "weights", tmp_path / "train_state")
    rng = capture_rng()
    tail = [policy.train(batch([0, 2, 4]), loss, teachers=[taught])["loss"] for _ in range(3)]

    seed_everything(8)
    again = Policy(
        cfg,
        tokenizer(300),
        device="cpu",
        seed=0,
        weights_path=tmp_path / "weights",
        optimizer_path=tmp_path / "train_state",
    )
    assert again.steps == 3
    restore_rng(rng)
    assert [again.train(batch([0, 2, 4]), loss, teachers=[taught])["loss"] for _ in range(3)] == tail
    for (name, x), y in zip(policy.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_checkpoints_load_with_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = student()
    policy.train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())])
    policy.save_checkpoint(tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), policy.model.parameters(), strict=True))
    tok = AutoTokenizer.from_pretrained(tmp_path / "weights")
    assert tok("the dog")["input_ids"] == tokenizer(300)("the dog")["input_ids"]


def test_a_foreign_train_state_is_refused(tmp_path):
    student(lora={"r": 2}).save_checkpoint(tmp_path / "w", tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"/s' .*adapters"):
        Policy(config(), tokenizer(300), device="cpu", optimizer_path=tmp_path / "s")
    Policy(config(), tokenizer(300), device="cpu").save_checkpoint(tmp_path / "w2", tmp_path / "s2")
    small = config({**LLAMA, "num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"/s2' .*fit"):
        Policy(small, tokenizer(300), device="cpu", optimizer_path=tmp_path / "s2")


def test_lora_trains_adapters_only_and_exports_merged_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    policy = student(lora={"r": 4, "target_modules": ["q_proj", "down_proj"]})
    base = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert 0 < sum(p.numel() for p in policy.model.parameters() if p.requires_grad) < 3000
    for _ in range(3):
        policy.train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())])
    policy.save_checkpoint(tmp_path)
    params = dict(policy.model.named_parameters())
    assert all(torch.equal(params[n], p) for n, p in base.items())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain).__name__ == "LlamaForCausalLM"
    ids = batch()["input_ids"][:2]
    with torch.no_grad():
        expected = policy.model(input_ids=ids).logits
        assert torch.allclose(plain(input_ids=ids).logits, expected, atol=1e-5)
        untouched = student().model(input_ids=ids).logits
    assert not torch.allclose(expected, untouched, atol=1e-3)
    # exporting again gives the same bits: the first export changed nothing
    policy.save_checkpoint(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), again.parameters(), strict=True))


def test_bf16_parameters_and_bf16_over_fp32(tmp_path):
    taught = LiveTeacher(teacher(precision="bfloat16"))
    assert taught.policy.model.dtype == torch.bfloat16
    exact = student().train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())])["loss"]
    mixed = student(precision="bfloat16")
    assert mixed.model.dtype == torch.float32
    first = mixed.train(batch(), loss_fn(), teachers=[taught])["loss"]
    assert first == pytest.approx(exact, rel=2e-2)
    assert first != exact
    last = [mixed.train(batch(), loss_fn(), teachers=[taught])["loss"] for _ in range(4)][-1]
    assert last < first - 0.3
    pure = student(precision="bfloat16", param_dtype="bfloat16")
    assert pure.model.dtype == torch.bfloat16
    assert pure.train(batch(), loss_fn(), teachers=[taught])["loss"] == pytest.approx(exact, rel=3e-2)


def test_the_timer_sees_every_part():
    timer = Timer()
    student().train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())], timer=timer)
    assert set(timer.get_timing_metrics()) == {"teacher", "forward", "layout", "loss", "backward", "optimizer", "wait"}


@pytest.mark.parametrize(
    ("more", "value"),
    [
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, "tensor_parallel_size.* 1 process "),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "context_parallel_size.* 1 process "),
        ({"dtensor_cfg": {"cpu_offload": True}}, r"dtensor_cfg\.cpu_offload"),
        ({"precision": "float16"}, "float16"),
    ],
)
def test_what_cannot_be_done_is_refused(more, value):
    with pytest.raises(ConfigError, match=value):
        student(**more)


def test_frozen_policies_do_not_train():
    with pytest.raises(ConfigError, match="init_optimizer=False"):
        teacher().train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())])


def test_a_model_with_more_than_a_linear_head_is_refused():
    from limbeck.models.loading import load_model

    model = load_model(PolicyConfig(**config()), vocab_size=300, seed=0)
    real = model.lm_head.forward
    model.lm_head.forward = lambda x: real(x) * 2 + 1
    model.register_forward_hook(lambda m, a, k, out: out.__setitem__("logits", out.logits * 3), with_kwargs=True)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .*linear head"):
        Policy(config(), tokenizer(300), device="cpu", model=model)


def test_dynamic_scaling_is_one_ratio_per_step():
    settings = {"dynamic_loss_scaling": True}
    losses = {}
    for mbs in (1, 3):
        policy, loss = student(), loss_fn(**settings)
        losses[mbs] = [policy.train(batch(), loss, teachers=[LiveTeacher(teacher())], mbs=mbs) for _ in range(2)]
    for a, b in zip(losses[1], losses[3], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_compiled_body_gives_the_same_loss():
    plain = student().train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())], eval_mode=True)["loss"]
    policy = student()
    policy.body.compile(backend="eager")
    assert policy.train(batch(), loss_fn(), teachers=[LiveTeacher(teacher())], eval_mode=True)["loss"] == plain
    assert not any("_orig_mod" in n for n, _ in policy.model.named_parameters())


def test_layers_are_compiled_for_any_number_of_tokens():
    assert compiler_options(None, None) == {ANY_NUMBER_OF_ROWS: True}
    tuned = compiler_options("max-autotune-no-cudagraphs", True)
    assert tuned["max_autotune"]
    assert tuned[ANY_NUMBER_OF_ROWS]


def test_without_teachers_it_is_cross_entropy():
    loss = CrossTokenizerDistillationLossFn({}, projections=[])
    data = batch()
    policy = student()
    with torch.no_grad():
        logits = policy.model(input_ids=data["input_ids"]).logits[:, :-1]
    mask = data["token_mask"][:, 1:].bool()
    expected = torch.nn.functional.cross_entropy(logits[mask], data["input_ids"][:, 1:][mask])
    assert policy.train(data, loss)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_checks_are_read_together_and_explained():
    """A bad row in the second micro-batch: found when the step is read, told as if it had been found at once."""
    policy, source = student(), LiveTeacher(teacher())
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    asked = []

    class Broken(Teacher):
        on_device, vocab_size = True, source.vocab_size

        def signal(self, mb, device):
            signal = source.signal(mb, device)
            asked.append(mb.data_dict["idx"])
            if 3 in mb.data_dict["idx"]:
                signal.hidden[signal.row_start_B[1] + 2] = torch.nan
            return signal

        def log_probs(self, batch):
            return source.log_probs(batch)

    with pytest.raises(LossError, match=r"teacher_0: row \d+ has a non-finite score"):
        policy.train(batch(), loss_fn(), teachers=[Broken()], mbs=2)
    assert asked == [[0, 1], [2, 3], [4, 5], [2, 3]]
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert all(p.grad is None for p in policy.model.parameters())
