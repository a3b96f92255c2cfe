"""The quality benchmark's machinery: what is run, in which order and only once; what tables say of it."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import limbeck
from benchmarks.quality import leaderboard, tables, trl_gold
from benchmarks.quality import sums as digits
from benchmarks.quality.corpus import SMALL_BYTES, SMALL_DOMAINS, read_texts, write_parts, write_small
from benchmarks.quality.corpus import write_texts as write_documents
from benchmarks.quality.real import FIRST, Real, arm_amounts, best_rates, cut, sweep_of, write_texts
from benchmarks.quality.real import wanted_runs as wanted_real_runs
from benchmarks.quality.suite import (
    ARMS,
    BOARD_DOMAINS,
    CACHED,
    GROUPS,
    LITTLE,
    PAIRS,
    PUBLISHED,
    SMALL_GROUPS,
    STEPS,
    STUDENT,
    TEACHERS,
    TINY,
    Bench,
    Results,
    Sizes,
    questions,
    run_file,
    run_module,
    sorted_figures,
    wanted_runs,
)
from limbeck.algorithms.config import MasterConfig
from limbeck.losses import CrossTokenizerDistillationLossConfig
from limbeck.models.loading import load_model
from tests.helpers import tokenizers

QUALITY = Path(tables.__file__).parent


def _row(pair: str, arm: str, seed: int = 1, bits: float = 2.0, **more: Any) -> dict[str, Any]:
    digits = {"bpb": bits, "bytes": 10, "tokens": 5, "mass": bits / 10}
    measures = {"a": {"bpb": bits, "bytes": 10, "classes": {"digits": digits}}, "b": {"bpb": bits + 1, "classes": {}}}
    origin = {"origin": {"device": "one", "versions": {}, "date": "2026-11-16"}}
    return (
        {"pair": pair, "arm": arm, "seed": seed, "seconds": 1, "sizes": [1, 2, 3, 4], "measures": measures}
        | origin
        | more
    )


# -- what is run -------------------------------------------------------------------------------------------------------


def test_every_arm_of_every_group_exists_and_is_a_setting_of_the_loss() -> None:
    for group in (GROUPS | SMALL_GROUPS).values():
        for pair, arms in group.items():
            assert set(arms) <= set(ARMS)
            assert set(PAIRS[pair].teachers) <= set(TEACHERS)
    for settings in ARMS.values():
        CrossTokenizerDistillationLossConfig(**(settings or {}))
    assert set(CACHED) | set(STEPS) <= set(ARMS)


def test_all_pairs_of_a_teacher_train_it_alike(corpus: Path, tmp_path: Path) -> None:
    bench = Bench(corpus, tmp_path / "work", Sizes(5, 4, 3, 2))
    for name in TEACHERS:
        own = [bench.sizes_of(pair) for pair in PAIRS.values() if name in pair.teachers]
        assert len({str((sizes.teacher, sizes.said[:2])) for sizes in own}) == 1, name
    own = {"bpe_8k", "bpe_32k"}
    for name in PUBLISHED:
        assert not own >= {PAIRS[name].student, *(TEACHERS[teacher][0] for teacher in PAIRS[name].teachers)}


def test_teachers_come_a_group_ahead_and_arms_without_one_before_all_others() -> None:
    runs = wanted_runs([{"coarse": ["ce", "tree_kl"]}, {"little_both": ["tree_kl"], "fine": ["ce"]}], [1, 2])
    assert runs == [
        ("teacher", "bpe_32k", 1),
        *(("coarse", "ce", 1), ("coarse", "ce", 2), ("fine", "ce", 1), ("fine", "ce", 2)),
        *(("teacher", "prose", 1), ("teacher", "formal", 1)),
        *(("coarse", "tree_kl", seed) for seed in (1, 2)),
        *(("little_both", "tree_kl", seed) for seed in (1, 2)),
    ]


def test_a_second_call_runs_what_is_missing_and_a_second_failure_costs_its_own_row(tmp_path: Path) -> None:
    path, begun = tmp_path / "results.jsonl", list[tuple[str, str, int]]()

    def run(pair: str, arm: str, seed: int) -> dict[str, Any]:
        begun.append((pair, arm, seed))
        if (arm == "gold" and len(begun) < 5) or (arm == "uld" and len(begun) < 4):
            raise RuntimeError("lost")
        return {"pair": pair, "arm": arm, "seed": seed, "seconds": 0}

    def measured(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"measures": {"a": {"bpb": 1.0}}}

    keys = [("coarse", "ce", 1), ("coarse", "gold", 1), ("coarse", "uld", 1)]
    Results(path, minutes=1).fill(keys, run, measured, parallel=1)
    assert [row["arm"] for row in Results(path, 1).rows()] == ["ce", "uld"]
    assert begun == [*keys, keys[1], keys[2]]
    Results(path, minutes=1, note="again").fill(keys, run, measured, parallel=1)
    assert begun[5:] == [keys[1]]
    assert [row.get("note") for row in Results(path, 1).rows()] == [None, None, "again"]


def test_nothing_begins_after_the_time_is_up(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl", minutes=-1)
    results.fill([("coarse", "ce", 1)], lambda *key: pytest.fail("began"), dict, parallel=1)
    assert not results.rows()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for part in ("teacher", "student", "held_out"):
        (tmp_path / "corpus" / part).mkdir(parents=True)
        for name, (_, domains) in TEACHERS.items():
            for domain in domains if name == "bpe_8k" else ():
                text = "".join(f"{n} + 1 = {n + 1}\n" for n in range(20))
                rows = "".join(json.dumps({"text": text}) + "\n" for _ in range(10))
                (tmp_path / "corpus" / part / f"{domain}.jsonl").write_text(rows)
    return tmp_path / "corpus"


def test_run_files_of_all_arms_and_pairs(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teachers and caches are made once, however many arms need them."""
    made: list[str] = []

    def limbeck(verb: str, *arguments: str, log: Path) -> str:
        made.append(f"{verb} {log.parent.name}")
        (log.parent / "checkpoints" / "step_2" / "policy" / "weights").mkdir(parents=True)
        return ""

    monkeypatch.setattr("benchmarks.quality.suite.limbeck", limbeck)
    bench = Bench(corpus, tmp_path / "work", Sizes(2, 2, 2, 2, TINY, TINY))
    both = bench.settings("little_both", "tree_kl_by_ce", 1, tmp_path / "a")
    assert [Path(own["model_name"]).parts[-5] for own in both["teachers"]] == ["teacher_prose", "teacher_formal"]
    assert both["loss_fn"]["teacher_scoring"] == "ce"
    for seed in (1, 2):
        cached = bench.settings("coarse", "tree_kl_top64", seed, tmp_path / "b")
        assert cached["teachers"][0]["cache"].endswith("cache_coarse_64")
    assert made == [
        *("train teacher_prose", "train teacher_formal", "train teacher_bpe_32k", "cache cache_coarse_64_run")
    ]
    tokenizers = tmp_path / "published"
    named = Bench(corpus, tmp_path / "work", Sizes(2, 2, 2, 2, TINY, STUDENT), tokenizers=tokenizers)
    digits = named.settings("little_digits", "gold", 1, tmp_path / "d")
    assert digits["policy"]["tokenizer"]["name"] == str(tokenizers / "llama3_2")
    assert digits["teachers"][0]["tokenizer"]["name"] == str(tokenizers / "qwen3")
    runs = [named.settings("little_fine", arm, 1, tmp_path / "e") for arm in ("ce", "ce_300")]
    assert [run["distillation"]["max_num_steps"] for run in runs] == [LITTLE["student_steps"], 300]
    assert "teachers" not in runs[0]
    first = Path(bench.texts(None)[0])
    size = len(read_texts(first)[0].encode())
    cut_off = [len(read_texts(bench.texts(most)[0])) for most in (1, size, size + 1, 100 * size)]
    assert cut_off == [1, 1, 2, 10], "whole documents, no more than it takes"


