"""Every form in which a run file has named a loss stands for the values that it stood for."""

from __future__ import annotations

from typing import Any

from tests.golden.forms import MODES, VALUES, load, resolved

DEFAULTS, FORMS = load()

GONE: dict[str, tuple[Any, ...]] = {
    "condition": ("cheap", "exact"),
    "gate": ("hard",),
    "mode": ("p_kl_norm",),
    **dict.fromkeys(("terminal_weight", "first_weight", "chunk_terms"), ()),
    **dict.fromkeys(("dynamic_scaling_source", "learnable_projection", "probe_every"), ()),
}
"""What was measured and has left: key -> the values that are refused now; none: the key itself."""


DIVERGENCE = ("jsd_beta", "jsd_rescale", "jsd_patience", "entry_clip")
MODES_OF_KEYS: dict[str, tuple[str, ...]] = {
    "direction": tuple(mode for mode in MODES if mode != "uld"),
    **dict.fromkeys(DIVERGENCE, tuple(mode for mode in MODES if mode not in ("uld", "p_kl", "gold", "h_kl"))),
    "allow_inexact": tuple(mode for mode in MODES if mode not in ("p_kl", "gold", "h_kl")),
    "exact_token_match_only": ("p_kl", "gold", "h_kl"),
    "vocab_topk": ("p_kl", "p_kl_norm"),
    "uncommon_topk": ("gold", "h_kl", "uld"),
    "chunk_weight": ("boundary_kl", "tree_kl", "partition"),
    "root_weight": ("tree_kl", "partition"),
    **dict.fromkeys(("inner_student_weight", "inner_teacher_weight", "condition"), ("tree_kl",)),
    **dict.fromkeys(("strict_topk", "strict_rest", "span_weight"), ("strict",)),
    "mask_blanks": ("bpm",),
}
"""Keys that belong to some modes: in a form of another mode they stood for nothing, and are refused unless they have
their default value, as in published run files whatever their flags select; that of the direction differs by mode."""


def foreign(values: dict[str, Any]) -> set[str]:
    """Keys that the mode of a resolved form has not."""
    return {key for key, modes in MODES_OF_KEYS.items() if values["mode"] not in modes}


def means_nothing(given: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether a form gave something to a mode that has no such thing."""
    if given.get("reverse_kl") and "direction" in foreign(values):
        return True
    return any(key in given and (key == "direction" or given[key] != DEFAULTS[key]) for key in foreign(values))


def is_gone(values: dict[str, Any]) -> bool:
    """Whether a form stood for something that has left."""
    return any(key in GONE and (not GONE[key] or value in GONE[key]) for key, value in values.items())


def every_key(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Stored differences from the defaults, written out; None: refused."""
    if values is None or is_gone(values):
        return None
    return {key: value for key, value in {**DEFAULTS, **values}.items() if GONE.get(key) != ()}


def expected(given: dict[str, Any], values: dict[str, Any] | None) -> dict[str, Any] | None:
    """The values of the keys that the mode has; None: refused."""
    stored = None if is_gone(given) else every_key(values)
    if stored is None or means_nothing(given, stored):
        return None
    return {key: value for key, value in stored.items() if key not in foreign(stored)}


def test_every_form_resolves_to_the_values_that_it_had() -> None:
    assert len(FORMS) > 1000
    wrong = [
        (where, given, found, stored)
        for where, given, values in FORMS
        if (found := resolved(where, given)) != (stored := expected(given, values))
    ]
    assert wrong == []


def test_every_key_is_tried() -> None:
    assert set(DEFAULTS) == {*VALUES, "mode", "gold_loss", "xtoken_loss"}
