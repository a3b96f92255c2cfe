"""transformers' Trainer distils as limbeck's own trainer does: the same losses, steps and checkpoints."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from limbeck.algorithms.dispatch import resolve_run
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.errors import ConfigError
from limbeck.integrations import DistillationTrainer
from limbeck.models.loading import load_model
from limbeck.models.policy import Policy
from limbeck.teachers.live import LiveTeacher
from tests.helpers import tiny

RECORDS = [{"text": text, "idx": i} for i, text in enumerate(tiny.TEXTS)]
# Adam's first step is a sign, whatever the size of a gradient, and that of one that is almost zero is its last bits.
DESCENT = {"optim": "sgd", "learning_rate": 0.5}


def model(name: str, seed: int = 0) -> Any:
    arch, size = (tiny.LLAMA, 300) if name == "student" else (tiny.QWEN3, 340)
    return load_model({"init": "random", "model_overrides": arch}, vocab_size=size, seed=seed)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    plain = {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "data_seed": 1,
        "save_strategy": "no",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
    }
    return TrainingArguments(str(folder), **{**plain, **more})


def trainer(folder: Path, *, student: Any = None, **more: Any) -> DistillationTrainer:
    own = (
        "loss_fn",
        "max_length",
        "eval_dataset",
        "teacher",
        "teacher_tokenizer",
        "append_eos",
        "long_documents",
        "policy.init",
    )
    given = {name: more.pop(name) for name in own if name in more}
    options: dict[str, Any] = {
        "teacher": model("teacher", 1),
        "teacher_tokenizer": tiny.tokenizer(340),
        "loss_fn": {"mode": "boundary_kl"},
        "max_length": 64,
        "append_eos": True,
        "long_documents": "cut",
        "policy.init": "random",
    }
    return DistillationTrainer(
        student or model("student"),
        arguments(folder, **more),
        processing_class=tiny.tokenizer(300),
        train_dataset=RECORDS,
        **{**options, **given},
    )


def losses(made: DistillationTrainer) -> list[float]:
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def own_step(rows: list[int], mode: str) -> tuple[Any, dict[str, Any]]:
    """The same batch in limbeck's own trainer, in one micro-batch."""
    policy = tiny.student(
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": DESCENT["learning_rate"]}},
        train_micro_batch_size=len(rows),
    )
    teacher = LiveTeacher(tiny.teacher())
    found = policy.train(tiny.batch(rows), tiny.loss_fn(mode=mode), teachers=[teacher])
    return policy.model, found