def test_a_small_corpus_is_cut_out_of_a_whole_one(tmp_path: Path) -> None:
    """A separator of lines inside a text ends no document."""
    text = "".join(f"{n} sheep and\u2028{n + 1} goats.\n" for n in range(2_000))
    for part in SMALL_BYTES:
        (tmp_path / part).mkdir()
        for domain in SMALL_DOMAINS:
            (tmp_path / part / f"{domain}.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    write_small(tmp_path, tmp_path / "small")
    student, teacher = (read_texts(tmp_path / "small" / part / "gsm8k.jsonl") for part in ("student", "teacher"))
    assert "".join(teacher) == text
    assert text.startswith("".join(student))
    assert 30_000 <= sum(len(piece.encode()) for piece in student) < 30_500
    assert (tmp_path / "small" / "bpe_512" / "tokenizer.json").exists()


def test_what_could_not_be_made_twice_is_not_tried_by_all_who_need_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def limbeck(verb: str, *arguments: str, log: Path) -> str:
        tried.append(verb)
        raise RuntimeError("no room")

    monkeypatch.setattr("benchmarks.quality.suite.limbeck", limbeck)
    bench = Bench(corpus, tmp_path / "work", Sizes(2, 2, 2, 2, TINY, TINY))
    for message in ("no room", "no room", "could not be made", "could not be made"):
        with pytest.raises(RuntimeError, match=message):
            bench.run("coarse", "tree_kl", 1)
    assert tried == ["train", "train"]


@pytest.mark.slow
def test_a_forked_command_says_what_it_would_say_by_itself(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_module("limbeck", "--version", log=log) == f"limbeck {limbeck.__version__}\n"
    assert log.read_text() == ""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"limbeck train ended with 1; see .*log"):
            run_module("limbeck", "train", str(tmp_path / "none.yaml"), log=log)
    assert log.read_text().count("none.yaml") == 2, "messages of both are kept"


# -- what is measured --------------------------------------------------------------------------------------------------


def test_questions_are_lines_behind_solved_ones_and_never_overlap() -> None:
    lines = [f"{n} + 1 = {n + 1}" for n in range(12)]
    found = questions(["\n".join(lines) + "\n"], each=2, shown=4)
    assert [row["answer"] for row in found] == [" 5", " 10"]
    assert found[0]["prompt"] == "\n".join([*lines[:4], "4 + 1 ="])
    assert found[1]["prompt"] == "\n".join([*lines[5:9], "9 + 1 ="])
    assert not questions(["1 + 1 = 2\n"]), "no line is left to be asked"


def test_figures_are_kept_by_kind_of_file() -> None:
    text = {"bpb": 1.0, "bytes": 3, "documents": 1, "tokens": 2, "classes": {}}
    sums = {"exact": 0.5, "ended": 1.0, "bpb": 2.0, "bytes": 3, "documents": 4, "tokens": 5}
    choice = {"acc": 0.1, "acc_norm": 0.2, "bpb": 3.0, "bytes": 3, "documents": 9, "tokens": 5}
    files = {"x/wiki.jsonl": "text", "x/sums.jsonl": "answers", "x/piqa.jsonl": "choice"}
    found = {"models": {"m": dict(zip(files, (text, sums, choice), strict=True))}, "files": files}
    row = sorted_figures(found)
    assert row["measures"] == {"wiki": {"bpb": 1.0, "bytes": 3, "classes": {}}}
    assert row["answers"]["sums"]["exact"] == 0.5
    assert row["choices"]["piqa"]["acc_norm"] == 0.2


def test_a_row_has_the_command_that_made_it_and_no_path_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", [str(QUALITY / "suite.py"), str(tmp_path / "corpus"), "work", "--models", "A teaches B"]
    )
    results = Results(tmp_path / "results.jsonl", 1.0, parallel=2)
    results.report(_row("coarse", "ce") | {"seconds": 1})
    (row,) = results.rows()
    assert row["command"] == "benchmarks/quality/suite.py corpus work --models 'A teaches B'"
    assert row["parallel"] == 2
    said = [row["command"] for row in tables.read_rows(tables.STORED) if "command" in row]
    assert said
    assert not [part for text in said for part in shlex.split(text) if part.startswith("/")]


