"""Every published name is importable from its published module, takes the published arguments, and is no alias."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

NAMES = {
    "limbeck.data.cross_tokenizer_collate": "CrossTokenizerCollator",
    "limbeck.align": "TokenAligner AlignmentPair AlignmentBatch",
    "limbeck.data.batched_data_dict": "BatchedDataDict",
    "limbeck.data.microbatch": (
        "ProcessedInputs ProcessedMicrobatch make_processed_microbatch_iterator get_microbatch_iterator "
        "process_microbatch process_global_batch"
    ),
    "limbeck.algorithms.xtoken_off_policy_distillation": (
        "OffPolicyDistillationConfig OffPolicyDistillationSaveState MasterConfig XTOKEN_NON_STUDENT_SEQ_KEYS setup "
        "xtoken_off_policy_distillation_train validate"
    ),
    "limbeck.losses.distillation": "CrossTokenizerDistillationLossFn CrossTokenizerDistillationLossConfig",
    "limbeck.models.policy": "Policy PolicyConfig",
    "limbeck.utils": "Logger CheckpointManager Timer",
    "limbeck.traces": "ComposerDataCollator CollatorConfig TraceTurn TraceExample TokenizerLike",
}
ARGUMENTS = {
    "limbeck.data.cross_tokenizer_collate:CrossTokenizerCollator": (
        "student_tokenizer teacher_tokenizer aligner ctx_length_student ctx_length_teacher make_seq_div_by_student "
        "make_seq_div_by_teacher"
    ),
    "limbeck.data.cross_tokenizer_collate:CrossTokenizerCollator._tokenize_batch": (
        "texts tokenizer ctx_length make_seq_div_by"
    ),
    "limbeck.align:TokenAligner": "student_tokenizer teacher_tokenizer projection_matrix_path max_comb_len",
    "limbeck.align:TokenAligner.align": ("student_ids teacher_ids student_attention_mask teacher_attention_mask"),
    "limbeck.data.microbatch:get_microbatch_iterator": "data cfg mbs dp_mesh tokenizer cp_size",
    "limbeck.data.microbatch:process_microbatch": "mb tokenizer enable_seq_packing cfg cp_size",
    "limbeck.data.microbatch:process_global_batch": "data loss_fn dp_group batch_idx batch_size",
    "limbeck.algorithms.xtoken_off_policy_distillation:setup": (
        "master_config student_tokenizer teacher_tokenizer train_dataset val_dataset"
    ),
    "limbeck.algorithms.xtoken_off_policy_distillation:xtoken_off_policy_distillation_train": (
        "student_policy teacher_policy dataloader val_dataloader loss_fn logger checkpointer "
        "off_policy_distillation_state master_config"
    ),
    "limbeck.algorithms.xtoken_off_policy_distillation:validate": (
        "student_policy teacher_policy val_dataloader loss_fn master_config timer"
    ),
    "limbeck.models.policy:Policy.train": "data loss_fn eval_mode gbs mbs timer",
    "limbeck.models.policy:Policy.get_topk_logits": "data k",
    "limbeck.models.policy:Policy.get_logprobs": "data",
    "limbeck.models.policy:Policy.prepare_for_training": "",
    "limbeck.models.policy:Policy.save_checkpoint": "weights_path optimizer_path tokenizer_path",
    "limbeck.traces:ComposerDataCollator": "tokenizer config",
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names.split()])
def test_the_name_is_there(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


@pytest.mark.parametrize("path", ARGUMENTS)
def test_the_arguments_are_there(path: str) -> None:
    module, _, dotted = path.partition(":")
    found: Any = import_module(module)
    for part in dotted.split("."):
        found = getattr(found, part)
    names = list(inspect.signature(found).parameters)
    assert set(ARGUMENTS[path].split()) <= set(names)
