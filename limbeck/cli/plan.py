"""``limbeck plan``: memory and time of a run file under every layout of N devices, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from limbeck.algorithms.master_config import MasterConfig, TeacherConfig
from limbeck.distributed.planner import GIB, Estimate, Machine, ModelShape, TeacherPlan, Workload, fitting, plan
from limbeck.errors import ConfigError
from limbeck.models.cache import estimate_bytes
from limbeck.models.policy_config import PolicyConfig
from limbeck.utils.files import package_file

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KERNEL_MODES = ("boundary_kl", "p_kl", "gold", "h_kl")
# A position of a server's answer is JSON text: per token an id, a number, a rank and a piece of text.
_JSON_BYTES_PER_TOKEN = 75


def plan_command(
    run_file: Annotated[Path, typer.Argument(help="YAML run file; see recipes/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that replace the file's: key.sub=value.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", "-g", help="Devices of the run.", min=1)] = 1,
    memory: Annotated[float, typer.Option("--memory", "-m", help="GiB of each device.", min=1)] = 80.0,
    tokens: Annotated[float, typer.Option(help="Training tokens of the whole run, for time and cost.", min=0)] = 0.0,
    tflops: Annotated[float, typer.Option(help="Peak of a device in the run's precision.", min=0.1)] = 989.0,
    utilisation: Annotated[float, typer.Option(help="Share of the peak that is reached.", min=0.01, max=1)] = 0.4,
    per_node: Annotated[int, typer.Option(help="Devices of a node.", min=1)] = 8,
    node_link: Annotated[float, typer.Option(help="GB/s of a device to others in its node.", min=0.1)] = 450.0,
    network: Annotated[float, typer.Option(help="GB/s of a device to other nodes.", min=0.01)] = 50.0,
    price: Annotated[float, typer.Option(help="Money per device and hour.", min=0)] = 3.0,
    show: Annotated[int, typer.Option(help="Layouts to print.", min=1)] = 8,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Estimate memory and time per layout and pick one: data, FSDP, tensor and context parallel.

    Example: limbeck plan recipes/llama_from_qwen.yaml --gpus 8 --memory 80
    """
    from limbeck.config import load_config, resolve

    config = resolve(MasterConfig, load_config(run_file, overrides or []))
    machine = Machine(
        memory=memory * GIB,
        flops=tflops * 1e12,
        utilisation=utilisation,
        devices_per_node=per_node,
        node_link=node_link * 1e9,
        network_link=network * 1e9,
        price_per_hour=price,
    )
    work = workload_of(config)
    estimates = plan(work, gpus, machine)
    best = fitting(estimates)
    result = describe(work, estimates, machine, gpus, tokens)
    if json_output:
        typer.echo(json.dumps(result))
    else:
        print_plan(work, estimates, result, show)
    if best is None:
        nearest = min(estimates, key=lambda e: e.total)
        raise ConfigError(
            f"no layout of {gpus} devices with {memory:g} GiB fits; the nearest, {nearest.layout.name}, needs "
            f"{nearest.total / GIB:.1f} GiB ({nearest.problem}): take more devices, cache the teacher, or switch "
            "activation_checkpointing on"
        )


def describe(
    work: Workload, estimates: list[Estimate], machine: Machine, gpus: int, tokens: float = 0.0
) -> dict[str, Any]:
    """The plan as plain data: all layouts, the choice, and settings that ask for it."""
    best = fitting(estimates)
    out: dict[str, Any] = {
        "gpus": gpus,
        "memory_gib": machine.memory / GIB,
        "student_parameters": work.student.parameters,
        "teachers": [{"kind": t.kind, "parameters": t.shape.parameters if t.shape else None} for t in work.teachers],
        "tokens_per_step": work.tokens_per_step,
        "layouts": [e.to_dict() for e in estimates],
        "best": best.layout.name if best else None,
    }
    if best is not None:
        mesh = best.layout.mesh
        speed = work.tokens_per_step / best.step_seconds
        out["settings"] = _settings("policy", mesh.tensor, mesh.context, sharded=best.layout.sharded)
        for number, teacher in enumerate(best.teachers):
            if teacher.live:
                section = "teacher" if len(best.teachers) == 1 else f"teachers.{number}"
                sharded = teacher.sharded and best.layout.sharded
                out["settings"] += _settings(section, teacher.tensor(mesh), mesh.context, sharded=sharded)
        out["tokens_per_second"] = round(speed, 1)
        if tokens:
            hours = tokens / speed / 3600
            out["run"] = {
                "tokens": tokens,
                "hours": round(hours, 2),
                "device_hours": round(hours * gpus, 1),
                "cost": round(hours * gpus * machine.price_per_hour, 2),
                "signal_bytes": [tokens * t.tokens_ratio * t.signal_bytes for t in work.teachers],
            }
    return out