# -- real models -------------------------------------------------------------------------------------------------------


def test_domains_have_equal_shares_and_what_one_lacks_the_others_give() -> None:
    texts = {"small": ["x" * 10] * 2, "large": ["y" * 10] * 50, "other": ["é" * 5] * 50}
    taken = {name: sum(len(text.encode()) for text in own) for name, own in cut(texts, 300).items()}
    assert taken == {"small": 20, "large": 140, "other": 140}


def test_amounts_of_text_contain_the_smaller_ones(corpus: Path, tmp_path: Path) -> None:
    sizes = [write_texts(corpus, "student", tmp_path / str(n), ["wiki", "code"], n) for n in (400, 1_200)]
    small, large = ((tmp_path / str(n) / "wiki.jsonl").read_text() for n in (400, 1_200))
    assert sizes[0] < sizes[1]
    assert large.startswith(small)
    write_texts(corpus, "student", tmp_path / "short", ["wiki"], 400, document_bytes=21)
    assert (tmp_path / "short" / "wiki.jsonl").read_text().splitlines()[0] == '{"text": "0 + 1 = 1\\n1 + 1 = 2\\n2"}'


def test_the_learning_rate_is_the_best_of_the_sweep_by_amount() -> None:
    rows = [
        *(_row("sweep_0.3", rate, bits=bits) for rate, bits in (("3e-05", 1.5), ("0.0001", 1.4), ("0.0003", 2.9))),
        *(_row("sweep_1", rate, bits=bits) for rate, bits in (("3e-05", 1.5), ("0.0001", 1.4), ("0.0003", 1.3))),
        _row("real_1", "ce", bits=1.0),
    ]
    rows.append(_row(sweep_of("tree_kl_ce_.3", "1"), "2e-05", bits=1.0))
    assert best_rates(rows) == {"sweep_0.3": 1e-4, "sweep_1": 3e-4, "sweep_tree_kl_ce_.3_1": 2e-5}


