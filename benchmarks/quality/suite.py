"""The quality benchmark: students from scratch, a teacher that has read more, one arm per objective, several seeds.

    PYTHONPATH=. python benchmarks/quality/suite.py CORPUS WORK [--groups core parts ...] [--seeds 1 2 3]
        [--tokenizers FOLDER] [--parallel 6] [--minutes 9]
    PYTHONPATH=. python benchmarks/quality/suite.py CORPUS WORK --pairs coarse fine --arms ce tree_kl

CORPUS is what `corpus.py` wrote; `FOLDER/{qwen3,llama3_2,gemma3}` hold published tokenizers for the pairs that
need them (without the option those are left out). Everything runs through `limbeck train`, `limbeck cache` and
`limbeck eval`: the teachers, beside them the arms that need none, then the others. A finished run is a line of
`WORK/results.jsonl`, and is not repeated; what does not begin within `--minutes` waits for the next call. `tables.py`
draws the results. `--tiny` runs the same on a processor in minutes, with models too small to say anything; `--small`
is a benchmark of its own that a processor can make, with small models of little text.

Measured of every student: bits per byte by domain and class of token, the probability on numerals where a numeral
follows, and the share of held-out sums, differences and products that it writes right.

All of it on one GPU, some 320 runs in calls of ten minutes, each of which goes on where the last one stopped:

    PYTHONPATH=. python benchmarks/quality/suite.py CORPUS WORK --tokenizers FOLDER --parallel 14 --minutes 8
    PYTHONPATH=. python benchmarks/quality/tables.py --all benchmarks/quality/{results,real}.jsonl WORK/results.jsonl

Processes take turns on a GPU; where `nvidia-cuda-mps-control -d` may be started, their kernels run side by side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import command, origin
from benchmarks.quality.corpus import SMALL_DOMAINS, read_texts, write_small, write_texts
from benchmarks.quality.probes import probe

Key = tuple[str, str, int]
"""Pair, arm, seed."""
Row = dict[str, Any]

PROSE = ("english", "chinese", "japanese", "russian", "wiki")
FORMAL = ("code", "gsm8k", "arithmetic")
BOARD_DOMAINS = ("docstrings", "code")

TEACHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bpe_32k": ("bpe_32k", PROSE + FORMAL),
    "bpe_8k": ("bpe_8k", PROSE + FORMAL),
    "slim_32k": ("bpe_32k", PROSE + FORMAL),
    "slim_8k": ("bpe_8k", PROSE + FORMAL),
    "prose": ("bpe_32k", PROSE),
    "formal": ("bpe_32k", FORMAL),
    "qwen3": ("qwen3", PROSE + FORMAL),
    "gemma3": ("gemma3", PROSE + FORMAL),
    "bpe_2k": ("bpe_2k", SMALL_DOMAINS),
    "bpe_512": ("bpe_512", SMALL_DOMAINS),
    "english": ("bpe_2k", ("english",)),
    "gsm8k": ("bpe_2k", ("gsm8k",)),
    "board_2k": ("bpe_2k", BOARD_DOMAINS),
    "board_512": ("bpe_512", BOARD_DOMAINS),
}
"""Tokenizer and domains of every teacher."""

STUDENT = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
TEACHER = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12}
SHORT = STUDENT | {"num_hidden_layers": 4}
SMALL_TEACHER = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL_STUDENT = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
CONTEXT = 640
ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Sizes:
    """Steps and documents per step of teachers and students; their shapes and learning rates; rows that pass through
    heads at a time."""

    teacher_steps: int
    teacher_documents: int
    student_steps: int
    student_documents: int
    teacher: dict[str, int] = field(default_factory=TEACHER.copy)
    student: dict[str, int] = field(default_factory=STUDENT.copy)
    teacher_rate: float = 6e-4
    student_rate: float = 1e-3
    block_rows: int = 4096

    @property
    def said(self) -> list[int]:
        """As a row of the results names them."""
        return [self.teacher_steps, self.teacher_documents, self.student_steps, self.student_documents]


@dataclass(frozen=True)
class Pair:
    """A student's tokenizer, who teaches it, how many bytes of every domain of the student's text it reads (None: all),
    what is not as large as in the other pairs, and whether text and tokenizers are those of `leaderboard.py`."""

    student: str
    teachers: tuple[str, ...]
    domain_bytes: int | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    board: bool = False


LITTLE_BYTES = 40_000
LITTLE: dict[str, Any] = asdict(Sizes(600, 32, 600, 8, STUDENT, SHORT, 1.5e-3, 2e-3))
"""A student of four layers that reads 320 kB eighteen times; a teacher of six such layers that reads 23 MB once. So
what the teacher has ahead is text, far more than it is size."""
LONG = LITTLE | {"student_steps": 1800}

SMALL: dict[str, Any] = asdict(Sizes(500, 8, 250, 4, SMALL_TEACHER, SMALL_STUDENT, 3e-3, 3e-3))
"""What a processor trains: a student of .3 million parameters in half a minute, a teacher of .9 million in minutes."""

PAIRS = {
    "coarse": Pair("bpe_8k", ("bpe_32k",)),
    "fine": Pair("bpe_32k", ("bpe_8k",)),
    "same": Pair("bpe_8k", ("bpe_8k",)),
    "little_coarse": Pair("bpe_8k", ("slim_32k",), LITTLE_BYTES, LITTLE),
    "little_fine": Pair("bpe_32k", ("slim_8k",), LITTLE_BYTES, LITTLE),
    "little_same": Pair("bpe_8k", ("slim_8k",), LITTLE_BYTES, LITTLE),
    "little_digits": Pair("llama3_2", ("qwen3",), LITTLE_BYTES, LITTLE),
    "little_gemma": Pair("bpe_8k", ("gemma3",), LITTLE_BYTES, LITTLE),
    "long_coarse": Pair("bpe_8k", ("slim_32k",), LITTLE_BYTES, LONG),
    "long_fine": Pair("bpe_32k", ("slim_8k",), LITTLE_BYTES, LONG),
    "little_prose": Pair("bpe_8k", ("prose",), LITTLE_BYTES, LITTLE),
    "little_formal": Pair("bpe_8k", ("formal",), LITTLE_BYTES, LITTLE),
    "little_both": Pair("bpe_8k", ("prose", "formal"), LITTLE_BYTES, LITTLE),
    "small_coarse": Pair("bpe_512", ("bpe_2k",), sizes=SMALL),
    "small_fine": Pair("bpe_2k", ("bpe_512",), sizes=SMALL),
    "small_same": Pair("bpe_512", ("bpe_512",), sizes=SMALL),
    "small_long": Pair("bpe_512", ("bpe_2k",), sizes=SMALL | {"student_steps": 900}),
    "small_two": Pair("bpe_512", ("bpe_2k", "bpe_512"), sizes=SMALL),
    "small_both": Pair("bpe_512", ("english", "gsm8k"), sizes=SMALL),
    "board_coarse": Pair("bpe_512", ("board_2k",), sizes=SMALL, board=True),
    "board_fine": Pair("bpe_2k", ("board_512",), sizes=SMALL, board=True),
}
"""Experiments. `coarse`: the teacher has 32,768 tokens, the student 8,192; `fine`: the other way round; `same`: both
8,192; the student reads 8 MB once. `little_...`: 40 kB of every domain, which the student reads many times; in `digits`
Qwen3's tokenizer (one digit a token) teaches Llama-3.2's (up to three), in `gemma` Gemma-3's (262,145 tokens) teaches
the one of 8,192; in `prose`, `formal` and `both` teachers have read one half of the domains each, alone and together.
`long_...`: three times as many readings of the same text.
`small_...`: two domains, vocabularies of 512 and 2,048 tokens, 60 kB of text for the student, which `small_long` reads
28 times. `board_...`: the same sizes with the text of `leaderboard.py`."""

PUBLISHED = ("little_digits", "little_gemma")
"""Pairs of published tokenizers."""

TREE = {"mode": "tree_kl", "ce_loss_scale": 1.0}
ARMS: dict[str, dict[str, Any] | None] = {
    "ce": None,
    "ce_150": None,
    "ce_300": None,
    "ce_450": None,
    "ce_500": None,
    "boundary_kl": {"mode": "boundary_kl"},
    "tree_kl": TREE,
    "tree_kl_soft": TREE | {"gate": "soft"},
    "tree_kl_.3": TREE | {"kl_loss_weight": 0.3},
    "tree_kl_counted": TREE | {"condition": "counted"},
    "tree_kl_counted_soft": TREE | {"condition": "counted", "gate": "soft"},
    "tree_kl_root": TREE | {"chunk_weight": 0.0, "inner_student_weight": 0.0, "inner_teacher_weight": 0.0},
    "tree_kl_no_chunk": TREE | {"chunk_weight": 0.0},
    "tree_kl_outer": TREE | {"inner_teacher_weight": 0.0},
    "tree_kl_inner_student": TREE | {"root_weight": 0.0, "chunk_weight": 0.0, "inner_teacher_weight": 0.0},
    "tree_kl_inner_teacher": TREE | {"root_weight": 0.0, "chunk_weight": 0.0, "inner_student_weight": 0.0},
    "tree_kl_chunk": TREE | {"root_weight": 0.0, "inner_student_weight": 0.0, "inner_teacher_weight": 0.0},
    "tree_kl_soft_.3": TREE | {"gate": "soft", "kl_loss_weight": 0.3},
    "tree_kl_ce_.3": TREE | {"ce_loss_scale": 0.3},
    "tree_kl_ce_0": TREE | {"ce_loss_scale": 0.0},
    "tree_kl_top64": TREE,
    "tree_kl_top256": TREE,
    "tree_kl_by_ce": TREE | {"teacher_scoring": "ce"},
    "tree_kl_select": TREE | {"teacher_combination": "select_teacher"},
    "boundary_kl_soft": {"mode": "boundary_kl", "gate": "soft"},
    "boundary_kl_no_chunk": {"mode": "boundary_kl", "chunk_weight": 0.0},
    "alm": {"mode": "alm"},
    "uld": {"mode": "uld"},
    "p_kl": {"mode": "p_kl"},
    "gold": {"mode": "gold"},
    "h_kl": {"mode": "h_kl"},
    "strict": {"mode": "strict"},
    "strict_full": {"mode": "strict", "strict_topk": None},
    "strict_rest_forward": {"mode": "strict", "strict_topk": None, "strict_rest": True, "direction": "forward"},
    "strict_span_.25": {"mode": "strict", "span_weight": 0.25},
    "simct": {"mode": "simct"},
    "escd": {"mode": "escd"},
    "bpm": {"mode": "bpm"},
    "bpm_forward": {"mode": "bpm", "direction": "forward"},
    "bpm_blanks": {"mode": "bpm", "mask_blanks": False},
    "partition": {"mode": "partition"},
    "partition_last": {"mode": "partition", "root_weight": 0.0},
}
"""Loss settings by arm; None: cross-entropy alone. Weights of divergence and cross-entropy are 1 where none is said, so
that `tree_kl_ce_.3` is what the project takes by default."""

LIGHT = (
    *("boundary_kl", "p_kl", "gold", "h_kl", "alm", "uld"),
    *("strict", "strict_span_.25", "simct", "escd", "bpm_forward", "partition"),
    *("tree_kl_soft", "tree_kl_root", "tree_kl_inner_student", "tree_kl_inner_teacher"),
    *("tree_kl_counted", "tree_kl_outer"),
    *("tree_kl_top64", "tree_kl_top256", "tree_kl_by_ce", "tree_kl_select"),
)
ARMS |= {f"{arm}_ce_.3": (ARMS[arm] or {}) | {"ce_loss_scale": 0.3} for arm in LIGHT}
"""The same beside cross-entropy of the weight that the default has: where a teacher is much better than the text
alone, that weight decides more than the objective does, and an arm that lacks it cannot be compared."""

STEPS = {"ce_150": 150, "ce_300": 300, "ce_450": 450, "ce_500": 500}
"""Arms that end sooner or later, each under a schedule of its own: cross-entropy alone may have its best number."""

CACHED = {"tree_kl_top64": 64, "tree_kl_top256": 256, "tree_kl_top64_ce_.3": 64, "tree_kl_top256_ce_.3": 256}
"""Arms whose teacher is a cache of so many most likely tokens."""

SMALL_GROUPS: dict[str, dict[str, Sequence[str]]] = {
    "small": {
        "small_coarse": ("ce", "ce_500", "tree_kl_ce_0", "tree_kl", "boundary_kl", "p_kl", "gold"),
        "small_fine": ("ce", "ce_500", "tree_kl_ce_0", "tree_kl", "boundary_kl"),
    },
    "small_long": {"small_long": ("ce", "ce_450", "tree_kl_ce_0", "tree_kl")},
    "small_objectives": {"small_coarse": ("strict", "strict_span_.25", "simct", "escd", "bpm_forward", "partition")},
    "small_parts": {"small_coarse": ("tree_kl_no_chunk", "tree_kl_root", "tree_kl_ce_.3")},
    "small_same": {"small_same": ("tree_kl", "tree_kl_ce_0"), "small_fine": ("p_kl", "gold")},
    "small_more": {
        "small_coarse": ("tree_kl_soft", "tree_kl_chunk", "tree_kl_inner_student", "h_kl", "uld", "alm"),
        "small_fine": ("strict", "bpm_forward", "escd", "simct", "partition", "tree_kl_inner_teacher", "tree_kl_soft"),
        "small_two": ("tree_kl",),
        "small_both": ("tree_kl", "tree_kl_by_ce"),
    },
}
"""With `--small`, in this order."""

ALONE = ("ce", "ce_300", "ce_150")
PUBLISHED_ARMS = ("boundary_kl_ce_.3", "p_kl_ce_.3", "gold_ce_.3", "h_kl_ce_.3", "alm_ce_.3", "uld_ce_.3")
RECENT_ARMS = (
    *("strict_ce_.3", "strict_span_.25_ce_.3", "bpm_forward_ce_.3", "escd_ce_.3", "simct_ce_.3", "partition_ce_.3"),
)
GROUPS: dict[str, dict[str, Sequence[str]]] = {
    "published": {
        "little_coarse": (*ALONE, "tree_kl_ce_.3", *PUBLISHED_ARMS),
        "little_fine": (*ALONE, "tree_kl_ce_.3", *PUBLISHED_ARMS),
    },
    "tokenizers": {
        "little_digits": (*ALONE, "tree_kl_ce_.3", *PUBLISHED_ARMS),
        "little_gemma": ("tree_kl_ce_.3", *PUBLISHED_ARMS),
        "little_same": ("tree_kl_ce_.3",),
    },
    "objectives": {"little_coarse": RECENT_ARMS, "little_fine": RECENT_ARMS},
    "once": {"coarse": ("ce", "tree_kl_ce_.3"), "fine": ("ce", "tree_kl_ce_.3")},
    "parts": {
        "little_coarse": (
            *("tree_kl_root_ce_.3", "tree_kl_inner_student_ce_.3", "tree_kl_top64_ce_.3", "tree_kl_top256_ce_.3"),
            "tree_kl_soft_ce_.3",
        ),
        "little_fine": (
            *("tree_kl_root_ce_.3", "tree_kl_inner_teacher_ce_.3", "tree_kl_top64_ce_.3", "tree_kl_top256_ce_.3"),
            "tree_kl_soft_ce_.3",
        ),
    },
    "ends": {
        "little_coarse": ("tree_kl_counted_ce_.3",),
        "little_fine": ("tree_kl_counted_ce_.3",),
        "little_digits": ("tree_kl_counted_ce_.3",),
        "little_gemma": ("tree_kl_counted_ce_.3", "tree_kl_outer_ce_.3"),
    },
    "teachers": {
        "little_prose": ("tree_kl_ce_.3",),
        "little_formal": ("tree_kl_ce_.3",),
        "little_both": ("tree_kl_ce_.3", "tree_kl_by_ce_ce_.3", "tree_kl_select_ce_.3"),
    },
    "weights": {
        "little_coarse": ("tree_kl", "tree_kl_ce_0", "boundary_kl", "p_kl", "gold"),
        "little_fine": ("tree_kl", "tree_kl_ce_0", "boundary_kl", "p_kl", "gold"),
        "little_digits": ("tree_kl", "p_kl", "gold"),
        "long_coarse": ("tree_kl", "tree_kl_ce_.3"),
        "long_fine": ("tree_kl", "tree_kl_ce_.3"),
        "coarse": ("tree_kl", "boundary_kl", "tree_kl_soft", "tree_kl_ce_0"),
        "fine": ("tree_kl", "boundary_kl", "tree_kl_soft", "tree_kl_ce_0"),
    },
}
"""What one call does, in this order, the most telling first: all seeds of a group come before the next group."""


def model(tokenizer: Path, shape: dict[str, int], steps: int, lr: float, batch: int) -> dict[str, Any]:
    """A Llama of that shape with random weights, trained under a cosine schedule."""
    return {
        "init": "random",
        "tokenizer": {"name": str(tokenizer)},
        "model_overrides": {
            "model_type": "llama",
            "tie_word_embeddings": True,
            "max_position_embeddings": CONTEXT,
            "num_key_value_heads": shape["num_attention_heads"],
            **shape,
        },
        "precision": "auto",
        "max_total_sequence_length": CONTEXT,
        "train_micro_batch_size": batch,
        "max_grad_norm": 1.0,
        "optimizer": {
            "name": "torch.optim.AdamW",
            "kwargs": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True},
        },
        "scheduler": schedule(steps),
    }


def schedule(steps: int, warmup: int | None = None) -> list[dict[str, Any]]:
    """So many steps of warm-up, by default a twentieth of all, then a cosine down to 0."""
    warmup = max(steps // 20 if warmup is None else warmup, 1)
    return [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.05, "total_iters": warmup}},
        {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": max(steps - warmup, 1)}},
        {"milestones": [warmup]},
    ]


def run_file(
    texts: Sequence[Path], policy: dict[str, Any], steps: int, documents: int, seed: int, folder: Path
) -> dict[str, Any]:
    """What all runs of the benchmark share."""
    return {
        "policy": policy,
        "data": {
            "train": [str(path) for path in texts],
            "append_eos": True,
            "max_input_seq_length": CONTEXT,
            "num_workers": 1,
        },
        "distillation": {
            "num_prompts_per_step": documents,
            "max_num_steps": steps,
            "max_num_epochs": 1000,
            "seed": seed,
        },
        "checkpointing": {"keep_top_k": 1},
        "logger": {"log_dir": str(folder), "tensorboard_enabled": False},
    }


PRELOADED = (
    "limbeck.algorithms.xtoken_off_policy_distillation",
    "limbeck.cli.evaluate",
    "limbeck.cli.train",
    "limbeck.evaluation.bits",
    "limbeck.report.run_page",
    "transformers.models.llama.modeling_llama",
)
"""What every run would import anew: half of the time of a run of some hundred small steps."""


def run_module(module: str, *arguments: str, log: Path) -> str:
    """Standard output of `python -m MODULE ARGUMENTS` in a process of its own; its messages go to a file.

    The process is forked from one that has imported everything and computed nothing."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*PRELOADED])
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.NamedTemporaryFile("r") as said:
        process = forks.Process(target=_as_command, args=(module, arguments, said.name, str(log)))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{module} {arguments[0]} ended with {process.exitcode}; see {log}")
        return said.read()


