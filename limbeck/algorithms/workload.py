"""What a run file asks the devices to do: sizes of models, batches and signals for the planner; nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limbeck.algorithms.build import student_length
from limbeck.algorithms.config import MasterConfig
from limbeck.distributed.planner import ModelShape, TeacherMemory, Workload
from limbeck.errors import ConfigError, one_line
from limbeck.models import fp8
from limbeck.models.causal import setting
from limbeck.models.loading import weight_files
from limbeck.models.policy import PolicyConfig
from limbeck.models.quantization import BYTES, quantized_in, stored_bytes
from limbeck.teachers.build import TeacherConfig
from limbeck.teachers.cache import estimate_bytes
from limbeck.tokens import ByteVocab, load_tokenizer
from limbeck.utils.files import model_path

# auto: the planner is asked about accelerators; fp8: what is computed around the linear maps
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "fp8": 2}
_KERNEL_MODES = ("tree_kl", "boundary_kl", "p_kl", "gold", "h_kl")
# A position of a server's answer is JSON text: per token an id, a number, a rank and a piece of text.
_JSON_BYTES_PER_TOKEN = 75


def workload_of(config: MasterConfig) -> Workload:
    """What a run file asks the devices to do."""
    policy = config.policy
    student = shape_of(policy)
    length = student_length(config)
    batching = policy.sequence_packing if policy.sequence_packing.enabled else policy.dynamic_batching
    micro = batching.train_mb_tokens if batching.enabled and batching.train_mb_tokens else None
    compute = _BYTES[policy.precision]
    return Workload(
        student=student,
        teachers=tuple(_teacher(t) for t in config.all_teachers),
        sequences_per_step=policy.train_global_batch_size,
        tokens_per_sequence=length,
        microbatch_tokens=micro or policy.train_micro_batch_size * length,
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
    live = len(teachers) == 1 and teachers[0].cache is None and teachers[0].server is None
    return live and loss.fast_path != "off" and loss.mode in _KERNEL_MODES


def _teacher(own: TeacherConfig) -> TeacherMemory:
    precision = _BYTES[own.param_dtype or own.precision]
    if own.cache is not None:
        if own.cache_kind == "hidden":
            return TeacherMemory("cache", signal_bytes=float(estimate_bytes(1, hidden_size=shape_of(own).hidden)))
        return TeacherMemory("cache", signal_bytes=float(estimate_bytes(1, k=own.cache_k)))
    if own.server is not None:
        return TeacherMemory("server", signal_bytes=float(own.server.k * _JSON_BYTES_PER_TOKEN))
    return TeacherMemory(
        "live", shape_of(own), precision, sharded=own.dtensor_cfg.fsdp, layer_bytes=_quantized_bytes(own)
    )


def _quantized_bytes(own: TeacherConfig) -> float | None:
    """Bytes per parameter of the layers of a quantised teacher; None for another one."""
    if own.precision == "fp8":
        return fp8.BYTES
    if own.quantization != "none":
        return BYTES[own.quantization]
    stored = quantized_in(weight_files(own))
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


def shape_of(policy: PolicyConfig) -> ModelShape:
    """Sizes of a run file's model; exact parameters from the model built without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _model_config(policy)
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=policy.trust_remote_code)
    heads = int(text.num_attention_heads)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=int(setting(text, "intermediate_size") or 4 * text.hidden_size),
        heads=heads,
        kv_heads=int(setting(text, "num_key_value_heads") or heads),
        head_dim=int(setting(text, "head_dim") or text.hidden_size // heads),
        vocab=int(text.vocab_size),
        tied=bool(setting(config, "tie_word_embeddings")),
    )


def _model_config(policy: PolicyConfig) -> Any:
    from transformers import AutoConfig

    overrides: dict[str, Any] = dict(policy.model_overrides)
    if policy.init == "random" and "vocab_size" not in overrides and policy.tokenizer.name:
        overrides["vocab_size"] = ByteVocab.from_tokenizer(load_tokenizer(policy.tokenizer.name)).size
    try:
        if policy.model_name is None:
            return AutoConfig.for_model(**overrides)
        overrides.pop("model_type", None)
        name = Path(str(model_path(policy.model_name))).expanduser()
        if name.suffix == ".gguf":
            return AutoConfig.from_pretrained(str(name.parent), gguf_file=name.name, **overrides)
        where = str(name) if name.exists() else policy.model_name
        return AutoConfig.from_pretrained(where, trust_remote_code=policy.trust_remote_code, **overrides)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the sizes of model {policy.model_name!r} cannot be read: {one_line(error, 200)}") from error