def test_arms_of_real_models_are_run_on_the_amounts_that_they_name() -> None:
    arms = arm_amounts(["ce", "trl_gold:.3"], ["1", "0.3"])
    assert wanted_real_runs(arms, ["1", "0.3"], [1, 2]) == [
        *(("real_1", "ce", 1), ("real_0.3", "ce", 1), ("real_0.3", "trl_gold", 1)),
        *(("real_1", "ce", 2), ("real_0.3", "ce", 2), ("real_0.3", "trl_gold", 2)),
    ]
    with pytest.raises(SystemExit, match="'cee' is no arm"):
        arm_amounts(["cee"], ["1"])
    with pytest.raises(SystemExit, match="7 MB are not among"):
        arm_amounts(["ce:1,7"], ["1"])


def _real(corpus: Path, work: Path, *, adapt: float | None = None, **models: Path) -> Real:
    options = {
        "epochs": 1,
        "least_steps": 3,
        "document_bytes": None,
        "batch": 2,
        "megabytes": [0.001],
        "questions": 1,
        "domains": ["wiki"],
        "choices": [],
        "adapt": adapt,
        "tiny": True,
    }
    return Real(corpus, work, models, argparse.Namespace(**options))


def test_arms_of_trl_read_the_run_file_of_all_others(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, dict[str, Any]] = {}

    def run_module(module: str, *arguments: str, log: Path) -> str:
        (path,) = (argument for argument in arguments if argument.endswith("run.yaml"))
        files[module] = yaml.safe_load(Path(path).read_text())
        return ""

    monkeypatch.setattr("benchmarks.quality.suite.run_module", run_module)
    monkeypatch.setattr("benchmarks.quality.real.run_module", run_module)
    bench = _real(corpus, tmp_path / "work", student=tmp_path / "a", teacher=tmp_path / "b")
    rows = [
        bench.run({"pair": "real_0.001", "arm": arm, "seed": 7}, "0.001", arm, 1e-4) for arm in ("tree_kl", "trl_gold")
    ]
    ours, theirs = files["limbeck"], files["benchmarks.quality.trl_gold"]
    assert ours.pop("loss_fn")["mode"] == "tree_kl"
    assert ours.pop("logger") != theirs.pop("logger")
    assert ours == theirs
    assert [row["steps"] for row in rows] == [2, 2]
    bench.documents["0.001"], bench.max_steps = 5, None
    assert bench.length("0.001") == (2, 5), (
        "two epochs of five documents are the three steps of two that it has to have"
    )
    bench.documents["0.001"] = 60
    assert bench.length("0.001") == (1, 30)
    assert [bench.model(row).name for row in rows] == ["real_0.001_tree_kl_7", "student"]