def _as_command(module: str, arguments: Sequence[str], out: str, log: str) -> None:
    for stream, path, mode in ((sys.stdout, out, "w"), (sys.stderr, log, "a")):
        with open(path, mode) as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def limbeck(*arguments: str, log: Path) -> str:
    """Standard output of a `limbeck` command; its messages go to a file."""
    return run_module("limbeck", *arguments, log=log)


def write_run(settings: dict[str, Any], folder: Path) -> str:
    """The run file of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def train(settings: dict[str, Any], folder: Path) -> int:
    """Runs a run file; seconds that it took."""
    start = time.time()
    limbeck("train", write_run(settings, folder), "-q", "--json", log=folder / "log")
    return round(time.time() - start)


def latest(folder: Path) -> Path:
    """Weights of a run's last checkpoint."""
    steps = sorted((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    if not steps:
        raise RuntimeError(f"{folder} has no checkpoint")
    return steps[-1] / "policy" / "weights"


# -- measures ----------------------------------------------------------------------------------------------------------


def measure(model: Path, files: Iterable[Path], log: Path, *more: str) -> Row:
    """Figures of a model or of a run's student on files: `measures` of texts by domain and class of token, `choices` of
    multiple choice, `answers` of what it writes; `more` are further arguments of `limbeck eval`."""
    data = [argument for path in files for argument in ("-d", str(path))]
    options = ("--context", str(CONTEXT), "--max-new-tokens", str(ANSWER_TOKENS), "--json", *more)
    return sorted_figures(json.loads(limbeck("eval", str(model), *data, *options, log=log)))


def sorted_figures(found: dict[str, Any]) -> Row:
    """What `limbeck eval --json` says of one model, by kind of file and name of file."""
    kept = {
        "text": ("measures", ("bpb", "bytes", "classes")),
        "choice": ("choices", ("acc", "acc_norm", "bpb", "documents")),
        "answers": ("answers", ("exact", "ended", "bpb", "documents")),
    }
    (own,) = found["models"].values()
    row: Row = {}
    for path, figures in own.items():
        name, keys = kept[found["files"][path]]
        row.setdefault(name, {})[Path(path).stem] = {key: figures[key] for key in keys}
    return row


def questions(documents: Iterable[str], each: int = 8, shown: int = 4) -> list[dict[str, str]]:
    """Prompts out of documents of `a + b = c` lines: `each` of a document, behind `shown` solved lines."""
    found = []
    for text in documents:
        lines = text.strip().split("\n")
        for last in range(shown, min(len(lines), (shown + 1) * each), shown + 1):
            asked, answer = lines[last].split(" =")
            before = "".join(line + "\n" for line in lines[last - shown : last])
            found.append({"prompt": f"{before}{asked} =", "answer": answer})
    return found


def held_out(corpus: Path, work: Path) -> list[Path]:
    """Files that every student is measured on: the texts, and where there is arithmetic sums to be worked out
    (`WORK/sums.jsonl`)."""
    files = sorted((corpus / "held_out").glob("*.jsonl"))
    solved, sums = corpus / "held_out" / "arithmetic.jsonl", work / "sums.jsonl"
    if solved not in files:
        return files
    sums.write_text("".join(json.dumps(row) + "\n" for row in questions(read_texts(solved))))
    return [*files, sums]


# -- runs --------------------------------------------------------------------------------------------------------------


def taught_by(teacher: str) -> Pair:
    """A pair of that teacher; all of them train it alike."""
    return next(pair for pair in PAIRS.values() if teacher in pair.teachers)


def computed_in() -> str:
    """What `precision: auto` means here."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


class Bench:
    """Runs of one corpus in one folder. What several of them need is made by the first, while the others wait."""

    def __init__(
        self,
        corpus: Path,
        work: Path,
        sizes: Sizes,
        eval_options: Sequence[str] = (),
        probed: bool = False,
        tokenizers: Path | None = None,
    ) -> None:
        self.corpus, self.work, self.sizes, self.tokenizers = corpus, work, sizes, tokenizers or corpus
        self.eval_options, self.probed = tuple(eval_options), probed
        work.mkdir(parents=True, exist_ok=True)
        self.files = held_out(corpus, work)
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._failed = Counter[str]()

    def _once(self, name: str, make: Callable[[Path], Any]) -> Path:
        """The folder of that name, which `make` fills if nobody has."""
        folder, done = self.work / name, self.work / f"{name}.done"
        with self._locks[name]:
            if not done.exists() and self._failed[name] > 1:
                raise RuntimeError(f"{name} could not be made")
            if not done.exists():
                self._failed[name] += 1
                make(folder)
                done.touch()
        return folder

    def sizes_of(self, pair: Pair) -> Sizes:
        """Sizes of a pair's runs, and of its teachers' training."""
        return self.sizes if self.sizes.student == TINY else replace(self.sizes, **pair.sizes)

    def tokenizer(self, name: str) -> Path:
        """A tokenizer of the corpus, or a published one."""
        own = self.corpus / name
        return own if own.exists() else self.tokenizers / name

    def teacher(self, name: str) -> Path:
        """Run folder of a teacher."""
        tokenizer, domains = TEACHERS[name]
        sizes = self.sizes_of(taught_by(name))
        steps, documents = sizes.teacher_steps, sizes.teacher_documents

        def make(folder: Path) -> None:
            policy = model(self.tokenizer(tokenizer), sizes.teacher, steps, sizes.teacher_rate, documents)
            texts = [self.corpus / "teacher" / f"{domain}.jsonl" for domain in domains]
            train(run_file(texts, policy, steps, documents, 1, folder), folder)

        return self._once(f"teacher_{name}", make)

    def texts(self, domain_bytes: int | None) -> list[Path]:
        """The student's files: all of its documents, or the first of every domain."""
        if domain_bytes is None:
            return sorted((self.corpus / "student").glob("*.jsonl"))

        def make(folder: Path) -> None:
            for path in (self.corpus / "student").glob("*.jsonl"):
                ends = itertools.accumulate(len(text.encode()) for text in read_texts(path))
                number = sum(end < domain_bytes for end in ends) + 1
                write_texts(read_texts(path)[:number], folder / path.name)

        return sorted(self._once(f"text_{domain_bytes}", make).glob("*.jsonl"))

    @staticmethod
    def steps(arm: str, sizes: Sizes) -> int:
        """Of a student."""
        return sizes.student_steps if sizes.student == TINY else STEPS.get(arm, sizes.student_steps)

    def settings(self, pair: str, arm: str, seed: int, folder: Path) -> dict[str, Any]:
        """Run file of a student."""
        own = PAIRS[pair]
        sizes = self.sizes_of(own)
        steps, documents = self.steps(arm, sizes), sizes.student_documents
        policy = model(self.tokenizer(own.student), sizes.student, steps, sizes.student_rate, documents)
        settings = run_file(self.texts(own.domain_bytes), policy, steps, documents, seed, folder)
        loss = ARMS[arm]
        if loss is None:
            return settings
        settings["teachers"] = [
            {
                "model_name": str(latest(self.teacher(name))),
                "tokenizer": {"name": str(self.tokenizer(TEACHERS[name][0]))},
                "precision": "auto",
                "max_total_sequence_length": CONTEXT,
            }
            for name in own.teachers
        ]
        # of several teachers, the arms say how they are weighed
        own_loss = {"block_rows": sizes.block_rows, "teacher_scoring": "static"}
        settings["loss_fn"] = own_loss | loss
        if arm in CACHED:
            settings["teachers"][0] |= {"cache": str(self.cache(pair, CACHED[arm], settings)), "cache_k": CACHED[arm]}
        return settings

    def cache(self, pair: str, k: int, settings: dict[str, Any]) -> Path:
        """The k most likely tokens of a pair's teacher at every position of the student's text."""

        def make(folder: Path) -> None:
            (teacher,) = settings["teachers"]
            own = settings | {"teachers": [teacher | {"cache": str(folder), "cache_k": k}]}
            aside = folder.with_name(f"{folder.name}_run")
            limbeck("cache", write_run(own, aside), "--json", log=aside / "log")

        return self._once(f"cache_{pair}_{k}", make)

    def run(self, pair: str, arm: str, seed: int) -> Row:
        """Trains one student, or the teacher of that name; what is measured comes later."""
        sizes = self.sizes_of(taught_by(arm) if pair == "teacher" else PAIRS[pair])
        row: Row = {"pair": pair, "arm": arm, "seed": seed, "sizes": sizes.said, "precision": computed_in()}
        if pair == "teacher":
            start = time.time()
            self.teacher(arm)
            return row | {"seconds": round(time.time() - start)}
        folder = self.folder(row)
        shutil.rmtree(folder, ignore_errors=True)
        row["seconds"] = train(self.settings(pair, arm, seed, folder), folder)
        return row

    def folder(self, row: Row) -> Path:
        """Run folder of a row."""
        name = f"teacher_{row['arm']}" if row["pair"] == "teacher" else f"{row['pair']}_{row['arm']}_{row['seed']}"
        return self.work / name

    def measured(self, row: Row) -> Row:
        """The row with its figures; a student's weights are not kept."""
        folder = self.folder(row)
        row |= measure(folder, self.files, folder / "log", *self.eval_options)
        if self.probed and row["pair"] != "teacher" and ARMS[row["arm"]] is not None:
            row["probes"] = {name: [value] for name, value in probe(folder).items()}
        if row["pair"] != "teacher":
            shutil.rmtree(folder / "checkpoints")
        return row


class Results:
    """Rows of a results file, and the clock of one call of a script."""

    def __init__(self, path: Path, minutes: float, **more: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._minutes, self._more, self._began = path, minutes, more, time.time()
        self._writing = threading.Lock()
        self.have = {(row["pair"], row["arm"], row["seed"]) for row in self.rows()}

    def rows(self) -> list[Row]:
        """What the file holds."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def report(self, row: Row) -> None:
        """Store a finished run and print its mean over the domains."""
        with self._writing, self.path.open("a") as file:
            file.write(json.dumps(row | self._more | {"command": command(), "origin": origin()}) + "\n")
        bits = [domain["bpb"] for domain in row["measures"].values()]
        written = "".join(f" {own['exact']:.1%} right" for own in row.get("answers", {}).values())
        print(f"{time.time() - self._began:6.0f} s", row["pair"], row["arm"], row["seed"],
              f"{sum(bits) / len(bits):.4f}{written} ({row['seconds']} s)", flush=True)  # fmt: skip

    def fill(self, keys: Iterable[Key], run: Callable[..., Row], measured: Callable[[Row], Row], parallel: int) -> None:
        """``measured(run(*key))`` for every key that has no row yet, as far as they can begin in time. What is measured
        leaves its place to the next run. A run that fails costs its own row alone, and is tried once more behind all
        others: beside fewer of them it may find the memory that it lacked."""
        left = [key for key in dict.fromkeys(keys) if key not in self.have]
        for _ in range(2):
            left = self._round(left, run, measured, parallel)

    def _round(
        self, keys: Sequence[Key], run: Callable[..., Row], measured: Callable[[Row], Row], parallel: int
    ) -> list[Key]:
        """One round of `fill`; the keys that failed."""
        failed = list[Key]()

        def fail(key: Key, error: RuntimeError) -> None:
            failed.append(key)
            print(*key, error, flush=True)

        def finish(key: Key, row: Row) -> None:
            try:
                self.report(measured(row))
            except RuntimeError as error:
                fail(key, error)

        def one(key: Key) -> None:
            if time.time() - self._began > 60 * self._minutes:
                return
            try:
                measurers.submit(finish, key, run(*key))
            except RuntimeError as error:
                fail(key, error)

        with ThreadPoolExecutor(max(parallel // 2, 1)) as measurers, ThreadPoolExecutor(parallel) as runners:
            list(runners.map(one, keys))
        return failed


def wanted_runs(groups: Sequence[Mapping[str, Sequence[str]]], seeds: Sequence[int]) -> list[Key]:
    """The first group's teachers, all arms that need none, then the groups (arms by pair) in turn, each behind the
    teachers of the next. In a group seeds are outermost: what is cut off is a seed of some arms, not an arm."""

    def runs(group: Mapping[str, Sequence[str]]) -> list[Key]:
        return [(pair, arm, seed) for seed in seeds for pair, arms in group.items() for arm in arms]

    def teachers(group: Mapping[str, Sequence[str]]) -> list[Key]:
        taught = [pair for pair, arms in group.items() if any(ARMS[arm] is not None for arm in arms)]
        return [("teacher", name, 1) for pair in taught for name in PAIRS[pair].teachers]

    alone = [run for group in groups for run in runs(group) if ARMS[run[1]] is None]
    ordered = [*teachers(groups[0]), *alone]
    for group, following in zip(groups, [*groups[1:], {}], strict=True):
        ordered += [*teachers(following), *runs(group)]
    return list(dict.fromkeys(ordered))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--groups", nargs="+", choices=[*GROUPS, *SMALL_GROUPS], help="default: all of their kind")
    parser.add_argument("--small", action="store_true", help="what a processor can make, an hour and more of it")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=["coarse", "fine"], help="with --arms")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="these in place of the groups")
    parser.add_argument("--tokenizers", type=Path, help="folder of published tokenizers; none: without their pairs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--sizes", nargs=4, type=int, default=[500, 32, 300, 16], metavar="N",
                        help="steps and documents per step of teachers, then of students")  # fmt: skip
    parser.add_argument("--probe", action="store_true", help="measure the parts of every student's loss at its end")
    parser.add_argument("--tiny", action="store_true", help="try the machinery: models of 2 x 64, two steps, few bytes")
    args = parser.parse_args()
    sizes = Sizes(2, 2, 2, 2, TINY, TINY) if args.tiny else Sizes(*args.sizes)
    most = ("--max-bytes", "2000", "--max-documents", "8") if args.tiny else ()
    if args.small:
        small = args.work / "corpus"
        if not (small / TEACHERS["bpe_2k"][0]).exists():  # what is written last
            write_small(args.corpus, small)
        args.corpus = small
    bench = Bench(args.corpus, args.work, sizes, most, args.probe, args.tokenizers)
    results = Results(args.work / "results.jsonl", args.minutes, parallel=args.parallel)
    every = SMALL_GROUPS if args.small else GROUPS
    groups = [dict.fromkeys(args.pairs, args.arms)] if args.arms else [every[name] for name in args.groups or every]
    if args.tokenizers is None:
        groups = [{name: arms for name, arms in group.items() if name not in PUBLISHED} for group in groups]
    results.fill(wanted_runs(groups, args.seeds), bench.run, bench.measured, args.parallel)


if __name__ == "__main__":
    main()
