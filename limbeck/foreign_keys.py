"""Keys of NeMo RL's and TRL's configurations, and what they are in a run file.

One table for each, which ``limbeck init --from``, the refusal of an unknown key and docs/configuration.md share. A key
that is the same here, and means the same, is not listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Foreign:
    """Counterpart here of another library's key.

    Attributes:
        here: the key of a run file; None where there is none.
        note: what differs, or what to do instead.
    """

    here: str | None
    note: str = ""

    def said(self, library: str) -> str:
        """Sentence of the refusal of the key."""
        if self.here is None:
            return f"a key of {library} without a counterpart here: {self.note}"
        return f"a key of {library}, here {self.here!r}" + (f": {self.note}" if self.note else "")


_UNUSED = "nothing to set here"
_NOT_TRAINED = "a teacher is not trained"
_FORMAT = "weights are always a transformers folder of safetensors"
_V6 = "loss_fn.mode: tree_kl has the same aim, partition the arithmetic of a published draft"

NEMO_RL: dict[str, Foreign] = {
    "distillation.num_generations_per_prompt": Foreign("on_policy.samples_per_prompt", "on-policy runs alone"),
    "distillation.max_rollout_turns": Foreign(None, "with tools: on_policy.environment.max_turns"),
    "distillation.max_val_samples": Foreign(None, "give fewer records in data.validation, or data.holdout"),
    "distillation.topk_logits_k": Foreign("loss_fn.topk", "for a teacher with the student's tokenizer"),
    "loss_fn.projection_matrix_path": Foreign(
        "loss_fn.projection_matrix_path",
        "not needed, a projection is made from the tokenizers; a published .pt is read by limbeck project --student S "
        "--teacher T --convert FILE.pt -o W.safetensors",
    ),
    "loss_fn.projection_matrix_paths": Foreign("loss_fn.projection_matrix_path", "a list; see above"),
    "loss_fn.kd_loss_mode": Foreign("loss_fn.teacher_combination", "the same words"),
    "loss_fn.sum_weights_metric": Foreign("loss_fn.teacher_scoring", "the same words; null is static"),
    "loss_fn.alpha": Foreign("loss_fn.scoring_alpha"),
    "loss_fn.teacher_vocab_sizes": Foreign("loss_fn.teacher_vocab_size", "by the teachers' heads unless given"),
    "loss_fn.normalize_teacher_by_vocab": Foreign(None, "set loss_fn.teacher_weights"),
    "loss_fn.token_level_weights": Foreign(None, "teachers are weighted per text"),
    "loss_fn.prefix_bidir_v3_jsd_beta": Foreign("loss_fn.jsd_beta", "with direction: jsd"),
    "loss_fn.prefix_bidir_v3_loss_fn": Foreign("loss_fn.direction", "kl: forward, jsd: jsd; no bce"),
    "loss_fn.prefix_bidir_*": Foreign(None, _V6),
    "loss_fn.common_indices_from_subtoks": Foreign(None, _V6),
    "loss_fn.kl_chunk_shift": Foreign(None, "every chunk is predicted from the token before it"),
    "loss_fn.teacher_topk_ipc_*": Foreign(None, "hidden states are kept, not logits; teacher.cache stores lists"),
    "loss_fn.loss_type": Foreign("loss_fn.mode", "other words: limbeck docs losses"),
    "loss_fn.project_teacher_to_student": Foreign(None, _UNUSED),
    "loss_fn.kl_type": Foreign("loss_fn.direction", "forward, reverse; mixed: jsd is the nearest"),
    "loss_fn.mixed_kl_weight": Foreign("loss_fn.jsd_beta", "of the JSD, which is another mixture"),
    "loss_fn.zero_outside_topk": Foreign(None, "loss_fn.topk keeps the rest as one bucket"),
    "teacher.aligner": Foreign(
        None,
        "texts are aligned by bytes, without settings; its projection_matrix_path is loss_fn.projection_matrix_path",
    ),
    "teacher.aligner.projection_matrix_path": Foreign("loss_fn.projection_matrix_path", "as loss_fn's; a list"),
    "teacher.projection_matrix_path": Foreign("loss_fn.projection_matrix_path", "as loss_fn's; a list"),
    "teacher.weight": Foreign("loss_fn.teacher_weights", "a list; with one teacher loss_fn.kl_loss_weight"),
    "teacher.gold_loss": Foreign("loss_fn.gold_loss", "for all teachers; for one: teachers[i].loss_fn"),
    "teacher.xtoken_loss": Foreign("loss_fn.xtoken_loss", "for all teachers; for one: teachers[i].loss_fn"),
    "teacher.send_full_logits": Foreign(None, "a live teacher's whole distributions are compared"),
    "teacher.optimizer": Foreign(None, _NOT_TRAINED),
    "teacher.scheduler": Foreign(None, _NOT_TRAINED),
    "teacher.max_grad_norm": Foreign(None, _NOT_TRAINED),
    "teacher.train_global_batch_size": Foreign(None, _NOT_TRAINED),
    "teacher.train_micro_batch_size": Foreign(None, _NOT_TRAINED),
    "policy.generation": Foreign("on_policy", "limbeck docs on_policy"),
    "policy.generation_batch_size": Foreign("on_policy.batch_size"),
    "policy.megatron_cfg": Foreign(None, "torch's DTensor is the one back end"),
    "policy.logprob_chunk_size": Foreign("loss_fn.block_rows", "heads are always applied in blocks of rows"),
    "policy.offload_optimizer_for_logprob": Foreign(None, _UNUSED),
    "policy.dtensor_cfg.enabled": Foreign("policy.dtensor_cfg.enabled", "false changes nothing for one process"),
    "policy.dtensor_cfg._v2": Foreign(None, _UNUSED),
    "policy.dtensor_cfg.custom_parallel_plan": Foreign(None, "the plan is the model's own"),
    "policy.dtensor_cfg.model_save_format": Foreign(None, _FORMAT),
    "policy.dtensor_cfg.save_consolidated": Foreign(None, _FORMAT),
    "policy.dtensor_cfg.single_rank_consolidation": Foreign(None, _FORMAT),
    "policy.dtensor_cfg.consolidation_timeout_minutes": Foreign(None, _FORMAT),
    "policy.sequence_packing.algorithm": Foreign("policy.sequence_packing.algorithm", "one algorithm for all names"),
    "policy.sequence_packing.microbatch_order": Foreign(None, "the loss does not depend on the order"),
    "data.train": Foreign("data.train", "files, globs or hf:owner/name; a section's data_files or dataset_name"),
    "data.train.data_files": Foreign("data.train"),
    "data.train.data_path": Foreign("data.train"),
    "data.train.dataset_name": Foreign("data.train", "hf:owner/name; arrow_text is a reader, not a data set"),
    "data.train.subset": Foreign("data.hub_subset"),
    "data.train.split": Foreign("data.hub_split", "of data on the hub"),
    "data.train.text_key": Foreign("data.text_key"),
    "data.train.chat_key": Foreign("data.messages_key"),
    "data.train.tool_key": Foreign("data.tools_key"),
    "data.train.characters_per_sample": Foreign(
        "data.join_to_bytes", "near: neighbouring documents become one record, and stay separate rows"
    ),
    "data.train.*": Foreign(None, "records are read as they are: limbeck docs data"),
    "data.validation.data_files": Foreign("data.validation"),
    "data.validation.data_path": Foreign("data.validation"),
    "data.validation.dataset_name": Foreign("data.validation"),
    "data.validation.split": Foreign("data.hub_validation_split", "of data on the hub"),
    "data.validation.*": Foreign(None, "read as data.train is"),
    "data.default": Foreign(None, "records are read as they are: limbeck docs data"),
    "data.collator_mode": Foreign("data.mode"),
    "data.include_thinking_in_loss": Foreign(None, "reasoning is learnt where the chat template keeps it"),
    "data.native_thinking_alignment": Foreign(None, "messages are aligned part by part, by role"),
    "data.kd_alignment_regions": Foreign(None, "all that an assistant writes is compared"),
    "data.num_packed_rows": Foreign("policy.sequence_packing.enabled", "packing is not a setting of the data"),
    "data.arrow_files": Foreign("data.train"),
    "data.dataset_name": Foreign("data.train", "hf:owner/name; arrow_text is a reader, not a data set"),
    "data.use_multiple_dataloader": Foreign(None, "one loader reads all files"),
    "data.prompt_file": Foreign(None, "records are read as they are: limbeck docs data"),
    "token_aligner": Foreign(
        None,
        "texts are aligned by bytes, without settings; its projection_matrix_path is loss_fn.projection_matrix_path",
    ),
    "eval": Foreign(None, "data.validation and distillation.val_period; tasks: limbeck docs evaluate"),
    "distillation.use_ipc": Foreign(None, _UNUSED),
    "distillation.loss_on_all_tokens": Foreign(None, "of text every token is learnt, of a conversation the answers"),
    "env": Foreign(None, "tools: on_policy.environment; rewards: on_policy.reward"),
    "logger.num_val_samples_to_print": Foreign("distillation.samples.number"),
    "logger.swanlab*": Foreign(None, "logger.wandb_enabled, trackio_enabled and tensorboard_enabled are there"),
    "logger.mlflow*": Foreign(None, "logger.wandb_enabled, trackio_enabled and tensorboard_enabled are there"),
    "logger.tensorboard": Foreign(None, "event files lie in the run folder"),
    "logger.gpu_monitoring": Foreign("logger.monitor_gpus", "memory is logged after every step"),
    "logger.monitor_gpus": Foreign("logger.monitor_gpus", "memory alone, and timed parts wait for the GPU"),
    "logger.log_dir": Foreign("logger.log_dir", "the run folder: checkpoints, metrics, report"),
    "checkpointing.checkpoint_dir": Foreign(
        "checkpointing.checkpoint_dir", "by default checkpoints lie in the run folder, where the commands look"
    ),
    "checkpointing.save_optimizer": Foreign(None, "a checkpoint always holds the optimizer"),
    "checkpointing.model_save_format": Foreign(None, _FORMAT),
    "checkpointing.save_consolidated": Foreign(None, _FORMAT),
    "cluster.gpus_per_node": Foreign(
        "cluster.gpus_per_node",
        "starts nothing: torchrun --nproc-per-node N -m limbeck train, or cluster.launcher: ray",
    ),
    "cluster.num_nodes": Foreign("cluster.num_nodes", "starts nothing without cluster.launcher: ray"),
    "cluster.master_port_range_*": Foreign(None, "torchrun or Ray choose ports"),
    "cluster.segment_size": Foreign(None, _UNUSED),
}
"""Key of NeMo RL (a pattern; ``teacher.`` for ``teachers.N.`` as well) -> what it is here. What a policy has, a teacher
has, too. A section without a row for a key below it stands for the key."""

_HUB = "limbeck export RUN -o FOLDER --push OWNER/NAME"
_VLLM = "on_policy.engine: limbeck docs on_policy"

TRL: dict[str, Foreign] = {
    "model_name_or_path": Foreign("policy.model_name"),
    "model": Foreign("policy.model_name"),
    "student_model_revision": Foreign("policy.model_name", "owner/name@revision"),
    "model_revision": Foreign("policy.model_name", "owner/name@revision"),
    "model_init_kwargs": Foreign("policy.model_overrides", "of the model's configuration alone"),
    "teacher_model_name_or_path": Foreign("teacher.model_name"),
    "teacher_tokenizer_name_or_path": Foreign("teacher.tokenizer.name", "the teacher's own unless given"),
    "teacher_model_init_kwargs": Foreign("teacher.model_overrides", "of the model's configuration alone"),
    "chat_template_path": Foreign("policy.tokenizer.chat_template"),
    "attn_implementation": Foreign("policy.attn_implementation"),
    "trust_remote_code": Foreign("policy.trust_remote_code"),
    "torch_dtype": Foreign("policy.precision"),
    "dtype": Foreign("policy.precision"),
    "bf16": Foreign("policy.precision"),
    "fp16": Foreign("policy.precision"),
    "load_in_4bit": Foreign(None, "students are trained unquantised; teacher.quantization: 4bit or 8bit"),
    "load_in_8bit": Foreign(None, "students are trained unquantised; teacher.quantization: 4bit or 8bit"),
    "use_peft": Foreign("policy.lora.enabled"),
    "lora_r": Foreign("policy.lora.r"),
    "lora_alpha": Foreign("policy.lora.alpha"),
    "lora_dropout": Foreign("policy.lora.dropout"),
    "lora_target_modules": Foreign("policy.lora.target_modules"),
    "lora_modules_to_save": Foreign("policy.lora.modules_to_save"),
    "use_rslora": Foreign("policy.lora.use_rslora"),
    "learning_rate": Foreign("policy.optimizer.kwargs.lr", "GOLD's default is 1e-7, GKD's 2e-5"),
    "weight_decay": Foreign("policy.optimizer.kwargs.weight_decay"),
    "adam_beta1": Foreign("policy.optimizer.kwargs.betas"),
    "adam_beta2": Foreign("policy.optimizer.kwargs.betas"),
    "adam_epsilon": Foreign("policy.optimizer.kwargs.eps"),
    "optim": Foreign("policy.optimizer.name"),
    "max_grad_norm": Foreign("policy.max_grad_norm"),
    "lr_scheduler_type": Foreign("policy.scheduler", "constant, linear, cosine, over max_num_steps"),
    "warmup_steps": Foreign("policy.warmup_steps"),
    "warmup_ratio": Foreign("policy.warmup_steps", "a share below 1"),
    "gradient_checkpointing": Foreign("policy.dtensor_cfg.activation_checkpointing"),
    "fsdp": Foreign("policy.dtensor_cfg.fsdp"),
    "deepspeed": Foreign(None, "policy.dtensor_cfg.fsdp shards weights, gradients and optimizer"),
    "packing": Foreign("policy.sequence_packing.enabled", "rows stay separate; null leaves it to the run"),
    "per_device_train_batch_size": Foreign(
        "distillation.num_prompts_per_step", "times gradient_accumulation_steps and devices; micro-batches are found"
    ),
    "gradient_accumulation_steps": Foreign("distillation.num_prompts_per_step", "as above"),
    "per_device_eval_batch_size": Foreign("distillation.val_batch_size", "found unless given"),
    "num_train_epochs": Foreign("distillation.max_num_epochs"),
    "max_steps": Foreign("distillation.max_num_steps", "a run ends after these, or its epochs"),
    "eval_steps": Foreign("distillation.val_period"),
    "eval_strategy": Foreign("distillation.val_period", "0: none"),
    "eval_on_start": Foreign("distillation.val_at_start"),
    "seed": Foreign("distillation.seed"),
    "save_steps": Foreign("checkpointing.save_period"),
    "save_strategy": Foreign("checkpointing.save_period", "0: at the end alone"),
    "save_total_limit": Foreign("checkpointing.keep_top_k"),
    "metric_for_best_model": Foreign("checkpointing.metric_name", "other names: val/loss, val/bpb"),
    "greater_is_better": Foreign("checkpointing.higher_is_better"),
    "resume_from_checkpoint": Foreign(None, "the same command goes on from the run folder's last checkpoint"),
    "output_dir": Foreign("logger.log_dir", "the run folder"),
    "report_to": Foreign("logger.wandb_enabled", "also tensorboard_enabled, trackio_enabled"),
    "run_name": Foreign("logger.wandb.name"),
    "wandb_project": Foreign("logger.wandb.project"),
    "wandb_entity": Foreign("logger.wandb.entity"),
    "wandb_run_group": Foreign("logger.wandb.group"),
    "logging_steps": Foreign(None, "every step is logged; logger.print_seconds for what is printed"),
    "dataset_name": Foreign("data.train", "hf:owner/name, or files"),
    "dataset_config": Foreign("data.hub_subset"),
    "dataset_train_split": Foreign("data.hub_split"),
    "dataset_test_split": Foreign("data.hub_validation_split", "with data.validation: hf:owner/name"),
    "dataset_text_field": Foreign("data.text_key"),
    "dataloader_num_workers": Foreign("data.num_workers"),
    "shuffle_dataset": Foreign("data.shuffle"),
    "max_length": Foreign("data.max_input_seq_length"),
    "assistant_only_loss": Foreign(None, "in a conversation assistant turns alone are learnt"),
    "completion_only_loss": Foreign(None, "of prompt and completion the completion alone is learnt"),
    "lmbda": Foreign("on_policy.fraction", "0: no algorithm: on_policy_distillation; TRL's default is .5"),
    "beta": Foreign("loss_fn.jsd_beta", "with direction: jsd; 0 is forward, 1 reverse; TRL's default is .5"),
    "temperature": Foreign("on_policy.temperature", "of sampling, not of the loss (loss_fn.temperature)"),
    "top_p": Foreign("on_policy.top_p"),
    "top_k": Foreign(None, "answers are drawn by temperature and top_p"),
    "max_new_tokens": Foreign("on_policy.max_new_tokens"),
    "max_completion_length": Foreign("on_policy.max_new_tokens"),
    "num_generations": Foreign("on_policy.samples_per_prompt"),
    "generation_batch_size": Foreign("on_policy.batch_size", "answers written at a time"),
    "seq_kd": Foreign(None, "limbeck write has the teacher answer; train on that with loss_fn.kl_loss_weight: 0"),
    "use_uld_loss": Foreign("loss_fn.mode", "uld; gold with uld_use_hybrid_loss"),
    "uld_use_hybrid_loss": Foreign("loss_fn.mode", "gold is the nearest"),
    "use_extended_uld": Foreign(None, "texts are always aligned, by bytes"),
    "uld_hybrid_matched_weight": Foreign(None, "gold weighs its parts as published"),
    "uld_hybrid_unmatched_weight": Foreign(None, "gold weighs its parts as published"),
    "uld_crossentropy_weight": Foreign("loss_fn.ce_loss_scale"),
    "uld_distillation_weight": Foreign("loss_fn.kl_loss_weight"),
    "uld_student_temperature": Foreign("loss_fn.temperature", "one for both sides"),
    "uld_teacher_temperature": Foreign("loss_fn.temperature", "one for both sides"),
    "xtoken_loss_type": Foreign("loss_fn.mode", "the same words"),
    "xtoken_projection_matrix_path": Foreign("loss_fn.projection_matrix_path", "as NeMo RL's"),
    "xtoken_temperature": Foreign("loss_fn.temperature"),
    "xtoken_kl_weight": Foreign("loss_fn.kl_loss_weight"),
    "xtoken_ce_scale": Foreign("loss_fn.ce_loss_scale"),
    "xtoken_vocab_topk": Foreign("loss_fn.vocab_topk", "of p_kl"),
    "xtoken_uncommon_topk": Foreign("loss_fn.uncommon_topk", "of h_kl"),
    "xtoken_dynamic_scaling": Foreign("loss_fn.dynamic_loss_scaling"),
    "uld_skip_student_eos": Foreign(None, "the end of a turn is learnt, matched by role"),
    "uld_skip_teacher_eos": Foreign(None, "the end of a turn is learnt, matched by role"),
    "disable_dropout": Foreign("policy.model_overrides", "such as attention_dropout: 0"),
    "use_fused_linear_loss": Foreign("loss_fn.fast_path", "auto: kernels wherever they know the mode"),
    "use_liger_kernel": Foreign("loss_fn.fast_path", "auto: kernels wherever they know the mode"),
    "use_transformers_paged": Foreign("on_policy.sampler", "continuous"),
    "use_vllm": Foreign("on_policy.engine", "limbeck docs on_policy"),
    "vllm_*": Foreign(None, _VLLM),
    "log_completions*": Foreign("distillation.samples", "samples are written at every validation"),
    "num_completions_to_print": Foreign("distillation.samples.number"),
    "push_to_hub*": Foreign(None, _HUB),
    "hub_*": Foreign(None, _HUB),
}
"""Argument of ``GOLDConfig``, ``GKDConfig`` or what they inherit (a pattern) -> what it is here."""

LIBRARIES = {"NeMo RL": NEMO_RL, "TRL": TRL}


def canonical(path: Sequence[Any]) -> str:
    """A dotted key with ``teacher`` for one of several."""
    parts = [str(part) for part in path]
    if parts[0] == "teachers" and len(parts) > 1 and parts[1].isdigit():
        parts = ["teacher", *parts[2:]]
    return ".".join(parts)


def find(library: str, path: Sequence[Any]) -> Foreign | None:
    """Row of a library's key; None where nothing is known of it. Rows of sections are found by their own key
    alone."""
    table, name = LIBRARIES[library], canonical(path)
    names = [name]
    if name.startswith("teacher."):
        names.append("policy" + name.removeprefix("teacher"))
    for alias in names:
        # a key's own row before any pattern that holds for it, too
        row_of_alias = table.get(alias) or next(
            (row for pattern, row in table.items() if "*" in pattern and fnmatchcase(alias, pattern)), None
        )
        if row_of_alias is not None and alias != name and row_of_alias.here is not None:
            return Foreign(row_of_alias.here.replace("policy.", "teacher.", 1), row_of_alias.note)
        if row_of_alias is not None:
            return row_of_alias
    return None


def said_of(path: Sequence[Any]) -> str | None:
    """Sentence of the refusal of an unknown key where it is another library's; TRL has no sections."""
    for library in LIBRARIES:
        if library == "TRL" and len(path) > 1:
            continue
        row = find(library, path)
        if row is not None and row.here != canonical(path):
            return row.said(library)
    return None