def test_an_adapted_teacher_has_read_other_documents_and_keeps_its_tokenizer(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[dict[str, Any]] = []

    def train(settings: dict[str, Any], folder: Path) -> int:
        runs.append(settings)
        (folder / "checkpoints" / "step_2" / "policy" / "weights").mkdir(parents=True)
        return 0

    monkeypatch.setattr("benchmarks.quality.real.train", train)
    monkeypatch.setattr("benchmarks.quality.real.DEV_BYTES", 300)
    models = {"student": tmp_path / "a", "teacher": tmp_path / "b"}
    write_documents([f"document {n} " * 10 for n in range(20)], corpus / "teacher" / "wiki.jsonl")
    for _ in range(2):
        bench = _real(corpus, tmp_path / "work", adapt=0.001, **models)
    (run,) = runs  # the second call found it done
    assert run["policy"]["model_name"] == str(tmp_path / "b")
    assert "teacher" not in run
    read = {text for path in run["data"]["train"] for text in read_texts(Path(path))}
    others = {
        text for folder in ("dev", "text_0.001") for text in read_texts(tmp_path / "work" / folder / "wiki.jsonl")
    }
    assert read
    assert not read & others
    assert bench.teacher["model_name"].startswith(str(bench.model({"arm": "teacher"})))
    assert bench.teacher["tokenizer"] == {"name": str(tmp_path / "b")}
    monkeypatch.setattr("benchmarks.quality.real.DEV_BYTES", 10**9)
    with pytest.raises(SystemExit, match="no document"):
        _real(corpus, tmp_path / "other", adapt=0.001, **models)


def test_texts_for_trl_are_cut_behind_the_last_token_that_fits() -> None:
    tokenizer = tokenizers.byte_level(["ab"])
    assert trl_gold.cut(["abab c", "éab", "x"], tokenizer, 3) == ["abab ", "éab", "x"]
    assert trl_gold.cut(["abab"], tokenizer, 1) == ["ab"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", trl_gold.ARMS)
def test_trl_trains_a_student_that_is_a_model_folder(corpus: Path, tmp_path: Path, arm: str) -> None:
    if why := trl_gold.missing():
        pytest.skip(why)
    shape = {"model_type": "llama", "num_key_value_heads": 2, **TINY}
    for name, size in (("student", 400), ("teacher", 500)):
        own = tokenizers.workshop(size)
        own.save_pretrained(tmp_path / name)
        config = {"init": "random", "model_overrides": {"vocab_size": size, **shape}}
        load_model(config, seed=0).save_pretrained(tmp_path / name)
    models = {name: str(tmp_path / name) for name in ("student", "teacher")}
    bench = _real(corpus, tmp_path / "work", **{name: Path(path) for name, path in models.items()})
    settings = run_file([corpus / "student" / "wiki.jsonl"], bench.policy(2, 1e-2), 2, 2, 1, tmp_path / "run")
    trl_gold.train(settings | {"teacher": {"model_name": models["teacher"]}}, arm)
    before, after = (
        load_model({"model_name": str(path)}).state_dict()
        for path in (tmp_path / "student", trl_gold.student_folder(tmp_path / "run"))
    )
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


# -- sums --------------------------------------------------------------------------------------------------------------


def _sums(tmp_path: Path, cut: bool) -> digits.Sums:
    words = [str(number) for number in range(1000)]
    for name, end in digits.ENDS.items():
        own = tokenizers.byte_level(
            [*words, "word"], specials=["<|begin_of_text|>", end], split_digits=name == digits.TEACHER
        )
        own.save_pretrained(tmp_path / name)
    options = {
        "most": 40,
        "problems": 5,
        "texts": [9, 20],
        "batch": 4,
        "teacher_steps": 3,
        "teacher_rate": 1e-3,
        "tiny": False,
    }
    return digits.Sums(tmp_path, tmp_path / "work", argparse.Namespace(**options, cut=cut))


def test_no_text_has_a_sum_that_is_asked_and_cut_tokenizers_split_sums_as_before(tmp_path: Path) -> None:
    work = _sums(tmp_path, cut=True).work
    asked = {json.loads(line)["prompt"] for split in digits.SPLITS for line in (work / f"{split}.jsonl").open()}
    read = {name: read_texts(work / f"{name}.jsonl") for name in ("teacher", "student_9", "student_20")}
    assert len(asked) == 10
    assert set(read["student_9"]) < set(read["student_20"]) < set(read["teacher"])
    whole = [text.split(" =")[0].split(" + ") for text in [*asked, *read["teacher"]]]
    assert len({frozenset(pair) for pair in whole}) == len(whole) == 31 * 32 // 2
    for name in digits.ENDS:
        after, before = (digits.tokens(folder / name, "12 + 345 =\n357") for folder in (work, tmp_path))
        assert after == before
        assert ("345" in after) == (name == digits.STUDENT)
        assert len(json.loads((work / name / "tokenizer.json").read_text())["model"]["vocab"]) < 256 + 1000


def test_run_files_of_sums_and_what_is_kept_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, runs = _sums(tmp_path, cut=False), list[dict[str, Any]]()

    def train(settings: dict[str, Any], folder: Path) -> int:
        runs.append(settings)
        (folder / "checkpoints" / "step_3" / "policy" / "weights").mkdir(parents=True)
        (folder / "tasks.jsonl").write_text(json.dumps({"problems": [4, 2], "scores": [1.0, 0.0], "reasons": {}}))
        return 7

    monkeypatch.setattr("benchmarks.quality.sums.train", train)
    for seed, arm in enumerate(digits.ASKED):
        row = bench.run("dev_9_2_0.001", arm, seed)
        assert (row["solved"], row["seconds"]) == ("01", 7)
        MasterConfig.model_validate(runs[-1])
    assert ["teachers" in run for run in runs] == [False, False] + [True] * (len(digits.ASKED) - 1), "the teacher once"
    assert bench.run("teacher", "teacher", 1)["solved"] == "01"
    assert [run["distillation"]["tasks"][0]["data"][-10:] for run in runs[:2]] == ["/dev.jsonl", "test.jsonl"]


def test_half_of_the_teacher_chooses_the_amount_and_arms_are_compared_on_the_seeds_of_both() -> None:
    def row(pair: str, arm: str, seed: int, solved: str) -> dict[str, Any]:
        return {"pair": pair, "arm": arm, "seed": seed, "solved": solved}

    rows = [row("teacher", "teacher", 1, "1111")]
    # at the better rate the smaller amount has all of them right
    found = {"dev_1_9_0.1": "1100", "dev_1_9_0.2": "1111", "dev_2_9_0.1": "0001", "dev_2_9_0.2": "0000"}
    rows += [row(pair, "ce", 0, solved) for pair, solved in found.items()]
    assert digits.chosen(rows, list(found)) == "dev_2_9_0.1"
    rows = [row("a", arm, seed, solved) for arm, seed, solved in (
        ("ce", 1, "1000"), ("ce", 2, "1100"), (digits.DEFAULT, 1, "1110"), (digits.DEFAULT, 3, "1111"),
    )]  # fmt: skip
    assert digits.table(rows, "a").splitlines()[2:] == [
        "| ce | 37.5% ± 12.5% | 2 | -50.0% | 28.9% | - |",
        f"| {digits.DEFAULT} | 87.5% ± 12.5% | 2 | - | - | - |",
    ]


# -- what tables say ---------------------------------------------------------------------------------------------------


def test_the_gap_that_is_closed() -> None:
    assert tables.gap_closed(2.0, alone=2.0, teacher=1.0) == 0
    assert tables.gap_closed(1.0, alone=2.0, teacher=1.0) == 1
    assert tables.gap_closed(2.5, alone=2.0, teacher=1.0) == -0.5
    assert tables.gap_closed(1.0, alone=1.0, teacher=1.5) is None, "a teacher that is no better leaves nothing open"


def test_an_experiment_takes_cross_entropy_of_the_same_student_and_the_better_teacher_of_each_domain() -> None:
    rows = [_row("teacher", "prose", bits=1.0), _row("teacher", "formal", bits=1.5)]
    rows[1]["measures"]["b"]["bpb"] = 1.0
    rows += [_row("little_coarse", "ce", seed, bits=2.0) for seed in (1, 2)]
    rows += [_row("little_both", "tree_kl", seed, bits=bits) for seed, bits in ((1, 1.4), (2, 1.6))]
    (both,) = (own for own in tables.experiments(rows) if own.name == "little_both")
    alone, taught = both.arms()
    assert (alone.name, alone.seeds, alone.gap) == ("ce", 2, 0.0)
    # cross-entropy has 2.5, the teachers 1.0 in both domains, the student 2.0
    assert taught.gap == pytest.approx(0.5 / 1.5)
    assert taught.gap_spread == pytest.approx(0.1 * 2**0.5 / 1.5)
    assert taught.worst[1] == pytest.approx(-0.5)
    assert taught.skills["numeral mass"] == pytest.approx(0.15)


def test_the_later_of_two_rows_of_a_run_counts_and_other_sizes_are_other_runs() -> None:
    rows = [_row("coarse", "ce", bits=1.0), _row("coarse", "ce", bits=2.0), _row("coarse", "ce", sizes=[5, 6, 7, 8])]
    rows.append(_row("coarse", "uld"))
    kept = tables.unique(rows)
    assert [(row["sizes"][0], row["measures"]["a"]["bpb"]) for row in kept] == [(1, 2.0), (5, 2.0), (1, 2.0)]
    assert len(tables.experiments(kept)) == 2
    assert [row["sizes"][0] for row in tables.usual(kept)] == [1, 1], "what most rows have"


def test_another_precision_is_another_table() -> None:
    rows = [_row("coarse", "ce", bits=1.0), _row("coarse", "tree_kl", bits=0.5), _row("teacher", "bpe_32k", bits=0.25)]
    rows += [row | {"precision": "bfloat16"} for row in (_row("teacher", "bpe_32k", bits=1.0), _row("coarse", "ce"))]
    old, new = sorted(tables.experiments(tables.unique(rows)), key=lambda own: len(own.alone + own.rows), reverse=True)
    assert [arm.mean for arm in old.arms()] == [1.5, 1.0]
    assert [by["arm"] for by in old.teachers + new.teachers] == ["bpe_32k"] * 2
    assert "bfloat16" in new.title
    assert tables.usual(rows) == [rows[2], rows[0], rows[1]], "most of the pair's rows are in float32"


def test_arms_are_compared_with_the_best_number_of_steps_of_cross_entropy() -> None:
    found = {"ce": 3.0, "ce_300": 2.0, "ce_450": 1.2, "tree_kl": 1.5}
    rows = [_row("small_long", arm, bits=bits, sizes=[1, 2, 400, 4]) for arm, bits in found.items()]
    # a teacher's student may read longer than another student of it
    rows.append(_row("teacher", "bpe_2k", bits=1.0, sizes=[1, 2, 8, 9]))
    (long,) = tables.experiments(rows)
    gaps = {arm.name: arm.gap for arm in long.arms()}
    # more steps than the others have are no reference
    assert gaps == {"ce": -1.0, "ce_300": 0.0, "ce_450": 0.8, "tree_kl": 0.5}
    assert "the best of cross-entropy alone, 300 steps" in long.title


def test_figures_that_only_some_rows_have_leave_dashes(tmp_path: Path) -> None:
    rows = [_row("coarse", "ce"), _row("coarse", "tree_kl", answers={"sums": {"exact": 0.25}})]
    (experiment,) = tables.experiments(rows)
    lines = tables.summary(experiment).splitlines()
    column = [cell.strip() for cell in lines[0].split("|")].index("sums right")
    assert [line.split("|")[column].strip() for line in lines[2:]] == ["-", "0.250"]


def test_the_sweep_shows_the_rate_that_all_arms_took_and_arms_of_trl_are_no_teachers() -> None:
    rows = [_row("sweep_0.3", rate, 0, bits) for rate, bits in (("0.0001", 1.4), ("0.0003", 2.9))]
    rows += [_row("sweep_1", "0.0003", 0, 1.2, steps=9), _row("real", "teacher")]
    real = {"steps": 3, "batch": 2, "epochs": 1, "learning_rate": 1e-4}
    rows += [_row("real_0.3", arm, bits=bits, **real) for arm, bits in (("ce", 1.5), ("trl_gold", 1.25))]
    rows.append(_row("sweep_tree_kl_1", "0.0001", 0, 1.1, models="A teaches B", steps=9, swept="tree_kl"))
    assert [line.split("|", 2)[2] for line in tables.sweep(rows).splitlines()[2:]] == [
        " ce | 0.3 | - | **1.900** | 3.400 |",
        " ce | 1 | 9 | - | **1.700** |",
        " tree_kl | 1 | 9 | **1.600** | - |",
    ]
    rows += [_row("real_1", "ce", bits=1.0, **real), _row("real_0.3", "ce", bits=1.6, **real | {"learning_rate": 3e-4})]
    page = tables.everything(rows)
    assert "| trl_gold | 1 | **1.750** |" in page
    assert "| 0.3 | - | **1.900** | 3.400 |" in page
    ((who, by_amount),) = tables.by_amount(
        tables.experiments([*rows, _row("real_2", "ce", **real | {"batch": 4})])
    ).items()
    assert who == FIRST
    assert tables.curve(by_amount).splitlines()[2:] == [
        "| ce | 2.000 | 1.500 |",
        "| trl_gold | 1.750 (-0.250) | - |",
    ]


def test_real_arms_stand_together_at_the_rates_of_their_sweeps_and_cross_entropy_is_whose_ever() -> None:
    own = {"steps": 3, "batch": 2, "epochs": 1}
    adapted = {"models": "T, adapted, teaches S"}
    rows = [
        *(
            _row("sweep_tree_kl_soft_1", rate, 0, bits, batch=2, **adapted)
            for rate, bits in (("2e-05", 1.3), ("5e-05", 1.2))
        ),
        _row("real_1", "ce", bits=1.5, models="T teaches S", learning_rate=1e-4, **own),
        _row("real_1", "tree_kl_soft", bits=1.25, learning_rate=5e-5, **own, **adapted),
        _row("real_1", "trl_gold", bits=1.4, learning_rate=5e-5, **own, **adapted),
        _row("real_1", "tree_kl_soft", bits=1.0, learning_rate=2e-5, **own, **adapted),
    ]
    chosen, other = (e for e in tables.real_experiments(rows) if "adapted" in e.title)
    assert [(arm.name, arm.worst) for arm in chosen.arms()] == [
        *(("ce", ("a", 0.0)), ("tree_kl_soft", ("a", -0.25)), ("trl_gold", ("a", pytest.approx(-0.1)))),
    ]
    assert [arm.name for arm in other.arms()] == ["ce", "tree_kl_soft"]
    assert "AdamW at 5e-05" in chosen.title
    assert "at its best: 3 steps at 0.0001" in chosen.title


def test_tables_of_the_pages_are_those_of_the_stored_rows() -> None:
    rows = tables.unique(tables.read_rows(tables.STORED))
    for path in tables.PAGES:
        text = path.read_text(encoding="utf-8")
        assert "<!-- table:" in text
        assert tables.filled(text, rows) == text, f"{path.name}: run benchmarks/quality/tables.py"
    with pytest.raises(SystemExit, match="'losess'"):
        tables.filled("<!-- table: losess -->\n\n| a |\n", rows)


def test_a_cell_says_how_many_seeds_it_has_and_what_is_closed() -> None:
    arm = tables.Arm("tree_kl", 3, 1.5, 0.0104, 0.25, 0.1, ("a", 0.0), {})
    alone = replace(arm, name="ce", mean=1.5531, gap=0.0)
    assert tables.bits(arm, gap=True) == "1.500 ± .010 (25%)"
    assert tables.bits(arm, alone) == "1.500 ± .010 (-.053)"
    assert tables.bits(replace(arm, mean=1.5533), alone, best=True) == "**1.553 ± .010 (.000)**"
    assert tables.bits(replace(arm, seeds=1, spread=None), gap=True) == "1.500 (25%) [1]"
    assert tables.bits(None) == ""


# -- the leaderboard ---------------------------------------------------------------------------------------------------


def test_the_leaderboard_has_both_directions_and_text_that_comes_with_the_installation(tmp_path: Path) -> None:
    texts = leaderboard.documents()
    assert list(texts) == list(BOARD_DOMAINS)
    for name, own in texts.items():
        assert len(own) == len(set(own))
        parts = write_parts(name, own, tmp_path)
        sizes = {part: sum(len(text.encode()) for text in found) for part, found in parts.items()}
        assert min(sizes["held_out"], sizes["student"]) > SMALL_BYTES["student"]
        assert sizes["teacher"] > 10 * SMALL_BYTES["student"]
    first, second = (PAIRS[pair] for pair in leaderboard.DIRECTIONS)
    assert (first.student, *(TEACHERS[name][0] for name in first.teachers)) == ("bpe_512", "bpe_2k")
    assert (second.student, *(TEACHERS[name][0] for name in second.teachers)) == ("bpe_2k", "bpe_512")
    assert set(leaderboard.LOSSES) <= set(ARMS)


def test_the_leaderboard_compares_the_seeds_that_both_have() -> None:
    ours, theirs = (
        leaderboard.mean_bits(_row("board_coarse", "tree_kl_ce_.3", seed, bits) for seed, bits in own)
        for own in (((1, 2.0), (2, 3.0)), ((2, 2.5), (3, 9.0)))
    )
    lines = {line.split("|")[1].strip(): line for line in leaderboard.board(ours, theirs, [1, 2, 3]).splitlines()}
    assert lines["tree_kl_ce_.3"] == "| tree_kl_ce_.3 | 3.000 ± 0.707 | 3.000 | +0.500 | - | - | - |"
    assert lines["ce"] == "| ce | - | - | - | - | - | - |"


def test_the_leaderboard_tells_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [("teacher", "board_2k", 1), ("board_coarse", "ce", 1), ("board_coarse", "uld_ce_.3", 1)]
    board = leaderboard.Board(tmp_path / "results.jsonl", 1.0)
    board.expect(keys)
    board.report(_row("board_coarse", "ce"))
    assert "2 runs left" in capsys.readouterr().out
    again = leaderboard.Board(tmp_path / "results.jsonl", 1.0)
    again.expect(keys)
    assert "2 runs, 1 are done" in capsys.readouterr().out
