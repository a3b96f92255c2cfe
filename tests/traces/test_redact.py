"""Redaction: secrets go, everything else stays."""

from __future__ import annotations

import base64
import html
import json
import random
import re
import string
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.errors import TraceError
from limbeck.traces.redact import Redactor, redact_text, redact_trace
from limbeck.traces.schema import Origin, PreferencePair, ToolCall, Trace
from limbeck.traces.secret_rules import RuleSet, read_rules
from tests.helpers.chats import answer, say
from tests.traces.material import real_logs
from tests.traces.redaction_cases import Case, cases, combined

_random = random.Random(7)


def made(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Key material that no scanner of this repository can mistake for a real key, since it is drawn at run time."""
    return "a1B2c3" + "".join(_random.choice(alphabet) for _ in range(length - 6))


KEY_BODY = "\n".join(made(64) for _ in range(4))
PRIVATE = f"-----BEGIN RSA PRIVATE KEY-----\n{KEY_BODY}\n-----END RSA PRIVATE KEY-----"
SECRETS = {
    "anthropic_key": "sk-ant-" + made(40),
    "openai_key": "sk-proj-" + made(40),
    "aws_access_key": "AKIA" + "".join(_random.choice(string.ascii_uppercase + string.digits) for _ in range(16)),
    "github_token": "ghp_" + made(36),
    "gitlab_token": "glpat-" + made(20),
    "huggingface_token": "hf_" + made(34),
    "slack_token": "xoxb-" + made(24),
    "google_key": "AIza" + made(35),
    "npm_token": "npm_" + made(36),
    "pypi_token": "pypi-" + made(60),
    "stripe_key": "sk_live_" + made(24),
    "jwt": f"eyJ{made(20)}.eyJ{made(30)}.{made(30)}",
    "private_key": PRIVATE,
}


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize("around", ["{}", "x = '{}';", "export K={}\n", '{{"k": "{}"}}', "curl -H 'X: {}' host"])
def test_known_secrets_disappear_and_are_counted(kind: str, around: str) -> None:
    counts: Counter[str] = Counter()
    clean = redact_text(around.format(SECRETS[kind]), counts)
    assert SECRETS[kind] not in clean
    assert clean == around.format(f"[REDACTED:{kind}]")
    assert counts == Counter({kind: 1})


@pytest.mark.parametrize(
    ("text", "kept", "kind"),
    [
        ("Authorization: Bearer " + made(30), "Authorization: Bearer [REDACTED:authorization]", "authorization"),
        ("postgres://me:hunter2x@host/db", "postgres://me:[REDACTED:url_password]@host/db", "url_password"),
        ("DB_PASSWORD=" + made(20), "DB_PASSWORD=[REDACTED:assigned_secret]", "assigned_secret"),
        ('"api_key": "' + made(32) + '"', '"api_key": "[REDACTED:assigned_secret]"', "assigned_secret"),
    ],
)
def test_secrets_known_by_their_place(text: str, kept: str, kind: str) -> None:
    counts: Counter[str] = Counter()
    assert redact_text(text, counts) == kept
    assert counts == Counter({kind: 1})


@pytest.mark.parametrize(
    "text",
    [
        "You can use the variable GITHUB_TOKEN, as in `curl -H 'Authorization: Bearer $GITHUB_TOKEN'`.",
        "https://$USER:${TOKEN}@github.com/org/repo",
        "token = config.get_default_authentication_token()",
        "tokenizer=AutoTokenizer.from_pretrained, max_new_tokens=1024",
        "password: the user must choose one",
        "commit 3ea751c087f3c8e1d2b4a5968778695a4b3c2d1e",
        "uuid 258c7280-ae70-4798-800f-63464d01a85d",
        "sk-short, hf_model, AKIA",
        "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact_text(text) == text


def test_fields_named_after_secrets_are_redacted_by_their_name() -> None:
    secret = made(24)
    value = {
        "db": {"password": secret, "max_tokens": 4096, "token": "none", "note": secret},
        "api_key": SECRETS["openai_key"],
    }
    counts: Counter[str] = Counter()
    assert Redactor().value(value, counts) == {
        "db": {"password": "[REDACTED:assigned_secret]", "max_tokens": 4096, "token": "none", "note": secret},
        "api_key": "[REDACTED:openai_key]",
    }
    assert counts == Counter(assigned_secret=1, openai_key=1)


@pytest.mark.parametrize(
    ("secrets", "innocent"),
    [
        pytest.param(cases("secrets.txt"), cases("innocent.txt"), id="lists"),
        pytest.param(cases("more_secrets.txt"), cases("more_innocent.txt"), id="more"),
        pytest.param(cases("logged_secrets.txt"), cases("logged_innocent.txt"), id="logged"),
        pytest.param(cases("kinds_secrets.txt"), cases("kinds_innocent.txt"), id="kinds"),
        pytest.param(combined(), combined(innocent=True), id="combined"),
        pytest.param(combined(1), combined(1, innocent=True), id="combined-1"),
    ],
)
def test_secrets_go_and_innocent_lines_stay(secrets: list[Case], innocent: list[Case]) -> None:
    assert min(len(secrets), len(innocent)) >= 200
    assert all(case.secrets for case in secrets)
    missed = [case for case in secrets if case.leaks(redact_text(case.text))]
    changed = [case for case in innocent if redact_text(case.text) != case.text]
    assert len(missed) <= 0.02 * len(secrets), missed
    assert len(changed) <= 0.01 * len(innocent), changed


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_texts_inside_texts_are_read(depth: int) -> None:
    secret = made(24)
    inner = f'{{"user": "u", "password": "{secret}"}}'
    coats: dict[str, Callable[[str], str]] = {
        "json": json.dumps,
        "url": quote,
        "html": html.escape,
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
    }
    for coat in coats.values():
        text = inner
        for _ in range(depth):
            text = coat(text)
        clean = redact_text(f"a {text} z")
        assert "[REDACTED:assigned_secret]" in clean
        assert (clean[:2], clean[-2:]) == ("a ", " z")
        assert coat(secret)[4:20] not in clean


def test_every_value_of_a_list_and_of_a_column_goes() -> None:
    first, second = made(14), made(14)
    for text in (
        f'"passwords": ["{first}", "{second}"]',
        f"| user | password | port |\n|---|---|---|\n| a | {first} | 1 |\n| b | {second} | 2 |",
        f"user,password,port\na,{first},1\nb,{second},2\n",
    ):
        counts: Counter[str] = Counter()
        clean = redact_text(text, counts)
        assert counts == Counter(assigned_secret=2)
        assert clean == text.replace(first, "[REDACTED:assigned_secret]").replace(second, "[REDACTED:assigned_secret]")
    row = f"INSERT INTO t (id, token, n) VALUES (1, '{first}x{second}', 2)"
    assert redact_text(row) == "INSERT INTO t (id, token, n) VALUES (1, '[REDACTED:assigned_secret]', 2)"


def test_source_code_that_speaks_of_secrets_stays() -> None:
    names = ("ssl", "secrets", "getpass", "netrc", "smtplib", "imaplib", "ftplib", "argparse", "configparser")
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in names] + [*folder.glob("urllib/*.py"), *folder.glob("http/*.py")]
    spoken = re.compile(r"(?i)pass|token|key|secret|auth|cookie")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if spoken.search(line)]
    assert len(lines) > 500
    changed = [line for line in lines if redact_text(line) != line]
    assert len(changed) <= 0.01 * len(lines), changed


def test_personal_data_goes_only_where_asked() -> None:
    text = (
        "mail jane.doe+x@mail.example.org from /home/jane/src and C:\\Users\\Jane\\x, call +49 30 1234567 or "
        "(555) 010-4477, card 4111 1111 1111 1111"
    )
    assert redact_text(text) == text
    counts: Counter[str] = Counter()
    clean = Redactor(pii=True).text(text, counts)
    assert counts == Counter(email=1, home=2, phone=2, card=1)
    assert clean.startswith("mail [REDACTED:email] from /home/[REDACTED:home]/src and C:\\Users\\[REDACTED:home]\\x,")
    for innocent in (
        "version 1.2.3-456-7890",
        "4111 1111 1111 1112",
        "2026-01-15 10:20:30",
        "10.0.0.1:8080 and 192.168.100.200",
        "a@b, @decorator, user@localhost",
        "commit 1234567890123456789012345678901234567890",
        "took 1234 5678 ms",
    ):
        assert Redactor(pii=True).text(innocent) == innocent


def test_bank_accounts_and_social_security_numbers_are_personal() -> None:
    redactor = Redactor(pii=True)
    for text, kind in (
        ("paid with 3782 822463 10005", "card"),
        ("paid with 378282246310005.", "card"),
        ("IBAN DE89 3704 0044 0532 0130 00", "iban"),
        ("to GB82WEST12345698765432 today", "iban"),
        ("SSN 078-05-1120", "ssn"),
    ):
        counts: Counter[str] = Counter()
        assert redact_text(text) == text
        assert f"[REDACTED:{kind}]" in redactor.text(text, counts)
        assert counts == Counter({kind: 1})
    for innocent in (
        "3782 822463 10006",
        "DE89 3704 0044 0532 0130 01",
        "000-12-3456",
        "666-12-3456",
        "call 123-45-6789-0",
        "AB12 CDEF GHIJ KLMN",
    ):
        assert redactor.text(innocent) == innocent


def test_keys_in_ids_and_names_go_and_stay_apart() -> None:
    first, second = made(36), made(36)
    call = ToolCall(id=f"ghp_{first}", name=f"run_ghp_{first}")
    other = ToolCall(id=f"ghp_{second}", name="run")
    messages = [say("user", "x"), say("assistant", "", call, other)]
    messages += [answer(call, "a", failed=True), answer(other, "b")]
    pair = PreferencePair(
        chosen=say("assistant", "x"),
        rejected=say("assistant", "y"),
        trace_id=f"ghp_{first}",
        message_index=1,
        provenance={"votes": {f"ghp_{second}": True}},
    )
    trace = Trace(
        id=f"ghp_{first}",
        group_id=f"ghp_{second}",
        messages=messages,
        preference_pairs=[pair],
        origin=Origin(format="limbeck", file=f"log-ghp_{first}.jsonl"),
    )
    redactor = Redactor()
    clean, counts = redactor.trace(trace)
    assert not any(secret in clean.to_json() for secret in (first, second))
    assert counts["github_token"] > 0
    assert clean.callers() == trace.callers() == {2: (1, 0), 3: (1, 1)}
    assert clean.id == clean.preference_pairs[0].trace_id == redactor.id(trace.id) == "[REDACTED:github_token]"
    assert clean.group_id == "[REDACTED:github_token]#2"
    assert redactor.trace(clean) == (clean, Counter())


def test_rules_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "rules:\n  - {id: badge, pattern: 'badge (?P<secret>B-\\d{4})'}\n"
        "assigned: {tokens: [launch code], words: [unset]}\nallow: ['B-0000']\n"
    )
    redactor = Redactor(rules=[read_rules(path)])
    assert redactor.text("badge B-1234, badge B-0000") == "badge [REDACTED:badge], badge B-0000"
    assert redactor.text("launch_code=a1b2c3d4e5 password: unset9x") == (
        "launch_code=[REDACTED:assigned_secret] password: [REDACTED:assigned_secret]"
    )
    path.write_text("rules:\n  - {id: x, pattern: '('}\n")
    with pytest.raises(TraceError) as refused:
        read_rules(path)
    assert "rules.0.pattern" in str(refused.value)
    path.write_text("rules: [")
    with pytest.raises(TraceError):
        read_rules(path)
    with pytest.raises(TraceError):
        read_rules(tmp_path / "gone.yaml")
    assert RuleSet.parse("", "empty").rules == []


def test_hits_say_where_and_show_only_a_beginning() -> None:
    secret = SECRETS["github_token"]
    trace = Trace(id="t", messages=[say("user", "hi"), say("assistant", f"use {secret}")], meta={"k": secret})
    first, second = Redactor().hits(trace)
    assert (first[0], first[1].kind, second[0]) == (1, "github_token", None)
    assert first[1].preview == f"{secret[:6]}… (40 characters)"


def test_long_values_go_to_their_end() -> None:
    long = made(5000)
    assert redact_text(f"CREDENTIALS_KEY={long} x") == "CREDENTIALS_KEY=[REDACTED:assigned_secret] x"
    assert redact_text(f'"client_secret": "{long}", "x": 1') == '"client_secret": "[REDACTED:assigned_secret]", "x": 1'


def test_a_truncated_private_key_goes_too() -> None:
    listing = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{KEY_BODY}\nand then some words"
    clean = redact_text(listing)
    assert clean == "[REDACTED:private_key]\nand then some words"


@given(st.lists(st.text(max_size=20) | st.sampled_from(sorted(SECRETS.values())), max_size=6))
def test_redaction_is_idempotent_and_leaves_no_secret(parts: list[str]) -> None:
    clean = redact_text(" ".join(parts))
    assert redact_text(clean) == clean
    assert not any(secret in clean for secret in SECRETS.values())


def test_every_string_of_a_trace_is_reached() -> None:
    secret = SECRETS["github_token"]
    call = ToolCall(id="c", name="run", arguments={"command": [f"echo {secret}"], secret: 1})
    raw = ToolCall(id="d", name="run", arguments=f"{{broken {secret}")
    bad = say("assistant", "", call, raw, reasoning=f"use {secret}", sampled_ids=[1], logprobs=[-1.0])
    failed = answer(call, f"Error: {secret}", failed=True).model_copy(update={"error_meta": {"seen": secret}})
    pair = PreferencePair(
        chosen=say("assistant", secret), rejected=say("assistant", "no"), prompt=[say("user", secret)]
    )
    fine = say("assistant", "fine", sampled_ids=[3])
    trace = Trace(
        id="t",
        messages=[say("user", secret), bad, failed, fine],
        tools=[{"function": {"name": "run", "description": secret}}],
        preference_pairs=[pair],
        meta={"note": secret},
    )
    clean, counts = redact_trace(trace)
    assert secret not in clean.to_json()
    assert counts == Counter(github_token=11)
    assert clean.messages[1].sampled_ids is None
    assert clean.messages[1].logprobs is None
    assert clean.messages[3].sampled_ids == [3]
    assert redact_trace(clean) == (clean, Counter())


# names without the letters of pwd, key, sid, jwt and other short names of secrets
NAMES = st.text(st.characters(exclude_characters="cjkpsCJKPS"), max_size=3)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=9), lambda x: st.lists(x) | st.dictionaries(NAMES, x)))
def test_values_without_secrets_keep_their_structure(value: object) -> None:
    assert json.dumps(Redactor().value(value)) == json.dumps(value)


@pytest.mark.parametrize(
    ("start", "unit", "times"),
    [
        ("-----BEGIN RSA PRIVATE KEY-----", "A", 200_000),
        ("", "token=", 10_000),
        ("", "a:", 100_000),
        ("", "eyJ", 70_000),
        ("", "x://", 50_000),
        ("", "x://a:b", 30_000),
        ("", "-----BEGIN RSA PRIVATE KEY-----", 6_000),
        ("", "password: ", 20_000),
        ("password = '", "a", 200_000),
        ("", "--token ", 25_000),
        ("", "bearer ", 25_000),
        ("", "cookie: a=b;", 20_000),
        ("", "mysql -u ", 20_000),
        ("", "a.b-", 50_000),
        ("", "1234 ", 40_000),
        ("", "a@b.", 40_000),
        ("login ", "x password ", 20_000),
        ("password", "\\\\", 100_000),
        ("", "password%22%3A%22", 20_000),
        ("", "your api key is ", 20_000),
        ("", 'key="password" >', 15_000),
        ("seed phrase: ", "word ", 40_000),
        ("", "echo a:b | ", 20_000),
        ("", "DE89 3704 ", 20_000),
        ("", "htpasswd -b ", 20_000),
        ("", "12345678:", 25_000),
        ("", "| password ", 20_000),
        ("", "password,token\n", 5_000),
        ("", "| token | password |\n|---|---|\n", 3_000),
        ("", "(password, token) VALUES (", 10_000),
        ("%", "25", 100_000),
        ("", "%2525", 40_000),
        ("", "&amp;amp;", 20_000),
        ("", 'password: {"value', 10_000),
        ("", "<password x>", 15_000),
        ("", "the password you gave me was ", 8_000),
        ("", "['password', ", 15_000),
        ("", "cGFzc3dvcmQ9YWJjZGVmZ2hpamtsbW5vcA== ", 5_000),
        ("", "password=${password:-", 10_000),
        ("Private-Lines: 1\\n", "AAAAAAAAAAAAAAAA\\n", 10_000),
    ],
)
def test_hostile_text_takes_no_superlinear_time(start: str, unit: str, times: int) -> None:
    redactor = Redactor(pii=True)

    def seconds(text: str) -> float:
        begin = time.thread_time()
        redactor.text(text)
        return time.thread_time() - begin

    # a tenth of the text first: what is quadratic takes a hundredth of the time, what is linear a tenth; the least of
    # several, for neighbours on the machine only ever add to the time
    pairs = [[seconds(start + unit * n) for n in (times // 10, times)] for _ in range(3)]
    short, long = (min(column) for column in zip(*pairs, strict=True))
    assert long < 30 * short


def test_real_sessions_published_without_secrets_have_none() -> None:
    from limbeck.traces.readers import read_traces

    found: Counter[str] = Counter()
    for trace in read_traces(real_logs("claude_code_*.jsonl") + real_logs("openhands_*.jsonl")):
        found += redact_trace(trace)[1]
    assert not found