@pytest.mark.parametrize(("mode", "accumulate"), [("boundary_kl", 1), ("boundary_kl", 3), ("tree_kl", 2)])
def test_a_step_is_that_of_the_own_trainer(tmp_path: Path, mode: str, accumulate: int) -> None:
    """However a batch is cut into micro-batches of unequal numbers of tokens."""
    rows = list(range(6))
    made = trainer(
        tmp_path,
        loss_fn={"mode": mode},
        max_steps=1,
        per_device_train_batch_size=6 // accumulate,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=1.0,
        **DESCENT,
    )
    made.train_dataset = [RECORDS[i] for i in rows]
    made.train()
    expected, found = own_step(rows, mode)
    assert losses(made)[0] == pytest.approx(found["loss"], rel=1e-5)
    for name in ("ce_loss", "kl_loss"):
        total, count = found["metrics"][name]
        assert made.state.log_history[0][name] == pytest.approx(total / count, rel=1e-5)
    assert float(made.state.log_history[0]["grad_norm"]) == pytest.approx(found["grad_norm"], rel=1e-4)
    for (name, mine), theirs in zip(made.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_logits_give_what_hidden_states_give(tmp_path: Path) -> None:
    """Where the head lies in shards the model's own logits are used."""
    plain, whole = trainer(tmp_path), trainer(tmp_path)
    whole.is_fsdp_enabled = True
    batch = plain.data_collator(RECORDS[:4])
    values = []
    for made in (plain, whole):
        loss = made.compute_loss(made.model, batch)
        loss.backward()
        values.append((loss.item(), made.model.lm_head.weight.grad.clone()))
    assert values[0][0] == pytest.approx(values[1][0], rel=1e-6)
    torch.testing.assert_close(values[0][1], values[1][1], rtol=1e-4, atol=1e-6)


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Weights, optimizer, order of the data and the running estimate of the loss's scale."""
    loss = {"mode": "boundary_kl", "dynamic_loss_scaling": True}
    more = {"loss_fn": loss, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    whole = trainer(tmp_path / "a", **more)
    whole.train()
    rest = trainer(tmp_path / "b", student=model("student", 7), **more)
    rest.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert losses(rest)[-2:] == pytest.approx(losses(whole)[-2:], rel=1e-6)
    assert int(rest.loss_fn.scale.steps) == 4
    again = trainer(tmp_path / "a", **{**more, "max_steps": 5})
    again.train(resume_from_checkpoint=True)
    assert int(again.loss_fn.scale.steps) == 5


def test_evaluation_in_bits_per_byte(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset=RECORDS[:5], per_device_eval_batch_size=2)
    found = made.evaluate()
    policy = tiny.student()
    own = policy.train(
        tiny.batch(list(range(5))), tiny.loss_fn(), teachers=[LiveTeacher(tiny.teacher())], eval_mode=True
    )
    batch = tiny.batch(list(range(5)))
    bits = own["metrics"]["ce_loss"][0] / torch.log(torch.tensor(2.0)).item() / float(batch["target_bytes"].sum())
    assert found["eval_bpb"] == pytest.approx(bits, rel=1e-5)
    assert found["eval_kl_loss"] > 0
    made.train()
    assert made.evaluate()["eval_loss"] < found["eval_loss"]


def test_adapters_and_a_teacher_of_the_own_kind(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    student = peft.get_peft_model(
        model("student"), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    made = trainer(tmp_path, student=student, teacher=LiveTeacher(tiny.teacher()))
    made.train()
    moved = {n for n, p in student.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_a_student_that_reads_the_teachers_ids(tmp_path: Path) -> None:
    made = trainer(tmp_path, teacher=model("student", 3), teacher_tokenizer=tiny.tokenizer(300))
    made.train()
    assert made.state.log_history[0]["kl_loss"] > 0


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 teachers but 2 teacher_tokenizer"):
        trainer(tmp_path, teacher_tokenizer=[tiny.tokenizer(340)] * 2)
    with pytest.raises(ConfigError, match=r"unknown key 'loss_fn\.mod'"):
        trainer(tmp_path, loss_fn={"mod": "tree_kl"})
    for name, key in (
        ("lr", "policy.optimizer"),
        ("steps", "distillation.max_num_steps"),
        ("num_prompts_per_step", "distillation.num_prompts_per_step"),
        ("log_dir", "logger.log_dir"),
        ("lora", "policy.lora"),
    ):
        with pytest.raises(ConfigError, match=f"'{key}'"):
            DistillationTrainer(
                model("student"), arguments(tmp_path), processing_class=tiny.tokenizer(300), **{name: 1}
            )
    with pytest.raises(ConfigError, match="teacher is a object;"):
        trainer(tmp_path, teacher=object())


def named(folder: Path) -> Path:
    """A teacher as a folder."""
    model("teacher", 1).save_pretrained(folder / "teacher")
    tiny.tokenizer(340).save_pretrained(folder / "teacher")
    return folder / "teacher"


def test_a_teacher_by_its_name_is_the_one_in_memory(tmp_path: Path) -> None:
    """A folder as text, as a path or as a section, with its own tokenizer; and no teacher at all."""
    folder = named(tmp_path)
    made = [
        trainer(tmp_path / "memory"),
        *(
            trainer(tmp_path / "named", teacher=own, teacher_tokenizer=None)
            for own in (str(folder), folder, {"model_name": str(folder)})
        ),
    ]
    batches = [own.data_collator(RECORDS[:4]) for own in made]
    found = [own.compute_loss(own.model, batch).item() for own, batch in zip(made, batches, strict=True)]
    assert found == pytest.approx([found[0]] * 4, rel=1e-6)
    alone = trainer(tmp_path / "alone", teacher=None, teacher_tokenizer=None)
    assert alone.loss_fn.cfg.ce_loss_scale == 1.0
    alone.train()
    assert "kl_loss" not in alone.state.log_history[0]


def test_a_pretrained_student_has_the_loss_that_a_run_gives_it(tmp_path: Path) -> None:
    folder = named(tmp_path)
    made = DistillationTrainer(
        model("student"),
        arguments(tmp_path),
        teacher=folder,
        processing_class=tiny.tokenizer(300),
        max_length=48,
        train_dataset=RECORDS,
    )
    assert (made.loss_fn.cfg.ce_loss_scale, made.loss_fn.cfg.gate) == (1.0, "soft")
    run = {
        "policy": "s",
        "teacher": {"model_name": str(folder), "max_total_sequence_length": 256},  # its positions
        "data": "d.jsonl",
    }
    config, _ = resolve_run(run, {"max_length": 48, "data.mode": "text"})
    assert made.run_config.loss_fn == config.loss_fn
    assert made.run_config.data.model_copy(update={"train": config.data.train}) == config.data
    assert made.run_config.teacher == config.teacher


def test_it_warns_of_texts_that_begin_otherwise_than_a_model_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, torch.Tensor] = {}
    rows = BatchedDataDict({"input_ids": torch.arange(12).reshape(2, 6), "input_lengths": torch.tensor([6, 4])})

    def warn(name: str, scorer: Any, tokenizer: Any) -> str:
        found[name] = scorer.get_logprobs(rows)["logprobs"]
        return f"of {name}"

    monkeypatch.setattr("limbeck.integrations.bos_warning", warn)
    student = model("student")
    own = Policy({"model_name": "m", "precision": "float32"}, None, device="cpu", model=copy.deepcopy(student))
    trainer(tmp_path, student=student, max_steps=1, **{"policy.init": "pretrained"}).train()
    assert "warning: of policy\nwarning: of teacher\n" in capsys.readouterr().err
    for row, length in enumerate((6, 4)):
        expected = own.get_logprobs(rows)["logprobs"][row, :length]
        torch.testing.assert_close(found["policy"][row, :length], expected, rtol=1e-5, atol=1e-6)


def test_its_bos_setting_holds_for_a_tokenizer_that_is_given(tmp_path: Path) -> None:
    given = copy.deepcopy(tiny.tokenizer(300))
    given.bos_token = given.convert_ids_to_tokens(7)
    options = {"teacher": model("teacher", 1), "teacher_tokenizer": tiny.tokenizer(340), "policy.init": "random"}
    made = DistillationTrainer(
        model("student"),
        arguments(tmp_path),
        processing_class=given,
        train_dataset=RECORDS,
        **{**options, "policy.tokenizer.bos": True},
    )
    assert made.processing_class("a").input_ids[0] == 7
    assert given("a").input_ids[0] != 7
    assert made.data_collator(RECORDS[:2])["input_ids"][:, 0].tolist() == [7, 7]


def test_conversations_are_noticed_in_every_form(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    student, teacher = (copy.deepcopy(tiny.tokenizer(size)) for size in (300, 340))  # others share these objects
    student.chat_template = teacher.chat_template = template
    losses_of = []
    for record in (
        {"messages": [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]},
        {"prompt": "the quick", "completion": "brown fox"},
    ):
        made = DistillationTrainer(
            model("student"),
            arguments(tmp_path),
            teacher=model("teacher", 1),
            teacher_tokenizer=teacher,
            processing_class=student,
            max_length=48,
            train_dataset=[record] * 4,
        )
        assert made.run_config.data.mode == "chat"
        losses_of.append(made.compute_loss(made.model, made.data_collator([record] * 2)).item())
    assert losses_of[0] == losses_of[1] > 0


SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.test_integrations import DESCENT, losses, trainer

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
batches = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 2}
made = trainer(folder, **batches, **DESCENT, ddp_backend="gloo")
made.train()
if made.args.process_index == 0:
    model = made.accelerator.unwrap_model(made.model)
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, folder / "weights.safetensors")
    print("losses", *losses(made))
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    time.sleep(1)
# at once: on a busy machine gloo's threads may abort a process whose interpreter is being taken down
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path: Path) -> None:
    """accelerate's DDP averages gradients; the loss is divided by the counts of all processes."""
    root = Path(__file__).parents[1]
    script = tmp_path / "run.py"
    script.write_text(SCRIPT, encoding="utf-8")
    found = []
    for processes, rows in ((1, 2), (2, 1)):
        folder = tmp_path / str(processes)
        folder.mkdir()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        done = subprocess.run(
            [*launcher, str(script), str(folder), str(rows)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = next(line for line in done.stdout.splitlines() if line.startswith("losses"))
        found.append(([float(x) for x in said.split()[1:]], load_file(folder / "weights.safetensors")))
    (alone, weights), (together, others) = found
    assert together == pytest.approx(alone, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=2e-5, msg=name)
