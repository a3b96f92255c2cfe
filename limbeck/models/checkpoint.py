"""Models and trainers on disk: weights as a standard transformers folder, the rest as state without pickle.

`Checkpoint` knows what lies where in the folder of one step; which steps are kept, and that a kill damages none,
is the business of ``limbeck.utils.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from limbeck.distributed.comm import Comm
from limbeck.errors import CheckpointError
from limbeck.losses.contract import State
from limbeck.models.causal import is_lora, unwrap
from limbeck.models.language_model import LanguageModel
from limbeck.models.lora import merged_model
from limbeck.models.trainer import Trainer
from limbeck.utils.files import follow_umask
from limbeck.utils.state import fitting, load_state, save_state

ADAPTER = "adapter"
"""Folder inside of a LoRA run's weights that peft reads."""


class Checkpoint:
    """The folder of one step. Every rank makes the same calls.

    policy/weights      a transformers folder with its tokenizer, whole from any layout, adapters merged; they also lie
                        in its folder ``adapter``, as peft reads them
    policy/optimizer    the trainer's state; may be read under another layout
    train_state/shared  what the ranks keep together, each its shards; missing where a run keeps nothing so
    train_state/rank_N  what each rank keeps for itself
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.weights = self.folder / "policy" / "weights"
        self.optimizer = self.folder / "policy" / "optimizer"
        self._shared = self.folder / "train_state" / "shared"

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer lies: with the weights, or beside them."""
        beside = self.folder / "policy" / "tokenizer"
        return beside if beside.is_dir() and not (self.weights / "tokenizer.json").is_file() else self.weights

    def save(self, model: LanguageModel, trainer: Trainer | None, *, shared: State, own: State) -> None:
        """Write everything; ``own`` is what this rank keeps for itself."""
        save_policy(model, trainer, self.weights, self.optimizer)
        if shared:
            save_state(self._shared, shared)
        save_state(self._rank(Comm.world().rank), own, local=True)

    def shared(self, template: State | None = None) -> State:
        """State that the ranks kept together; ``template``: see ``load_state``."""
        state: State = load_state(self._shared, template=template)
        return state

    def own(self) -> State:
        """State that this rank kept. A run that has grown reads what every rank knows: positions are counted over
        all."""
        rank = self._rank(Comm.world().rank)
        state: State = load_state(rank if rank.is_dir() else self._rank(0), local=True)
        return state

    def _rank(self, number: int) -> Path:
        return self.folder / "train_state" / f"rank_{number}"


@contextmanager
def _quiet() -> Iterator[None]:
    """The library's own bar would tear the run's progress bar apart."""
    from transformers.utils import logging

    bars_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars_enabled:
            logging.enable_progress_bar()


def save_weights(
    model: nn.Module,
    path: str | Path,
    tokenizer: Any = None,
    tokenizer_path: str | Path | None = None,
    *,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Save a causal model in the type of its parameters; adapters are merged, and lie beside it in ``adapter``. The
    model itself stays as it is.

    ``state``: whole weights by name, for a model whose own are shards.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    plain: Any = merged_model(model, state) if is_lora(model) else model
    with _quiet():
        # `merged_model` has put the state of an adapter run into `plain` already
        plain.save_pretrained(folder, **({} if state is None or is_lora(model) else {"state_dict": state}))
        if is_lora(model):
            save_adapter(model, folder / ADAPTER, state)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder if tokenizer_path is None else tokenizer_path)
    follow_umask(folder)


def save_policy(
    model: LanguageModel,
    trainer: Trainer | None,
    weights_path: str | Path,
    optimizer_path: str | Path | None = None,
    tokenizer_path: str | Path | None = None,
) -> None:
    """Weights as a folder that ``from_pretrained`` loads, and the trainer's state where asked for. Collective."""
    # on every rank, though rank 0 alone writes: gathering is collective
    whole = model.sharding.full_state()
    if Comm.world().rank == 0:
        save_weights(model.model, weights_path, model.tokenizer, tokenizer_path, state=whole)
    if optimizer_path is not None:
        save_state(optimizer_path, FROZEN if trainer is None else trainer.state_dict())


def whole_weights(model: LanguageModel) -> dict[str, Tensor]:
    """All weights by the plain causal model's names, adapters merged, each once, in main memory of rank 0; none on the
    others. Collective."""
    whole = model.sharding.full_state()
    if Comm.world().rank != 0:
        return {}
    if is_lora(model.model):
        whole = merged_model(model.model, whole).state_dict()
    named = unwrap(model.model).state_dict() if whole is None else whole
    by_pointer: dict[int, tuple[str, Tensor]] = {}
    for name, value in named.items():
        # tied weights are one tensor under two names
        by_pointer.setdefault(value.data_ptr(), (name, value))
    return {name: value.detach().cpu().contiguous() for name, value in by_pointer.values()}


def save_adapter(model: Any, folder: Path, state: dict[str, Tensor] | None) -> None:
    """Adapters as peft's own folder. ``state``: whole weights by the causal model's names, where its own are shards."""
    whole = None if state is None else {f"base_model.model.{name}": value for name, value in state.items()}
    # False: embeddings are not trained beside adapters unless named, and asking for them would ask the hub
    model.save_pretrained(folder, state_dict=whole, save_embedding_layers=False)
    # peft's card is a form to be filled in
    (folder / "README.md").unlink(missing_ok=True)


FROZEN: State = {"optimizer": None, "scheduler": None, "adapter": None, "steps": 0}
"""The state of a model without a trainer."""


def load_trainer(trainer: Trainer | None, path: str | Path) -> None:
    """Go on from a stored state; the weights come with the model. Collective."""
    where = f"train state {str(path)!r}"
    if trainer is None:
        raise CheckpointError(f"{where} belongs to a model that is trained; leave optimizer_path out for a frozen one")
    state = load_state(path, template=trainer.template())
    with fitting(where):
        trainer.load_state_dict(state, where)