def _settings(section: str, tensor: int, context: int, *, sharded: bool) -> list[str]:
    """Overrides that lay a model out."""
    values = {"fsdp": str(sharded).lower(), "tensor_parallel_size": tensor, "context_parallel_size": context}
    return [f"{section}.dtensor_cfg.{key}={value}" for key, value in values.items()]


def print_plan(work: Workload, estimates: list[Estimate], result: dict[str, Any], show: int) -> None:
    """The plan as a table of the best layouts, and what to set."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"GiB per device, {result['gpus']} devices of {result['memory_gib']:g} GiB", title_justify="left"
    )
    names = list(dict.fromkeys(name for e in estimates for name in e.memory))
    table.add_column("layout", no_wrap=True)
    for name in (*names, "total", "s/step"):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("", overflow="fold")
    for e in estimates[:show]:
        cells = [f"{e.memory.get(name, 0.0) / GIB:.1f}" for name in names]
        table.add_row(e.layout.name, *cells, f"{e.total / GIB:.1f}", f"{e.step_seconds:.3g}", e.problem or "fits")
    console = Console()
    # a file or a pipe has no width of its own to keep to
    (console if console.is_terminal else Console(width=160)).print(table)
    if result["best"]:
        typer.echo(f"best: {result['best']}, about {result['tokens_per_second']:,.0f} tokens/s; set")
        typer.echo("  " + " ".join(result["settings"]))
    if "run" in result:
        r = result["run"]
        stored = sum(r["signal_bytes"]) / 1e12
        typer.echo(
            f"{r['tokens']:.3g} tokens: {r['hours']:,.1f} hours, {r['device_hours']:,.0f} device hours, "
            f"{r['cost']:,.0f} in money" + (f", {stored:,.1f} TB of teacher signals" if stored else "")
        )


# ---- from a run file -------------------------------------------------------------------------------------------------


def workload_of(config: MasterConfig) -> Workload:
    """What a run file asks the devices to do."""
    policy = config.policy
    student = shape_of(policy)
    length = min(config.data.max_input_seq_length, policy.max_total_sequence_length)
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


def _teacher(own: TeacherConfig) -> TeacherPlan:
    precision = _BYTES[own.param_dtype or own.precision]
    if own.cache is not None:
        if own.cache_kind == "hidden":
            return TeacherPlan("cache", signal_bytes=float(estimate_bytes(1, hidden_size=shape_of(own).hidden)))
        return TeacherPlan("cache", signal_bytes=float(estimate_bytes(1, k=own.cache_k)))
    if own.server is not None:
        return TeacherPlan("server", signal_bytes=float(own.server.k * _JSON_BYTES_PER_TOKEN))
    return TeacherPlan("live", shape_of(own), precision, sharded=bool(getattr(own.dtensor_cfg, "fsdp", False)))


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
        intermediate=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocab=int(text.vocab_size),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _model_config(policy: PolicyConfig) -> Any:
    from transformers import AutoConfig

    overrides: dict[str, Any] = dict(policy.model_overrides)
    if policy.init == "random" and "vocab_size" not in overrides and policy.tokenizer.name:
        from limbeck.tokens import ByteVocab, load_tokenizer

        overrides["vocab_size"] = ByteVocab.from_tokenizer(load_tokenizer(policy.tokenizer.name)).size
    try:
        if policy.model_name is None:
            return AutoConfig.for_model(**overrides)
        overrides.pop("model_type", None)
        name = Path(str(package_file(policy.model_name))).expanduser()
        if name.suffix == ".gguf":
            return AutoConfig.from_pretrained(str(name.parent), gguf_file=name.name, **overrides)
        where = str(name) if name.exists() else policy.model_name
        return AutoConfig.from_pretrained(where, trust_remote_code=policy.trust_remote_code, **overrides)
    except (OSError, ValueError, KeyError) as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"the sizes of model {policy.model_name!r} cannot be read: {line}") from error
