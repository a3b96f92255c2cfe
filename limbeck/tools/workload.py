"""Workload of a run file: sizes of models, batches and signals for the planner; nothing is loaded."""

from __future__ import annotations

from typing import Any

from limbeck.algorithms.build import student_length
from limbeck.algorithms.config import MasterConfig
from limbeck.distributed.planner import FULL, ModelShape, TeacherMemory, Workload
from limbeck.errors import ConfigError, LimbeckError, one_line
from limbeck.losses.objectives import find_objective
from limbeck.models import fp8
from limbeck.models.budget import model_shape
from limbeck.models.loading import ModelConfig, weight_files
from limbeck.models.policy import PolicyConfig
from limbeck.models.quantization import BYTES, quantized_in, stored_bytes
from limbeck.teachers.build import TeacherConfig
from limbeck.tokens import ByteVocab, load_tokenizer
from limbeck.utils.hub import model_files

# auto: the planner is asked about accelerators; fp8: what is computed around the linear maps
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "fp8": 2}


def workload_of(config: MasterConfig) -> Workload:
    """Workload that a run file asks of the devices."""
    policy = config.policy
    student = shape_of(policy)
    length = student_length(config)
    batching = policy.sequence_packing if policy.sequence_packing.enabled else policy.dynamic_batching
    micro, rows = batching.train_mb_tokens if batching.enabled else None, policy.train_micro_batch_size
    if micro is None and rows is not None and not batching.enabled:
        micro = rows * length
    compute = _BYTES[policy.precision]
    return Workload(
        student=student,
        teachers=tuple(_teacher(t) for t in config.all_teachers),
        sequences_per_step=policy.train_global_batch_size,
        tokens_per_sequence=length,
        microbatch_tokens=micro or max(FULL["cuda"], length),
        microbatch_found=micro is None,
        block_rows=config.loss_fn.block_rows or 512,
        kernels=_kernels(config),
        param_bytes=_BYTES[policy.param_dtype or "float32"],
        compute_bytes=compute,
        trained=_trained(policy, student),
        optimizer_bytes=_optimizer_bytes(policy),
        checkpointing=policy.dtensor_cfg.activation_checkpointing,
    )


def _kernels(config: MasterConfig) -> bool:
    """Whether head and loss would run in their kernels on a CUDA device."""
    loss, teachers = config.loss_fn, config.all_teachers
    live = len(teachers) == 1 and (teachers[0].kind.loads_model or teachers[0].kind.follows_student)
    return live and loss.fast_path != "off" and find_objective(loss.mode).kernel is not None


def _teacher(section: TeacherConfig) -> TeacherMemory:
    kind, source = section.kind, section.source
    if not kind.holds_weights(source):
        return TeacherMemory(source.kind, signal_bytes=kind.token_bytes(source, lambda: shape_of(section).hidden))
    # the student's own weights are kept as wide as they are trained
    precision = _BYTES[section.param_dtype or ("float32" if kind.follows_student else section.precision)]
    return TeacherMemory(
        "live", shape_of(section), precision, sharded=section.dtensor_cfg.fsdp, layer_bytes=_quantized_bytes(section)
    )


def _quantized_bytes(section: TeacherConfig) -> float | None:
    """Bytes per parameter of the layers of a quantised teacher; None for another one."""
    if section.precision == "fp8":
        return fp8.BYTES
    if section.quantization != "none":
        return BYTES[section.quantization]
    stored = quantized_in(weight_files(section))
    return None if stored is None else stored_bytes(stored)


def _optimizer_bytes(policy: PolicyConfig) -> int:
    """Bytes of optimizer state per trained parameter: two moments for the Adam family, one or none for SGD."""
    width = _BYTES[policy.param_dtype or "float32"]
    if "SGD" in policy.optimizer.name:
        return width if policy.optimizer.kwargs.get("momentum") else 0
    return 2 * width


def _trained(policy: PolicyConfig, shape: ModelShape) -> int | None:
    if policy.lora is None or not policy.lora.enabled:
        return None
    widths = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q, kv = widths
    h, f = shape.hidden, shape.intermediate
    # both factors of every linear map of a layer: q, k, v, o and the three of the gated MLP
    per_layer = (h + q) + 2 * (h + kv) + (q + h) + 3 * (h + f)
    return policy.lora.r * per_layer * shape.layers


def shape_of(policy: ModelConfig) -> ModelShape:
    """Sizes of a run file's model; exact parameters from the model built without storage."""
    try:
        return _shape(policy)
    except (LimbeckError, MemoryError):
        raise
    except Exception as error:  # a stranger's configuration: its numbers may be of any type and size
        name = policy.model_name or policy.model_overrides
        raise ConfigError(f"the sizes of model {name!r} cannot be read: {one_line(error, 200)}") from error


def _shape(policy: ModelConfig) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    config = _model_config(policy)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, trust_remote_code=policy.trust_remote_code, attn_implementation=None, experts_implementation=None
        )
    return model_shape(config, sum(p.numel() for p in model.parameters()))


def _model_config(policy: ModelConfig) -> Any:
    from transformers import AutoConfig

    overrides: dict[str, Any] = dict(policy.model_overrides)
    if policy.init == "random" and "vocab_size" not in overrides and policy.tokenizer.name:
        overrides["vocab_size"] = ByteVocab.from_tokenizer(load_tokenizer(policy.tokenizer.name)).size
    if policy.model_name is None:
        return AutoConfig.for_model(**overrides)
    overrides.pop("model_type", None)
    path = model_files(policy.model_name, "config", code=policy.trust_remote_code)
    if path.suffix == ".gguf":
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, **overrides)
    return AutoConfig.from_pretrained(str(path), trust_remote_code=policy.trust_remote_code, **overrides)
