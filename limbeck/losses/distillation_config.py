"""The settings of the distillation loss, as a run file has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from typing_extensions import Self

from limbeck.config import FLAT, widen_schema
from limbeck.losses.divergences import ChosenBy, Direction
from limbeck.losses.fast import FastPath
from limbeck.losses.objectives import ObjectiveConfig, SameVocabulary, find_objective, form_of, read_settings

Combination = Literal["sum", "averaged_logits", "select_teacher"]
Scoring = Literal["static", "ce", "entropy", "max_prob"]
"""What weighs several teachers on a text: nothing, or a score of each."""
Gate = Literal["none", "soft"]


class CrossTokenizerDistillationLossConfig(BaseModel):
    """Settings of `CrossTokenizerDistillationLossFn`: its own, and beside them those of the objective of `mode`.

    The published flags `gold_loss` and `xtoken_loss`, where given, select a published objective (false, -: P-KL; true,
    false: gold; true, true: H-KL); otherwise `mode` counts.

    >>> CrossTokenizerDistillationLossConfig(gold_loss=True, xtoken_loss=True).mode
    'h_kl'
    >>> CrossTokenizerDistillationLossConfig(mode="tree_kl", root_weight=2.0).objective.root_weight
    2.0

    What is null is chosen by the objective, the student and the number of teachers, see `settled`.

    >>> [CrossTokenizerDistillationLossConfig(mode=mode).settled().ce_loss_scale for mode in ("tree_kl", "boundary_kl")]
    [0.3, 1.0]
    """

    model_config = ConfigDict(extra="forbid")

    default_direction: ClassVar[Direction] = "forward"
    """Direction of objectives that name none themselves."""

    mode: str = Field("tree_kl", description="which loss compares the two models, or `module:Class` of your own")
    objective: SerializeAsAny[ObjectiveConfig] = Field(json_schema_extra=FLAT, description="settings of the mode")
    projection_matrix_path: str | list[str | None] | None = Field(
        None, description="stored projection, or one per teacher (null: the teacher shares the student's vocabulary)"
    )
    gold_loss: bool | None = Field(None, description="published flag: common-set KL plus sorted L1")
    xtoken_loss: bool | None = Field(None, description="published flag: with gold_loss, the relaxed common set (H-KL)")
    temperature: float = Field(1.0, gt=0, description="divides both sides' logits; losses are multiplied by its square")
    reverse_kl: bool = Field(False, description="published flag: the same as direction='reverse'")
    kl_loss_weight: float = Field(1.0, ge=0, description="factor of the distillation loss")
    ce_loss_scale: float | None = Field(
        None, ge=0, description="factor of cross-entropy; null: .3 with tree_kl and a student from scratch, else 1"
    )
    gate: Gate | None = Field(
        None,
        description="soft: count a chunk by the teacher's advantage on the realised text; null: soft with tree_kl and "
        "a pretrained student where ce_loss_scale is null too, else none",
    )
    dynamic_loss_scaling: bool = Field(False, description="scale distillation to cross-entropy, one ratio per step")
    student_vocab_size: int | None = Field(None, description="student ids; default: as the head says")
    teacher_vocab_size: int | list[int] | None = Field(None, description="teacher ids, or one number per teacher")
    topk: int | None = Field(None, description="same-vocabulary teachers: tokens kept besides a tail bucket")
    topk_by: ChosenBy = Field("teacher", description="whose most likely tokens those are")
    teacher_combination: Combination | None = Field(None, description="how several teachers are combined; null: sum")
    teacher_weights: list[float] | None = Field(None, description="static weights; default: equal, summing to 1")
    teacher_scoring: Scoring | None = Field(
        None,
        description="per-sample weights softmax(alpha * score) by this score; null: ce in a run with several teachers "
        "that says nothing of how they are combined, else static",
    )
    scoring_alpha: float = Field(1.0, description="sharpness of scored weights")
    dynamic_scaling_decay: float = Field(0.9, ge=0, lt=1, description="decay of the running estimate")
    block_rows: int | None = Field(
        None,
        ge=1,
        description="rows that pass through the heads at once; default: 512, with kernels as memory allows",
    )
    fast_path: FastPath = Field("auto", description="auto: kernels on CUDA where they know the mode; off; force")

    # ---- flat run files ----

    @model_validator(mode="before")
    @classmethod
    def _with_objective(cls, data: Any) -> Any:
        """Take the objective's keys out of the loss's, and read them by its own class."""
        if not isinstance(data, Mapping):
            return data
        values = {**data, "mode": _flagged(data)}
        objective_keys = {
            key: values.pop(key) for key in list(values) if key not in cls.model_fields or key == "objective"
        }
        objective = {"mode": values["mode"], **objective_keys}
        form, forms = form_of(values["mode"]), ObjectiveConfig.forms().values()
        # published run files have the keys of every mode, a run's own configuration those of the mode it had
        for key in objective.keys() - form.model_fields.keys():
            # whose default would be meant is open where they differ
            usual = [other.model_fields[key].default for other in forms if key in other.model_fields]
            if usual and all(default == objective[key] for default in usual):
                del objective[key]
        if values.get("reverse_kl"):
            if objective.setdefault("direction", "reverse") == "jsd":
                raise ValueError("reverse_kl=true and direction='jsd' contradict each other; give one of them")
            objective["direction"] = "reverse"
        elif "direction" in form.model_fields:
            usual = form.model_fields["direction"].default
            objective.setdefault("direction", cls.default_direction if usual == "forward" else usual)
        values["objective"] = read_settings(objective)
        return values

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        flat = handler.resolve_ref_schema(schema)
        del flat["properties"]["objective"]
        flat["required"] = [key for key in flat.get("required", []) if key != "objective"]
        widen_schema(flat, ObjectiveConfig, handler)
        return schema

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        objective_values = values.pop("objective", {})
        return values | {key: value for key, value in objective_values.items() if key != "mode"}

    # ---- checks ----

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.objective.check_temperature(self.temperature)
        _ = self.same_vocabulary
        if self.teacher_weights is not None:
            if any(w < 0 for w in self.teacher_weights) or not sum(self.teacher_weights) > 0:
                raise ValueError(f"teacher_weights are {self.teacher_weights}; none may be negative, one must count")
            if self.teacher_scoring not in (None, "static") or self.teacher_combination == "select_teacher":
                raise ValueError("teacher_weights are static; leave them out where teachers are scored or selected")
        return self

    @property
    def same_vocabulary(self) -> SameVocabulary.Config:
        """Settings for teachers that share the student's vocabulary, whatever the mode."""
        kind = SameVocabulary.Config
        shared = {key: value for key, value in self.objective.model_dump().items() if key in kind.model_fields}
        of_the_loss = {"mode": "same_vocabulary", "topk": self.topk, "topk_by": self.topk_by}
        return kind.model_validate({"direction": self.default_direction, **shared, **of_the_loss})

    # ---- what is left open ----

    def settled(self, *, pretrained: bool = False, teachers: int = 1, modes: Sequence[str] = ()) -> Self:
        """These settings with what is null chosen by the objective, the student and the number of teachers.

        modes: by which the teachers are compared, where some have one of their own.

        - The factor of cross-entropy is the objective's own, the largest of several; without distillation it is 1.
        - A pretrained student: a teacher of another family is not ahead of it on every token, so beside an objective
          that `gates_pretrained` cross-entropy counts whole, and a soft gate chooses among the chunks; a factor that
          is named was chosen without a gate.
        - Several teachers: each text is weighed towards those that know it, by their cross-entropy, where nothing is
          said of how they are combined.
        """
        kinds = [find_objective(mode) for mode in modes or (self.mode,)]
        taught = teachers > 0 and self.kl_loss_weight > 0
        # a gate is known at temperature 1 alone, and a ratio that is measured needs no help
        helped = self.temperature == 1.0 and not self.dynamic_loss_scaling
        gates = helped and all(kind.gates_pretrained for kind in kinds)
        gated = pretrained and taught and gates and self.ce_loss_scale is None
        open_combination = self.teacher_combination is None and self.teacher_weights is None
        chosen = {
            "ce_loss_scale": max(kind.default_ce_scale for kind in kinds) if taught and not gated else 1.0,
            "gate": "soft" if gated else "none",
            "teacher_combination": "sum",
            "teacher_scoring": "ce" if teachers > 1 and open_combination else "static",
        }
        update = {key: value for key, value in chosen.items() if getattr(self, key) is None}
        return self.model_copy(update=update) if update else self

    def explain_choices(self, *, pretrained: bool, teachers: int, modes: Sequence[str] = ()) -> list[str]:
        """What these settings have as `settled` chooses it, and why, in words."""
        if not teachers or not self.kl_loss_weight:
            return []
        modes, said = list(dict.fromkeys(modes or (self.mode,))), list[str]()
        left_open = self.model_copy(update=dict.fromkeys(_OPEN))
        chosen = left_open.settled(pretrained=pretrained, teachers=teachers, modes=modes)
        student = ["a pretrained student" if pretrained else "a student from scratch"]
        why = ", ".join(modes + student * any(find_objective(mode).gates_pretrained for mode in modes))
        if (self.ce_loss_scale, self.gate) == (chosen.ce_loss_scale, chosen.gate) and not self.dynamic_loss_scaling:
            gate = f" and gate {self.gate}" if self.gate != "none" else ""
            said.append(f"ce_loss_scale {self.ce_loss_scale:g}{gate} ({why})")
        if self.teacher_scoring == chosen.teacher_scoring != "static" and self.teacher_combination == "sum":
            said.append(f"teacher_scoring {self.teacher_scoring} (several teachers)")
        return said


_OPEN = ("ce_loss_scale", "gate", "teacher_combination", "teacher_scoring")
"""Keys that `settled` chooses where they are null."""


def _flagged(values: Mapping[str, Any]) -> Any:
    """The mode, which the published flags may name."""
    gold, xtoken = values.get("gold_loss"), values.get("xtoken_loss")
    mode = values.get("mode", "tree_kl")
    if gold is None and xtoken is None:
        return mode
    if xtoken and not gold:
        raise ValueError("xtoken_loss=true needs gold_loss=true (together they select H-KL); set both or neither")
    flagged = "p_kl" if not gold else "h_kl" if xtoken else "gold"
    if values.get("mode", flagged) != flagged:
        raise ValueError(f"mode is {mode!r} but gold_loss and xtoken_loss select {flagged!r}; give only one")
    return flagged
