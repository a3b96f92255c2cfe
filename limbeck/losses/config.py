"""The distillation loss's section of a run file, with the published names and ours. Needs pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from limbeck.losses.divergences import ChosenBy, Direction
from limbeck.losses.settings import (
    Combination,
    FastPath,
    LossMode,
    LossSettings,
    ScalingSource,
    Scoring,
    mode_from_flags,
)
from limbeck.utils.errors import ConfigError


class CrossTokenizerDistillationLossConfig(BaseModel):
    """Settings of `CrossTokenizerDistillationLossFn`.

    The published flags `gold_loss` and `xtoken_loss`, where given, select a reference mode (false, -: P-KL; true,
    false: gold; true, true: H-KL); otherwise `mode` counts.

    >>> CrossTokenizerDistillationLossConfig(gold_loss=True, xtoken_loss=True).mode
    'h_kl'
    """

    model_config = ConfigDict(extra="forbid")

    mode: LossMode = Field("boundary_kl", description="which loss compares the two models")
    projection_matrix_path: str | list[str | None] | None = Field(
        None, description="stored projection, or one per teacher (null: the teacher shares the student's vocabulary)"
    )
    gold_loss: bool | None = Field(None, description="published flag: common-set KL plus sorted L1")
    xtoken_loss: bool | None = Field(None, description="published flag: with gold_loss, the relaxed common set (H-KL)")
    temperature: float = Field(1.0, description="divides both sides' logits; losses are multiplied by its square")
    vocab_topk: int = Field(8192, description="teacher columns of p_kl (per micro-batch) and p_kl_norm (per chunk)")
    uncommon_topk: int = Field(8192, description="probabilities that gold, h_kl and uld sort")
    reverse_kl: bool = Field(False, description="published flag: the same as direction='reverse'")
    exact_token_match_only: bool = Field(False, description="reference modes: leave out chunks whose bytes differ")
    kl_loss_weight: float = Field(1.0, description="factor of the distillation loss")
    ce_loss_scale: float = Field(1.0, description="factor of cross-entropy")
    dynamic_loss_scaling: bool = Field(False, description="scale distillation to cross-entropy, one ratio per step")
    student_vocab_size: int | None = Field(None, description="student ids; default: as the head says")
    teacher_vocab_size: int | list[int] | None = Field(None, description="teacher ids, or one number per teacher")
    allow_inexact: bool = Field(False, description="corrected modes: keep chunks whose bytes differ")
    chunk_weight: float = Field(1.0, description="boundary_kl: factor of the chunk term")
    direction: Direction = Field("forward", description="forward: KL(teacher||student); reverse; jsd")
    jsd_beta: float = Field(0.5, description="M = (1 - beta) student + beta teacher; 0: forward, 1: reverse")
    jsd_rescale: bool = Field(False, description="divide JSD by beta (1 - beta); needed within .05 of the ends")
    jsd_patience: int = Field(20, description="steps in a row with disjoint models before the run is stopped")
    entry_clip: float | None = Field(None, description="most that one vocabulary entry may add")
    topk: int | None = Field(None, description="same-vocabulary teachers: tokens kept besides a tail bucket")
    topk_by: ChosenBy = Field("teacher", description="whose most likely tokens those are")
    teacher_combination: Combination = Field("sum", description="how several teachers are combined")
    teacher_weights: list[float] | None = Field(None, description="static weights; default: equal, summing to 1")
    teacher_scoring: Scoring = Field("static", description="per-sample weights softmax(alpha * score) by this score")
    scoring_alpha: float = Field(1.0, description="sharpness of scored weights")
    dynamic_scaling_source: ScalingSource = Field("running", description="where the step's ratio comes from")
    dynamic_scaling_decay: float = Field(0.9, description="decay of the running estimate")
    learnable_projection: bool = Field(False, description="train the projection's weights with the student")
    block_rows: int | None = Field(
        None, description="rows that pass through the heads at a time; default: 512, with kernels as memory allows"
    )
    fast_path: FastPath = Field("auto", description="auto: kernels on CUDA where they know the mode; off; force")

    @model_validator(mode="after")
    def _consistent(self) -> CrossTokenizerDistillationLossConfig:
        try:
            flagged = mode_from_flags(self.gold_loss, self.xtoken_loss)
            if flagged is not None and "mode" in self.model_fields_set and self.mode != flagged:
                raise ConfigError(
                    f"mode is {self.mode!r} but gold_loss and xtoken_loss select {flagged!r}; give only one"
                )
            settings = LossSettings.from_any(self.model_dump())
        except ConfigError as error:
            raise ValueError(str(error)) from error
        object.__setattr__(self, "mode", settings.mode)
        object.__setattr__(self, "direction", settings.direction)
        return self
