"""Tokens of one pass, where nobody has named them: from the memory that is there, then from what steps have taken.

Losses are sums over counts of the global batch, so what is found here moves no number but the order of a sum. It is
always something that a run file could name itself: ``sequence_packing`` or ``dynamic_batching`` with its budgets.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import BatchingConfig, MicrobatchConfig, PackingConfig, teacher_prefixes
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import memory_room, memory_total
from limbeck.distributed.planner import FULL, Layout, ModelShape, Workload, layer_activation_bytes, memory_of
from limbeck.models.causal import setting

SHARE = 0.8
"""Share of the memory that a pass may fill: an allocator needs the rest for its fragments."""
MEASURED_STEPS = 2
"""Steps that are measured, behind the first, which makes the optimizer's state."""
LEAST = 256
"""Tokens that a pass takes however little memory seems to be left."""
_UNBOUND = 1 << 40


def model_shape(config: Any, parameters: int) -> ModelShape:
    """Sizes of a model by its transformers configuration."""
    text = config.get_text_config()
    hidden = int(setting(text, "hidden_size", "n_embd", "d_model") or 1)
    heads = int(setting(text, "num_attention_heads", "n_head") or 1)
    return ModelShape(
        parameters=parameters,
        layers=int(setting(text, "num_hidden_layers", "n_layer") or 1),
        hidden=hidden,
        # GPT-2 leaves n_inner empty and means four times its width
        intermediate=int(setting(text, "intermediate_size", "n_inner") or 4 * hidden),
        heads=heads,
        kv_heads=int(setting(text, "num_key_value_heads") or heads),
        head_dim=int(setting(text, "head_dim") or hidden // heads),
        vocab=int(text.vocab_size),
        tied=bool(setting(config, "tie_word_embeddings")),
    )


@dataclass
class Measured:
    """Memory of one step: bytes before its first pass, at most within its passes, and of its gradients; tokens of its
    largest pass, and how many passes it took."""

    before: int
    peak: int
    gradients: int
    tokens: int
    passes: int


class Budget:
    """Most tokens of one pass of a model, with gradient and without; found when they are first asked for.

    Args:
        work: the model and the types of its numbers.
        layout: how it lies over its ranks.
        rows: ranks that read the same rows, which must find the same.
    """

    def __init__(self, work: Workload, layout: Layout, device: torch.device, rows: Comm) -> None:
        self.work, self.layout, self.device, self._rows = work, layout, device, rows
        self._found: dict[bool, int] = {}
        # passes without gradient, which keep nothing, may take twice as many
        self.most = FULL.get(device.type, FULL["cuda"])
        self.steps = 0
        """Steps that have been measured."""

    def tokens(self, grad: bool) -> int:
        """Most tokens of a pass with gradient, or without."""
        if grad not in self._found:
            room, held = memory_room(self.device)
            each, fixed = self._bytes(grad)
            self._set(grad, (SHARE * room - held - fixed) / each)
        return self._found[grad]

    def _bytes(self, grad: bool) -> tuple[float, float]:
        """Bytes of a pass for each of its tokens, and those besides that are not held yet."""
        plain = memory_of(replace(self.work, kernels=False), self.layout)
        later = plain["gradients"] + plain["optimizer"] if self.work.trained_parameters else 0.0
        # a teacher's logits lie beside the student's
        fixed = later + plain["gathered"] + 2 * plain["head_blocks"]
        if not grad:
            s, width = self.work.student, self.work.compute_bytes
            return 2 * layer_activation_bytes(s, width, self.layout.mesh.tensor) + 2 * width * s.hidden, fixed
        one, two = (memory_of(replace(self.work, microbatch_tokens=n), self.layout) for n in (1024, 2048))
        return (two["activations"] + two["head_blocks"] - one["activations"] - one["head_blocks"]) / 1024, fixed

    def _set(self, grad: bool, tokens: float) -> None:
        wanted = _rounded(min(max(tokens, LEAST), self.most if grad else 2 * self.most))
        # ranks that read the same rows, when a budget is found: one number, for all must cut them alike
        self._found[grad] = -int(self._rows.max(torch.tensor(-wanted)))

    def lower(self, grad: bool, failed: int) -> int:
        """After a pass of so many tokens has not found room: half of them, or of what holds already if that is less."""
        self._found[grad] = _rounded(min(self.tokens(grad), failed) / 2)
        # or `learn` would climb back; a pass without gradient, which may take twice as many, says nothing about `most`
        self.most = min(self.most, self._found[grad]) if grad else self.most
        return self._found[grad]

    def learn(self, step: Measured) -> tuple[int, int] | None:
        """Go by what a step has taken: fewer tokens where it came close to the end of the memory, more where they were
        held down by too cautious a guess. Collective. Returns the numbers before and after a change."""
        self.steps += 1
        if True not in self._found or not step.tokens:
            return None
        before, room = self._found[True], memory_room(self.device)[0]
        fixed = step.before + step.gradients
        each = max(step.peak - fixed, 1) / step.tokens
        fits = _rounded(min(max((SHARE * room - fixed) / each, LEAST), self.most))
        crowded, held_down = step.peak > SHARE * room, step.passes > 1 and before < self.most
        wanted = min(fits, before) if crowded else max(fits, before) if held_down else before
        self._set(True, wanted)
        return (before, self._found[True]) if self._found[True] != before else None

    def state(self) -> dict[str, int]:
        """State with which a run that is resumed on such a device begins."""
        budgets = {"train": self._found.get(True, 0), "score": self._found.get(False, 0), "steps": self.steps}
        return {**budgets, "most": self.most, "memory": memory_total(self.device)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Begin with what ``state`` gave; on a device with another memory it says nothing."""
        if state.get("memory") == memory_total(self.device):
            self._found = {grad: state[name] for grad, name in ((True, "train"), (False, "score")) if state[name] > 0}
            self.steps, self.most = state["steps"], state["most"]


def _rounded(tokens: float) -> int:
    """Down to a power of two or one and a half of it: what two starts find is then mostly the same."""
    power = 1 << (max(int(tokens), 1).bit_length() - 1)
    return power * 3 // 2 if tokens >= power * 3 / 2 and power > 1 else power


def settled(
    cfg: MicrobatchConfig, data: BatchedDataDict, room: Mapping[str, int], *, packed: bool, rounding: int
) -> MicrobatchConfig:
    """The sections that a run file could have named: rows packed or by length, up to ``room`` tokens by the prefix of
    their keys, which is empty for the student's."""

    def most(prefix: str) -> int:
        # the first teacher's rows may be there under two names
        return min(room.get(name, _UNBOUND) for name in (prefix, "teacher_0_" if prefix == "teacher_" else prefix))

    section: dict[str, Any] = {
        "enabled": True,
        "train_mb_tokens": most(""),
        "teacher_mb_tokens": [most(prefix) for prefix in teacher_prefixes(data)],
        "sequence_length_round": rounding,
    }
    plain = BatchingConfig() if packed else BatchingConfig(**section)
    packing = PackingConfig(**section) if packed else PackingConfig()
    return MicrobatchConfig(dtensor_cfg=cfg.dtensor_cfg, dynamic_batching=plain, sequence_packing=packing)


# of CUDA outside of its allocator, of the CPU's allocator, of cuBLAS
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch has a class of its own for its CUDA allocator alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def release_memory(device: torch.device) -> None:
    """Give back what a pass that found no room has left; its error, whose frames hold tensors, must be gone by now."""
    # first what hangs in reference cycles: empty_cache gives back only blocks that nothing holds
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
