"""From rows of the three channels to tensors. Every key is there whatever the data holds, with zero rows if need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from limbeck.align import AlignmentBatch
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.errors import TraceError
from limbeck.traces.collate.rows import HintRow, IntArray, PairRow, PolicyRow

Channel = Literal["policy", "hint", "preference"]


class ComposerBatch(dict[str, Any]):
    """The collated batch: a dict of tensors and lists; ``channel`` gives one channel in the form that losses read.

    The channels have different numbers of rows and widths. ``skipped`` counts what was left out, by reason.
    """

    def channel(self, name: Channel) -> BatchedDataDict[Any]:
        """One channel with the names of a training batch: ``input_ids, input_lengths, token_mask, sample_mask, idx``.

        ``hint`` adds ``teacher_*``, ``alignment_*`` and ``site_weight``. ``preference`` has two rows per pair, the
        chosen one first, with ``pair_side`` (+1, -1) and ``pair_weight``.
        """
        if name == "policy":
            return BatchedDataDict(self._policy())
        if name == "hint":
            return BatchedDataDict(self._hint())
        if name == "preference":
            return BatchedDataDict(self._preference())
        raise TraceError(f"there is no channel {name!r}; expected policy, hint or preference")

    def _policy(self) -> dict[str, Any]:
        same = ("input_ids", "input_lengths", "sample_mask", "rewards", "response_weights", "group_index")
        return {
            **{key: self[key] for key in same},
            "token_mask": self["response_mask"],
            "behavior_logprobs": self["behavior_logprobs"],
            "behavior_valid": self["behavior_valid"],
            "idx": list(range(len(self["input_ids"]))),
        }

    def _hint(self) -> dict[str, Any]:
        ids, index = self["sdpo_student_input_ids"], self["student_response_idx"]
        mask = torch.zeros_like(ids)
        rows, columns = self["student_response_valid"].nonzero(as_tuple=True)
        mask[rows, index[rows, columns]] = 1
        alignment = {k.removeprefix("sdpo_"): v for k, v in self.items() if k.startswith("sdpo_alignment_")}
        return {
            "input_ids": ids,
            "input_lengths": self["sdpo_student_lengths"],
            "token_mask": mask,
            "sample_mask": (self["site_weight"] > 0).float(),
            "teacher_input_ids": self["ctx_teacher_input_ids"],
            "teacher_input_lengths": self["ctx_teacher_lengths"],
            "teacher_token_mask": self["sdpo_loss_mask"],
            **alignment,
            "site_weight": self["site_weight"],
            "idx": list(range(len(ids))),
        }

    def _preference(self) -> dict[str, Any]:
        pairs = len(self["dpo_weights"])

        def both(name: str) -> Tensor:
            sides = [self[f"dpo_{side}_{name}"] for side in ("chosen", "rejected")]
            if sides[0].dim() == 1:
                return torch.stack(sides, 1).reshape(-1)
            width = max(side.shape[1] for side in sides)
            fill = self["pad_token_id"] if name == "input_ids" else 0
            padded = [torch.nn.functional.pad(s, (0, width - s.shape[1]), value=fill) for s in sides]
            return torch.stack(padded, 1).reshape(2 * pairs, width)

        return {
            "input_ids": both("input_ids"),
            "input_lengths": both("lengths"),
            "token_mask": both("response_mask"),
            "sample_mask": torch.ones(2 * pairs),
            "pair_side": torch.tensor([1.0, -1.0]).repeat(pairs),
            "pair_weight": self["dpo_weights"].repeat_interleave(2),
            "idx": list(range(2 * pairs)),
        }


def tensors(
    policy: Sequence[PolicyRow],
    hints: Sequence[tuple[int, HintRow]],
    pairs: Sequence[tuple[int, PairRow]],
    pad_ids: tuple[int, int],
    multiple: int,
    ignore: int,
) -> ComposerBatch:
    """The batch of all rows; hints and pairs come with the number of their trace's policy row.

    Args:
        pad_ids: of the student and the hinted teacher.
        multiple: widths are rounded up to it.
        ignore: fills target ids where there is no target.
    """
    student, teacher = (Padder(pad_id, multiple) for pad_id in pad_ids)
    batch = ComposerBatch(policy_tensors(policy, student))
    batch |= hint_tensors([hint for _, hint in hints], [row for row, _ in hints], policy, (student, teacher), ignore)
    batch |= preference_tensors([pair for _, pair in pairs], [row for row, _ in pairs], student)
    batch["pad_token_id"] = student.pad_id
    return batch


class Padder:
    """Right padding to a common width, rounded up to a multiple; an empty channel keeps one column."""

    def __init__(self, pad_id: int, multiple: int = 1) -> None:
        self.pad_id, self.multiple = pad_id, multiple

    def width(self, lengths: Sequence[int]) -> int:
        return -(-max([*lengths, 1]) // self.multiple) * self.multiple

    def ids(self, name: str, rows: Sequence[IntArray]) -> dict[str, Tensor]:
        """``{name}input_ids``, ``{name}attention_mask`` and the lengths; masks come from lengths, never from ids."""
        lengths = [len(row) for row in rows]
        width = self.width(lengths)
        ids = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        size = torch.tensor(lengths, dtype=torch.int64)
        mask = (torch.arange(width) < size[:, None]).long()
        key = f"{name}lengths" if name else "input_lengths"
        return {f"{name}input_ids": torch.from_numpy(ids), f"{name}attention_mask": mask, key: size}


def scattered(
    shape: tuple[int, int], positions: Sequence[IntArray], values: Sequence[Any], dtype: type, fill: float = 0
) -> Tensor:
    """``shape`` filled with ``fill``; row i holds ``values[i]`` at ``positions[i]``."""
    out: npt.NDArray[Any] = np.full(shape, fill, dtype=dtype)
    for i, (where, what) in enumerate(zip(positions, values, strict=True)):
        out[i, where] = what
    return torch.from_numpy(out)


def policy_tensors(rows: Sequence[PolicyRow], pad: Padder) -> dict[str, Any]:
    """Keys of the policy channel, ``B`` rows."""
    out: dict[str, Any] = pad.ids("", [row.ids for row in rows])
    shape = (len(rows), out["input_ids"].shape[1])
    positions = [row.positions for row in rows]
    known = [~np.isnan(row.logprobs) for row in rows]
    groups = list(dict.fromkeys(row.group_id for row in rows if row.group_id is not None))
    rewarded = [row.reward is not None for row in rows]
    out["response_mask"] = scattered(shape, positions, [1] * len(rows), np.int64)
    out["response_weights"] = scattered(shape, positions, [row.weights for row in rows], np.float32)
    out["behavior_logprobs"] = scattered(shape, positions, [np.nan_to_num(row.logprobs) for row in rows], np.float32)
    out["behavior_valid"] = scattered(shape, positions, known, np.bool_)
    out["rewards"] = torch.tensor([row.reward or 0.0 for row in rows], dtype=torch.float32)
    out["reward_valid"] = torch.tensor(rewarded, dtype=torch.bool)
    used = [bool(len(row.positions)) and ok for row, ok in zip(rows, rewarded, strict=True)]
    out["sample_mask"] = torch.tensor(used, dtype=torch.float32)
    index = [-1 if row.group_id is None else groups.index(row.group_id) for row in rows]
    out["group_index"] = torch.tensor(index, dtype=torch.int64)
    out["trace_ids"] = [row.trace_id for row in rows]
    out["group_ids"] = [row.group_id for row in rows]
    return out


def hint_tensors(
    rows: Sequence[HintRow],
    traces: Sequence[int],
    policy: Sequence[PolicyRow],
    pads: tuple[Padder, Padder],
    ignore: int,
) -> dict[str, Any]:
    """Keys of the hint channel, ``N`` rows. ``traces``: the policy row of each hint's trace."""
    out: dict[str, Any] = pads[0].ids("sdpo_student_", [row.student_ids for row in rows])
    out |= pads[1].ids("ctx_teacher_", [row.teacher_ids for row in rows])
    for side in ("student", "teacher"):
        ids = [getattr(row, f"{side}_ids") for row in rows]
        positions = [getattr(row, f"{side}_positions") for row in rows]
        out |= _target_tensors(side, ids, positions, ignore)
    teacher_shape = (len(rows), out["ctx_teacher_input_ids"].shape[1])
    out["sdpo_loss_mask"] = scattered(teacher_shape, [r.teacher_positions for r in rows], [1] * len(rows), np.int64)
    weights = torch.tensor([row.target.weight for row in rows], dtype=torch.float32)
    valid = out["student_response_valid"]
    out["site_weight"] = weights
    out["weights"] = valid.float() * (weights / valid.sum(1).clamp(min=1))[:, None]
    widths = [out[f"{name}_input_ids"].shape[1] for name in ("sdpo_student", "ctx_teacher")]
    alignment = AlignmentBatch.from_chunks([row.chunks for row in rows], *widths)
    out |= alignment.as_dict("sdpo_alignment_")
    out["site_row"] = torch.tensor(list(traces), dtype=torch.int64)
    in_row = [
        row.uncut and policy[trace].from_start and len(row.student_ids) <= len(policy[trace].ids)
        for row, trace in zip(rows, traces, strict=True)
    ]
    out["site_in_row"] = torch.tensor(in_row, dtype=torch.bool)
    out["site_target"] = torch.tensor([row.target.message for row in rows], dtype=torch.int64)
    compared = [(row.compared, row.said) for row in rows]
    out["site_compared"] = torch.tensor(compared, dtype=torch.int64).reshape(-1, 2)
    out["site_info"] = [vars(row.target).copy() for row in rows]
    return out


