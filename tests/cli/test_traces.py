"""``limbeck traces``: what a user types and gets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from limbeck.cli.traces import traces_app
from limbeck.errors import ExitCode, LimbeckError
from limbeck.traces.files import read_failed_calls
from limbeck.traces.hints import HintRequest
from limbeck.traces.schema import PreferencePair
from tests.cli.command import run
from tests.helpers.disk import files_of_at_most
from tests.helpers.servers import completion, endpoint
from tests.traces.material import EXAMPLES, read, real_logs, write_lines

WORKSHOP = str(EXAMPLES / "workshop.jsonl")
TALK = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}


def limbeck(*arguments: Any) -> Result:
    return CliRunner().invoke(traces_app, [str(argument) for argument in arguments])


def as_json(*arguments: Any) -> dict[str, Any]:
    result = limbeck(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def hook(kind: str, meta: dict[str, Any]) -> str | None:
    """A hook for the command line."""
    return f"Mind the {kind}." if kind == "timeout" else None


def judge(request: HintRequest) -> str | None:
    """A judge for the command line."""
    return f"Judged: {request.error_kind}."


def teacher(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """A teacher for the command line."""
    return "I would ask first."


def test_ingest_prints_the_agreed_object_and_writes_canonical_traces(tmp_path: Path) -> None:
    out = tmp_path / "traces.jsonl"
    summary = as_json("ingest", WORKSHOP, "-o", out)
    keys = ["traces", "turns", "tool_calls", "tool_results", "errors", "errors_by_kind", "redacted", "skipped"]
    assert list(summary) == keys
    assert (summary["traces"], summary["turns"], summary["tool_calls"], summary["tool_results"]) == (12, 95, 35, 35)
    assert summary["errors"] == sum(summary["errors_by_kind"].values()) == 13
    assert (summary["redacted"], summary["skipped"]) == (0, {})
    assert out.read_text() == Path(WORKSHOP).read_text()


def test_ingest_of_mixed_and_damaged_files_goes_on(tmp_path: Path) -> None:
    secret = "ghp_" + "aB3" * 12
    spoken = {
        "messages": [{"role": "user", "content": secret}, {"role": "assistant", "content": "!", "reasoning": "r"}]
    }
    mixed = write_lines(tmp_path / "mixed.jsonl", [json.dumps(TALK), "{broken", json.dumps(spoken)])
    out = tmp_path / "out.jsonl"
    result = limbeck("ingest", mixed, WORKSHOP, "-o", out, "--strip-reasoning", "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["traces"], summary["redacted"], summary["skipped"]) == (14, 1, {"malformed_line": 1})
    assert "mixed.jsonl:2: malformed_line" in result.stderr
    assert secret not in out.read_text()
    assert all(m.reasoning is None for trace in read(out)[0] for m in trace.messages)
    assert as_json("ingest", mixed, "--no-redact", "-o", out)["redacted"] == 0
    assert secret in out.read_text()


@pytest.mark.parametrize(
    "verb", [["ingest"], ["errors"], ["sites"], ["pairs", "-t", "py:tests.cli.test_traces:teacher"]]
)
def test_an_output_that_is_an_input_is_refused(tmp_path: Path, verb: list[str]) -> None:
    path = write_lines(tmp_path / "t.jsonl", [TALK, TALK])
    before = path.read_bytes()
    result = limbeck(*verb, WORKSHOP, path, "-o", path)
    assert isinstance(result.exception, LimbeckError)
    assert "it is also the input" in str(result.exception)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_tables_show_kinds_detectors_and_skips(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", ["{broken", json.dumps(TALK)])
    result = limbeck("ingest", path, WORKSHOP)
    assert result.exit_code == 0
    for word in ("tool calls", "nonzero_exit", "error_prefix", "malformed_line"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ingest", "missing.jsonl"], "no trace file 'missing.jsonl'"),
        (["ingest", WORKSHOP, "--format", "xml"], "unknown trace format 'xml'"),
        (["ingest", WORKSHOP, "-o", "no/such/folder/x.jsonl"], "existing folder"),
        (["errors", WORKSHOP, "--hints", "magic"], "unknown hint generator 'magic'"),
        (["errors", WORKSHOP, "--hints", ""], "no hint generator is left"),
        (["errors", WORKSHOP, "--hook", "nowhere:f"], "nowhere:f"),
        (["pairs", WORKSHOP, "-t", "gpt"], "is not understood"),
        (["pairs", WORKSHOP, "-t", "py:json:nothing"], "json:nothing"),
        (["pairs", WORKSHOP, "-t", "py:json:dumps", "--quorum", "2"], "impossible with 1"),
    ],
)
def test_bad_arguments_end_with_one_sentence(arguments: list[str], message: str) -> None:
    result = limbeck(*arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, LimbeckError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_files_without_any_trace_are_an_error_that_says_why(tmp_path: Path) -> None:
    empty, junk = tmp_path / "empty.jsonl", write_lines(tmp_path / "junk.jsonl", ["{", "{"])
    empty.write_text("")
    for path, reason in ((empty, "the files are empty"), (junk, "malformed_line 2")):
        result = limbeck("ingest", path, "--json")
        assert isinstance(result.exception, LimbeckError)
        assert reason in str(result.exception)
        assert json.loads(result.stdout)["traces"] == 0


def test_sites_prints_the_agreed_object_and_writes_an_auditable_file(tmp_path: Path) -> None:
    out = tmp_path / "sites.jsonl"
    summary = as_json("errors", WORKSHOP, "-o", out, "--recovery-weight", "0.5")
    assert list(summary) == ["failed_calls", "by_kind", "by_hint_source", "skipped"]
    assert summary["failed_calls"] == 13
    assert summary["by_hint_source"] == {"template": 12, "raw_error": 1}
    sites = list(read_failed_calls(out))
    assert len(sites) == 13
    assert all(site.hint and site.error_excerpt and site.target_excerpt for site in sites)
    assert "error kind" in limbeck("errors", WORKSHOP).stdout


def test_the_hook_stands_first_and_the_judge_is_asked_where_templates_are_weak(tmp_path: Path) -> None:
    here = "tests.cli.test_traces"
    summary = as_json(
        "errors",
        WORKSHOP,
        "--hook",
        f"{here}:hook",
        "--hints",
        "template",
        "--judge",
        f"{here}:judge",
        "--cache",
        tmp_path,
    )
    assert summary["by_hint_source"] == {f"judge:{here}:judge": 8, "template": 4, "hook": 1}
    assert len(list(tmp_path.rglob("*.json"))) == 8


def test_a_failing_hook_is_counted_and_reported() -> None:
    result = limbeck("errors", WORKSHOP, "--hints", "", "--hook", "json:dumps", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["skipped"] == {"no_hint": 13}
    assert "hook: raised TypeError" in result.stderr


def test_a_function_of_the_working_folder_is_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answers_of_mine.py").write_text("def again(messages, tools):\n    return 'I would look first.'\n")
    monkeypatch.chdir(tmp_path)
    summary = as_json("pairs", WORKSHOP, "-t", "py:answers_of_mine:again")
    assert summary["pairs"] == summary["states"] > 0


def test_pairs_are_made_of_the_messages_that_errors_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answers_of_yours.py").write_text("def again(messages, tools):\n    return 'I would look first.'\n")
    monkeypatch.chdir(tmp_path)

    def called(number: int, command: str, code: int, text: str) -> list[dict[str, Any]]:
        call = {"id": f"c{number}", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}
        result = {"role": "tool", "tool_call_id": f"c{number}", "content": text, "is_error": True}
        result |= {"error_kind": "nonzero_exit", "error_meta": {"exit_code": code}}
        return [{"role": "assistant", "tool_calls": [{"id": call["id"], **call["function"]}]}, result]

    talk = [{"role": "user", "content": "go"}]
    talk += (
        called(1, "pytest -q", 1, "1 failed")
        + called(2, "cat nothing", 1, "No such file")
        + called(3, "rm x", 130, "^C")
    )
    for message in talk:
        for call in message.get("tool_calls", ()):
            call["arguments"] = json.loads(call["arguments"])
    path = write_lines(tmp_path / "t.jsonl", [{"schema_version": "limbeck.trace/1", "id": "t", "messages": talk}])
    for more, states in (((), 1), (("--all-failures",), 3)):
        assert as_json("errors", path, *more)["failed_calls"] == states
        assert as_json("pairs", path, "-t", "py:answers_of_yours:again", *more)["states"] == states


def test_a_key_in_a_trace_id_is_not_printed(tmp_path: Path) -> None:
    secret = "ghp_" + "aB3" * 12
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = [{"schema_version": "limbeck.trace/1", "id": secret, "group_id": secret, "messages": talk}] * 2
    path = write_lines(tmp_path / "t.jsonl", lines)
    out = tmp_path / "out.jsonl"
    for arguments in (("secrets", path), ("secrets", path, "--json"), ("ingest", path, "-o", out), ("errors", path)):
        shown = limbeck(*arguments)
        assert secret not in shown.output
    assert secret not in out.read_text()


def test_secrets_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    secret = "ghp_" + "aB3" * 12
    talk = [{"role": "user", "content": f"{secret} of me@example.org"}, {"role": "assistant", "content": "badge B-12"}]
    path = write_lines(tmp_path / "t.jsonl", [{"messages": talk}])
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{id: badge, pattern: 'B-[0-9]+'}]")
    found = as_json("secrets", path)
    assert [(hit["message"], hit["kind"]) for hit in found["hits"]] == [(0, "github_token")]
    found = as_json("secrets", path, "--redact-pii", "--redact-rules", rules)
    assert [(hit["message"], hit["kind"]) for hit in found["hits"]] == [(0, "github_token"), (0, "email"), (1, "badge")]
    shown = limbeck("secrets", path, "--redact-pii", "--redact-rules", rules)
    assert "3 secrets in 1 traces" in shown.stdout
    assert secret[:12] not in shown.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rules.yaml", "t.jsonl"]
    out = tmp_path / "out.jsonl"
    assert as_json("ingest", path, "-o", out, "--redact-pii", "--redact-rules", rules)["redacted"] == 3
    assert "REDACTED:badge" in out.read_text()
    refused = limbeck("ingest", path, "-o", rules, "--redact-rules", rules)
    assert "it is also the input" in str(refused.exception)


def test_pairs_from_an_endpoint_resume_from_the_cache(tmp_path: Path) -> None:
    right = completion(calls=[("search_items", {"query": "M4 screw"})])
    with endpoint(lambda n, body: (200, right)) as server:
        arguments = [
            "pairs",
            WORKSHOP,
            "-t",
            f"some/model@{server.url}",
            "--cache",
            tmp_path / "cache",
            "-o",
            tmp_path / "p.jsonl",
        ]
        summary = as_json(*arguments, "--price-in", 1, "--price-out", 1)
        assert summary["states"] == summary["requests"] == 13
        assert summary["pairs"] == 13
        assert summary["cost"] == pytest.approx(13 * 110e-6)
        again = as_json(*arguments)
        assert (again["pairs"], again["requests"], again["cached"], again["cost"]) == (13, 0, 13, 0.0)
        assert len(server.requests) == 13
    pairs = [PreferencePair.model_validate_json(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert {pair.chosen.tool_calls[0].name for pair in pairs} == {"search_items"}
    assert all(pair.provenance["votes"] == {"some/model": True} for pair in pairs)


def test_pairs_stop_asking_at_the_cost_cap() -> None:
    with endpoint(lambda n, body: (200, completion("x"))) as server:
        summary = as_json(
            "pairs",
            WORKSHOP,
            "-t",
            f"m@{server.url}",
            "--at",
            "all",
            "--price-out",
            100,
            "--max-cost",
            0.25,
            "--max-tokens",
            500,
        )
    assert 0 < summary["cost"] <= 0.25
    assert summary["failures"]["m: cost_cap"] > 0


def test_teachers_that_never_answer_are_said_by_the_exit_code(tmp_path: Path, capsys) -> None:
    out, here = tmp_path / "p.jsonl", "py:tests.cli.test_traces:teacher"
    with endpoint(lambda n, body: (400, {})) as server:
        dead = f"m@{server.url}"
        code, _, err = run(capsys, "traces", "pairs", WORKSHOP, "-t", dead, "-o", out)
        assert code == ExitCode.ERROR
        assert err == "limbeck: no teacher answered (m: http_400 13 times): check addresses, models and keys\n"
        assert not out.exists()
        code, _, err = run(capsys, "traces", "pairs", WORKSHOP, "-t", dead, "-t", here, "--quorum", 1, "-o", out)
    assert code == ExitCode.PARTLY_DONE
    assert err == "limbeck: 1 of 2 teachers never answered: m\n"
    assert len(out.read_text().splitlines()) == 13


def test_files_of_no_known_format_are_said_by_the_exit_code(tmp_path: Path, capsys) -> None:
    odd = write_lines(tmp_path / "odd.jsonl", [{"what": "is this"}])
    code, out, err = run(capsys, "traces", "ingest", WORKSHOP, odd, "--json")
    assert code == ExitCode.PARTLY_DONE
    assert json.loads(out)["traces"] == 12
    assert "skipped odd.jsonl:1: unknown_format" in err
    assert err.splitlines()[-1].startswith("limbeck: 1 of 2 files are of no known format")
    page = tmp_path / "page.html"
    code, _, _ = run(capsys, "traces", "view", WORKSHOP, odd, "-o", page)
    assert code == ExitCode.PARTLY_DONE
    assert page.stat().st_size > 10_000


def test_packed_logs_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "w.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(WORKSHOP).read_bytes()))
    assert as_json("ingest", packed) == as_json("ingest", WORKSHOP)
    result = CliRunner().invoke(traces_app, ["ingest", "-", "--json"], input=Path(WORKSHOP).read_bytes())
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == as_json("ingest", WORKSHOP)


def test_folders_globs_and_zst(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "logs"
    (folder / "deep").mkdir(parents=True)
    rows = Path(WORKSHOP).read_bytes().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(rows[:4]))
    (folder / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[4:8])))
    with pyarrow.CompressedOutputStream(str(folder / "deep" / "c.jsonl.zst"), "zstd") as packed:
        packed.write(b"".join(rows[8:]))
    (folder / "notes.txt").write_text("no log")
    everything = as_json("ingest", WORKSHOP)
    assert as_json("ingest", folder) == everything
    assert as_json("ingest", f"{tmp_path}/**/*.jsonl*") == everything
    assert as_json("ingest", folder, folder / "a.jsonl") == everything
    result = limbeck("ingest", folder, "-o", folder / "a.jsonl")
    assert "it is also the input" in str(result.exception)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no trace file" in str(limbeck("ingest", empty).exception)


def test_tools_and_a_system_prompt_for_logs_that_lack_them(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Error: it did not work"},
    ]
    log = write_lines(tmp_path / "t.jsonl", [{"messages": talk}])
    schema = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "run", "description": "Runs.", "input_schema": schema}]))
    system = tmp_path / "system.txt"
    system.write_text("Be brief.")
    out = tmp_path / "out.jsonl"
    as_json("ingest", log, "-o", out, "--tools", tools, "--system", system)
    (trace,), _ = read(out)
    assert trace.messages[0].content == "Be brief."
    assert trace.tools[0]["function"]["parameters"] == schema
    assert (trace.messages[3].error_kind, trace.messages[3].error_meta["missing"]) == ("missing_argument", ["cmd"])
    before = Path(WORKSHOP).read_text()
    as_json("ingest", WORKSHOP, "-o", out, "--tools", tools)
    assert out.read_text() == before
    tools.write_text("[{}]")
    assert "holds no tools" in str(limbeck("ingest", log, "--tools", tools).exception)
    assert "cannot be read" in str(limbeck("ingest", log, "--system", tmp_path / "gone").exception)


def test_pairs_from_functions_and_their_table() -> None:
    spec = "py:tests.cli.test_traces:teacher"
    summary = as_json("pairs", WORKSHOP, "-t", spec)
    assert (summary["pairs"], summary["states"]) == (13, 13)
    shown = limbeck("pairs", WORKSHOP, "-t", spec).stdout
    assert "preference pairs" in shown
    assert "cost 0.0000" in shown


def test_every_verb_explains_itself_with_an_example() -> None:
    for verb in ("ingest", "secrets", "errors", "pairs"):
        result = limbeck(verb, "--help")
        assert result.exit_code == 0
        assert f"limbeck traces {verb}" in " ".join(result.stdout.replace("│", " ").split())


@pytest.mark.slow
def test_real_logs_of_four_formats_in_one_call(tmp_path: Path) -> None:
    patterns = ("taubench_*.jsonl", "openhands_*.jsonl", "swe_agent_*.jsonl", "claude_code_*.jsonl")
    files = [path for pattern in patterns for path in real_logs(pattern)]
    summary = as_json("ingest", *files, "-o", tmp_path / "all.jsonl")
    assert (summary["traces"], summary["errors"], summary["tool_results"]) == (207, 140, 1895)
    again = as_json("ingest", tmp_path / "all.jsonl")
    # one task's own secret is taken out of its log; what was written holds none any more
    assert (summary["redacted"], again["redacted"]) == (1, 0)
    assert {**again, "skipped": summary["skipped"], "redacted": 1} == summary
    wider = as_json("ingest", *files, "--detectors", "extended")
    assert wider["errors"] == 140 + 24


def test_without_rewards_the_policy_channel_is_off_until_a_judge_scores_the_traces(tmp_path: Path) -> None:
    logs, out = write_lines(tmp_path / "talk.jsonl", [TALK]), tmp_path / "traces.jsonl"
    assert "the policy channel is off" in limbeck("ingest", logs, "-o", out).output
    assert read(out)[0][0].final_reward is None
    assert "the policy channel is off" not in limbeck("ingest", WORKSHOP).output
    with endpoint(lambda number, body: (200, completion("0.5"))) as server:
        result = limbeck("ingest", logs, "-o", out, "--judge", f"wise@{server.url}/v1")
    assert result.exit_code == 0, result.output
    assert "the policy channel is off" not in result.output
    assert read(out)[0][0].final_reward == 0.5
    result = limbeck("ingest", logs, "--judge", "nothing")
    assert isinstance(result.exception, LimbeckError)
    assert "expected MODEL@http" in str(result.exception)


@pytest.mark.parametrize("command", ["ingest", "errors"])
@pytest.mark.parametrize("size", [100, 2500])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, size: int
) -> None:
    out = tmp_path / "out.jsonl"
    with files_of_at_most(size):
        code, _, err = run(capsys, "traces", command, WORKSHOP, "-o", out)
    assert code == ExitCode.ERROR
    assert str(out) in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