def _target_tensors(
    side: str, ids: Sequence[IntArray], positions: Sequence[IntArray], ignore: int
) -> dict[str, Tensor]:
    """Positions of the target's tokens, of the rows that predict them, and the tokens themselves: ``[N, K]``."""
    shape = (len(positions), max([*(len(p) for p in positions), 1]))
    columns = [np.arange(len(p)) for p in positions]

    def padded(values: Callable[[int], Any], fill: int) -> Tensor:
        return scattered(shape, columns, [values(i) for i in range(len(positions))], np.int64, fill)

    index = padded(lambda i: positions[i], -1)
    return {
        f"{side}_response_idx": index,
        f"{side}_response_valid": index >= 0,
        f"{side}_pred_pos": (index - 1).clamp(min=-1),
        "target_ids" if side == "student" else "teacher_target_ids": padded(lambda i: ids[i][positions[i]], ignore),
    }


def preference_tensors(rows: Sequence[PairRow], traces: Sequence[int], pad: Padder) -> dict[str, Any]:
    """Keys of the preference channel, ``P`` rows per side."""
    out: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        ids = [getattr(row, f"{side}_ids") for row in rows]
        positions = [getattr(row, f"{side}_positions") for row in rows]
        out |= pad.ids(f"dpo_{side}_", ids)
        shape = (len(rows), out[f"dpo_{side}_input_ids"].shape[1])
        out[f"dpo_{side}_response_mask"] = scattered(shape, positions, [1] * len(rows), np.int64)
    out["dpo_weights"] = torch.tensor([row.pair.weight for row in rows], dtype=torch.float32)
    out["dpo_row"] = torch.tensor(list(traces), dtype=torch.int64)
    out["dpo_info"] = [
        {"trace_id": row.pair.trace_id, "message_index": row.pair.message_index, "provenance": row.pair.provenance}
        for row in rows
    ]
    return out
