"""Secrets known by their names: ``DB_PASSWORD=x``, ``"apiKey": "x"``, ``--token x``, ``the password is x``.

Every name of a secret in a text is looked at once. What stands behind it, up to a value, is one of a few forms; the
form and the name say how much the value itself must look like a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from limbeck.traces.secret_rules import AssignedNames
from limbeck.traces.secret_values import (
    MASK,
    WORD,
    Judge,
    Strength,
    is_name,
    is_words,
    looks_random,
)

_NAME_LENGTH = 64
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
# What closes a name: quotes, brackets, emphasis, the index of a form's field
_CLOSE = r"(?:\[\d{0,5}\])?[\"'`\]}*_]{0,4}"
# A declared type: str, Optional[str], &'static str, Option<String>, String?, string | null
_TYPE = r"[&*?]?(?:'[a-z]{1,10}\s)?(?:mut\s|const\s)?[A-Za-z_][\w.]{0,30}"
_TYPE += r"(?:\[[^\]\n]{0,40}\]|<[^<>\n]{0,40}>|\?)?(?:\s?\|\s?[a-z]{1,20}){0,2}"
_STRING = r"[bBrRuUNL@$]{0,2}#{0,3}[\"'`]"
# Calls that only wrap a string; of what others return, only what their strings look like is known.
_WRAPPER = r"(?:Some|Ok|\[\]byte|Secret(?:Str|String|Box)?(?:::(?:new|from))?|String::from)\("
_CALL = r"(?:new\s|await\s)?[A-Za-z_][\w.:$]{0,60}!?\(\s{0,3}"
_CALL += r"(?:[\"'][^\"'\n]{0,64}[\"'],\s{0,3}(?=[\"'])|(?:\.{3},\s?)?\w{1,20}\s?=\s?)?"
_CALL += rf"(?={_STRING})"
_ELSE = r"[^\"'`\n,;]{0,60}(?:[\"'][^\"'\n]{0,64}[\"'][\])]{0,2}\s{0,3})?(?:\|\||\?\?|\bor\b)\s{0,3}(?=[\"'`])"
# name = value, "name": "value", name: str = "value", env["name"] = value. A type is told from padded base64 by what
# follows the equals sign.
_ASSIGNED = re.compile(
    rf"{_CLOSE}(?:[ \t](?:string|str|\[\]byte)(?=[ \t]{{1,3}}:?=))?[ \t]{{0,40}}\s{{0,3}}"
    rf"(?P<sign>:\s{{1,3}}{_TYPE}(?:\s{{1,3}}=(?!=)|=(?=[\"'`]\w))"
    r"|:=|# ?=>|=>|<-(?= )|by lazy \{|[=!]={1,2}|:|：|(?:\|\||\?\?|[?+])?=)"
    rf"(?P<gap>\s{{0,3}})[ \t]{{0,40}}(?:[*_]{{2,3}}\s{{0,3}}|[|>][+-]?\n\s{{1,40}})?"
    rf"(?:<!\[CDATA\[|{_WRAPPER}(?={_STRING})|(?P<computed>{_ELSE}|{_CALL}))?[\[(]?"
)
# ("name", "value"), {name,"value"}, withPassword("value")
_TYPED = r"\)\.(?:send_?[kK]eys|fill|type|set\w{0,10}|val|press_?[sS]equentially)\("
_PASSED = re.compile(
    rf"(?:[\"'`\])]{{1,3}}\s{{0,3}},\s{{0,40}}|[\"'`\]]{{0,4}}{_TYPED}|,\s{{0,3}}|\(\s{{0,3}})(?={_STRING})"
)
_SPACES = re.compile(r"(?i)[\"']?(?P<gap>[ \t]{1,40})(?:(?:/t[ \t]\w{1,20}[ \t]{1,3})?/d[ \t]{1,3})?")
_NEXT_LINE = re.compile(r"[*_]{0,2}\r?\n\s{0,8}`?(?P<value>[\w+/=.~-]{16,512})`?(?=\s*(?:\n|\Z))")
_TITLE_START = re.compile(r"[\w #*>.'|-]{0,40}\Z")
_MORE = re.compile(r"[\"'],\s{0,40}[\"']")
# what stands in front of names that a space parts from their value
_SETTING = re.compile(
    r"(?<!\w)(?:ENV|setenv|setx|SETX|setq|export|/[vV]|set -gx|set -x|(?:config(?:ure)?|secrets?) set)[ \t]{1,3}"
    r"(?:--?[\w-]{1,20}[ \t]{1,3}){0,3}[\"']?(?:[^\s:\"']{0,64}:)?\Z"
)
_LINE_START = re.compile(r"[ \t]{0,16}(?:[-*+>][ \t]{0,3}|\d{1,6}[:\t→]\s{0,8})?\Z")
_LINE_END = re.compile(r"\s{0,3}(?:\n|\Z)")
# <name type="x">value</name>, <key>name</key><string>value</string>, <function name="name">value<
_TAGGED = re.compile(
    r"(?:[^<>\n]{0,80}(?<!/)|</\w{1,20})>\s{0,40}(?:<(?:value|string)>\s{0,3}|<!\[CDATA\[)?"
    r"(?P<value>[^\s<>][^<>\n]{0,600}?)\s{0,3}(?:\]\]>\s{0,3})?</"
)
# {"name": "NAME", "value": "value"}, variable "NAME" { default = "value" }, ("#name", value="value")
_VALUE_KEY = r"(?:(?:Parameter|Secret)?[Vv]alue|VALUE|[Dd]efault|text)"
_BESIDE = re.compile(
    rf"(?P<close>[\])}}\"']{{0,3}})(?=[\s,:/>])[\s:,]{{0,40}}\{{?[^{{}}<>]{{0,200}}?[\s,{{\"']{_VALUE_KEY}[\"']?\s{{0,3}}[:=](?P<gap>\s{{0,3}})"
)
_NAMING = re.compile(r"(?i)(?:\bname|key|selector|element|id|/v)[\"']?\s{0,3}[:=\s]\s{0,3}[\"']?[^\s\"']{0,64}\Z")
# What may stand between a name that is written for people and its value: "Password (staging): x", "**API key**: `x`",
# "the token for staging is x", "| password | x |", "My password's x".
_SAID = re.compile(
    r"(?:\s(?:is|was|has\sbeen)\s(?:generated|created|issued|assigned|set|changed|reset)"
    r"(?:\sfor\s[\w.@-]{1,64}|(?=\s?[:=]))"
    r"|s?(?:\s\([^()\n]{1,30}\)|\s\[[^\[\]\n]{1,30}\]|\s[\"'`][^\"'`\n]{1,40}[\"'`](?=\s?[:=])"
    r"|\s(?:generated|created|issued|assigned|set|changed|reset|updated|received|obtained|found|used|value|string|below)"
    r"(?=\s?[:=]|\sis\s)"
    r"|\s(?:that\s)?(?:you|we|i|they)(?:\s[a-z']{1,12}){1,3}(?=\s?:|\sis\s)|\s(?:for|to|of)\s[\w.@-]{1,40}(?:\s[\w.@-]{1,40}){0,3}?)?)[*_`]{0,3}"
    r"(?:\s#?\d{1,3})?(?P<sign>\s{0,3}(?::|=|->|→|：|是|为|は)|'s\s"
    r"|\s{1,3}(?:(?:is|are|was|has\sbeen|will\sbe|now|set\sto|changed\sto|reset\sto|to"
    r"|ist|lautet|war|est|es|sera|será|è|é|jest|är|är\snu)\b\s?){1,3}:?|[ \t]{1,40}\|(?=\s)"
    r"|[ \t](?=[A-Za-z0-9+/=_-]{16}))"
    r"(?:[*_]{1,3}|\s?</?[a-z]{1,6}>)?(?P<gap>\s{0,3})",
    re.IGNORECASE,
)
_SAID_NAME = re.compile(r"(?:[^\W\d]{2,24}[ -]){0,3}[^\W\d]{2,24}\Z")
# a sentence that goes on up to what it tells: "the password I used was x"
_TOLD = re.compile(
    r"(?:,?[ \t]{1,2}[\w'@/()\"`*.-]{1,30}){0,8}?"
    r"(?:(?:,?\s(?:is|was|are|be|now|to|with|got|used?|as|value|try|enter|type)\b:?|\s?[:=]|\s(?:->|→|[-–—]))"
    r"[ \t]{1,3}|[ \t]\()[*_]{0,3}(?=[\"'`]?[\w$!#%&+/=-]{8})"
)
_OTHER_THING = re.compile(
    r"(?i)commit|\bsha|hash|digest|checksum|\bid\b|uuid|file|path|name|length|count|url|version|type|call"
)
_VALUE = re.compile(
    r"[bBrRuUNL@$]{0,2}#{0,3}(?P<quote>\"{3}(?=[^\"\s])|'{3}(?=[^'\s])|[\"'`])"
    r"(?:(?i:basic|bearer|token|apikey|bot)[ ]{1,3})?(?P<quoted>(?:\\[^\n]|(?!(?P=quote))[^\n\\]){1,512})"
    r"|(?P<bare>[^\s\"'`,;&<>(){}\[\]|\\]{1,512})(?P<after>[(\[{]?)"
)
_GROUPS = re.compile(r"(?=[a-z ]{0,18}\d)[a-z0-9]{4}(?: [a-z0-9]{4}){3}(?=\s*(?:\n|\Z))")
_PLAIN = re.compile(r"[\w+/=.~!@#$%^&*-]{8,512}")
_INSERTED = re.compile(r"[\"`]?[^()]{0,200}\)\s{0,3}(?:VALUES|values|Values)\s{0,3}\((?P<row>[^()]{1,1000})\)")
_HEADER = re.compile(r"\"?[A-Za-z_][\w ]{0,40}\"?(?:,\"?[A-Za-z_][\w ]{0,40}\"?){1,20}\r?")
_BELOW_HEADER = re.compile(r"\n(?P<rule>[ \t]{0,8}[|:+-][|:+ -]{2,400}\n)?")
_ROW = re.compile(r"[^\n]+")
_DIGIT = re.compile(r"\d")
_HEX = re.compile(r"[0-9a-fA-F-]+")
_PROPERTY = re.compile(r"\s*[\w.-]+=[^\s;(){}\[\],]+\s*")
_URN = re.compile(r"\b(?:arn|urn|did):(?:[\w:/.-]*:)?\Z")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_DOTS = re.compile(r"[.:?]+\Z")
# what is left of a value that is longer than the part it is judged by
_REST = {"quoted": re.compile(r"[^\n\"'`\\]*"), "bare": re.compile(r"[^\s\"'`,;&<>(){}\[\]|\\]*")}
_JUDGED = 512
# what is left of a value in a file of settings, where signs of the shell mean nothing
_REST_OF_LINE = re.compile(r"(?:[&;|()<>{}\[\],][^\s=\"'`,;]+)+(?=\s*(?:\n|\Z))")
_EXPORTING = re.compile(r"(?:\bexport|\benv|(?<!\S)-e|--set|\bset)\s+\Z")

Span = tuple[int, int]


class NamedSecrets:
    """Finds the values of names such as ``password``; which names those are is data."""

    def __init__(self, names: AssignedNames, judge: Judge) -> None:
        self._judge = judge
        self._public = frozenset(names.public)
        self._further = frozenset(names.further)
        self._named: dict[str, Strength] = {
            **dict.fromkeys(names.weak, "weak"),
            **dict.fromkeys(names.tokens, "token"),
            **dict.fromkeys(names.passwords, "password"),
        }
        self._capital: dict[str, Strength] = {
            **dict.fromkeys(names.capital_tokens, "token"),
            **dict.fromkeys(names.capital_passwords, "password"),
        }
        known = {name.split()[-1] for name in (*self._named, *self._capital)}
        # the longest first, for "pass" would end the search for "password"
        self._ends = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))))
        self._strengths: dict[str, Strength | None] = {}

    def spans(self, text: str) -> list[Span]:
        """Where the values stand, in order."""
        # a case-sensitive search of small letters takes a third of the time; lower() may change how long a text is
        lowered = text.lower()
        done, spans = 0, list[Span]()
        for hit in self._ends.finditer(lowered if len(lowered) == len(text) else text):
            if hit.end() <= done:
                continue
            start, end = _name(text, *hit.span())
            done = max(done, end)
            span, listed = self._value(text, start, end), False
            if span is None:
                spans += self._columns(text, start, end)
            while span is not None and span[0] >= end:
                spans.append(span)
                done = span[1]
                listed = listed or text[span[0] - 2 : span[0] - 1] == "["
                value = _VALUE.match(text, more.end() - 1) if listed and (more := _MORE.match(text, done)) else None
                span = None if value is None or value["quoted"] is None else value.span("quoted")
        return sorted(spans)

    def strength(self, name: str) -> Strength | None:
        """What a name says of its value; None where it names no secret."""
        if name not in self._strengths:
            # names come from texts, so there is no end of them
            if len(self._strengths) > 100_000:
                self._strengths.clear()
            self._strengths[name] = self._classify(name)
        return self._strengths[name]

    def _classify(self, name: str) -> Strength | None:
        words = [word.lower() for word in WORD.findall(name)]
        while len(words) > 1 and (words[-1].isdigit() or words[-1] in self._further):
            words.pop()
        words = words[-4:]
        if not self._public.isdisjoint(words):
            return None
        # SOMETHING_PASS is a password, something_pass may be a pass over data
        capital = self._capital if name == name.upper() and "_" in name else {}
        for tables in (capital, self._named):
            for length in range(len(words), 0, -1):
                strength = tables.get(" ".join(words[-length:]))
                if strength is not None:
                    return strength
        joined = (
            "password",
            "passwd",
            "passphrase",
            "storepass",
            "keypass",
            *(("pass",) if name == name.upper() else ()),
        )
        if words and words[-1].endswith(joined):
            return "password"
        if words and words[-1].endswith(("token", "apikey", "accesskey", "secretkey", "secret")):
            return "token"
        return "key" if words and words[-1] == "key" else None

    # -- one name ------------------------------------------------------------------------------------------------------

    def _value(self, text: str, start: int, end: int) -> Span | None:
        """Where the value stands of the name between two offsets."""
        following = text[end : end + 1]
        if not following or following == MASK:
            return None
        if text[start - 1 : start] == ":" and _URN.search(text, max(0, start - 200), start):
            return None
        name = text[start:end]
        strength = self.strength(name) if 2 <= len(name) <= _NAME_LENGTH else None
        if strength is not None:
            forms = (self._assigned, self._passed, self._spaced, self._tagged, self._beside)
            for form in forms:
                span = form(text, start, end, name, strength)
                if span is not None:
                    return span
        return self._said(text, start, end)

    def _assigned(self, text: str, start: int, end: int, name: str, strength: Strength) -> Span | None:
        match = _ASSIGNED.match(text, end)
        value = None if match is None else _VALUE.match(text, match.end())
        if match is None or value is None:
            return None
        if value["quoted"] is not None:
            if match["computed"]:
                secret = strength != "key" and self._is_key(value["quoted"])
            else:
                secret = self._judge.is_secret(strength, value["quoted"], True)
            return _whole(text, value, "quoted") if secret else None
        bare, sign = value["bare"], match["sign"]
        if strength in ("password", "weak") and (groups := _GROUPS.match(text, value.start("bare"))):
            return groups.span()
        if value["after"] or (strength == "weak" and is_name(bare)):
            return None
        if strength == "weak" and match["gap"] and "=" in sign and _IDENTIFIER.fullmatch(bare):
            return None
        # DB_PASSWORD=x, export password=x and ?password=x are where any word is a value
        plain = sign == "=" and not match["gap"]
        exported = plain and _EXPORTING.search(text, max(0, start - 12), start) is not None
        flag = text[max(0, start - 2) : start] == "--" and "id=" not in bare
        shell = (plain and name == name.upper()) or exported or flag
        # spring.datasource.password=x, on a line of its own, is a file of properties
        shell = shell or (plain and "." in name and _PROPERTY.fullmatch(_line(text, start)) is not None)
        if not self._judge.is_secret(strength, bare, shell):
            return None
        begin, stop = _whole(text, value, "bare")
        rest = _REST_OF_LINE.match(text, stop) if plain and name == name.upper() else None
        return begin, stop if rest is None else rest.end()

    def _is_key(self, value: str) -> bool:
        """Whether a value is random where only its looks speak for it: no path, and no name of a secret."""
        if ("/" in value and len(value) < 24) or self.strength(value) is not None:
            return False
        return _PLAIN.fullmatch(value) is not None and self._judge.is_secret("token", value, True)

    def _passed(self, text: str, start: int, end: int, name: str, strength: Strength) -> Span | None:
        match = _PASSED.match(text, end)
        value = None if match is None else _VALUE.match(text, match.end())
        if match is None or value is None or value["quoted"] is None:
            return None
        # a constant that names an option, or the first of two in braces
        if match[0].strip() == "," and text[start - 1 : start] != "{" and not (name.isupper() and "_" in name):
            return None
        secret = self._judge.is_secret(strength, value["quoted"], False) and self.strength(value["quoted"]) is None
        return _whole(text, value, "quoted") if secret else None

    def _spaced(self, text: str, start: int, end: int, name: str, strength: Strength) -> Span | None:
        """A name in front of its value and nothing between: only where, or what, no sentence has there."""
        match = _SPACES.match(text, end)
        if match is None:
            return self._below(text, start, end)
        value = _VALUE.match(text, match.end())
        if value is None or value["after"]:
            return None
        group = "quoted" if value["quoted"] is not None else "bare"
        word, before = value[group], text[max(0, start - 100) : start]
        if before.endswith("-") or _SETTING.search(before):
            # --name value, ENV NAME value: any word
            flag = re.search(r"(?<![\w-])--?\Z", before) is not None
            if word.startswith(("-", "id=")) or (before.endswith("-") and not flag):
                return None
            # with one dash, a word may also be a switch of its own
            any_word = not flag or before.endswith("--")
            return _whole(text, value, group) if self._judge.is_secret(strength, word, any_word) else None
        line_start = before.rpartition("\n")[2]
        lonely = _LINE_START.match(line_start) is not None and _LINE_END.match(text, value.end()) is not None
        if group == "quoted" or lonely:
            sentence = word.isalpha() and word[1:].islower()
            kept = (
                sentence
                or strength == "weak"
                or (is_words(word) and (group == "bare" or not (word.isalnum() or _DIGIT.search(word))))
            )
            kept = kept or not self._judge.is_secret(strength, word, group == "quoted")
            return None if kept else _whole(text, value, group)
        if len(match["gap"]) <= 3 and ("_" in name or "-" in name):
            # what follows is the next word of a sentence, or a commit, unless it looks like nothing else
            other = len(word) >= 16 and not _HEX.fullmatch(word)
            return _whole(text, value, group) if other and self._judge.is_secret("token", word, False) else None
        return None

    def _below(self, text: str, start: int, end: int) -> Span | None:
        """A key on the line below a line with nothing but its name."""
        match = _NEXT_LINE.match(text, end)
        if match is None or _TITLE_START.match(text[max(0, start - 40) : start].rpartition("\n")[2]) is None:
            return None
        return match.span("value") if self._is_key(match["value"]) else None

    def _tagged(self, text: str, start: int, end: int, name: str, strength: Strength) -> Span | None:
        opened = text.rfind("<", max(0, start - 100), start)
        if opened < 0 or ">" in text[opened + 1 : start].removeprefix("key>").removeprefix("name>"):
            return None
        match = _TAGGED.match(text, end)
        if match is None or not self._judge.is_secret(strength, match["value"], True):
            return None
        return match.span("value")

    def _beside(self, text: str, start: int, end: int, name: str, strength: Strength) -> Span | None:
        """The value of another key: the name is itself a value."""
        match = _BESIDE.match(text, end)
        value = None if match is None else _VALUE.match(text, match.end())
        if match is None or value is None or value["after"]:
            return None
        named = _NAMING.search(text, max(0, start - 100), start) is not None
        # a name on a line above what lies within it
        named = named or text[end : end + 2] == ":\n"
        if not named and not match["close"]:
            return None
        group = "quoted" if value["quoted"] is not None else "bare"
        if group == "bare" and not named:
            return None
        return _whole(text, value, group) if self._judge.is_secret(strength, value[group], named) else None

    def _columns(self, text: str, start: int, end: int) -> Iterator[Span]:
        """The values below a name that heads a column, or at its place in a list: of tables, CSV and SQL."""
        if text[end : end + 1] not in (" ", "|", ",", ")", "\n", '"', "`") or self.strength(text[start:end]) is None:
            return
        first, last = (
            max(text.rfind("\n", max(0, start - 400), start), start - 400, -1) + 1,
            text.find("\n", end, end + 400),
        )
        inserted = _INSERTED.match(text, end)
        if inserted is not None:
            separator, first = ",", max(first, text.rfind("(", first, start) + 1)
            rows = [inserted.span("row")]
        elif last < 0:
            return
        else:
            header = text[first:last]
            separator = "|" if "|" in header else ","
            if separator not in header or (separator == "," and not _HEADER.fullmatch(header)):
                return
            below = _BELOW_HEADER.match(text, last)
            if below is None or (separator == "|" and not below["rule"]):
                return
            rows = [row.span() for row in _ROW.finditer(text, below.end(), below.end() + 2000)][:20]
        column = text.count(separator, first, start)
        for begin, stop in rows:
            place, cell_end = begin, stop
            for _ in range(column):
                place = text.find(separator, place, stop) + 1
                if not place:
                    return
            if (after := text.find(separator, place, stop)) >= 0:
                cell_end = after
            cell = text[place:cell_end]
            plain = cell.strip(" \t\r\"'`*")
            strength = self.strength(text[start:end])
            if strength is not None and self._judge.is_secret(
                "weak" if strength == "password" else strength, plain, False
            ):
                offset = place + cell.index(plain)
                yield offset, offset + len(plain)

    def _said(self, text: str, start: int, end: int) -> Span | None:
        """The value of a name that is written for people, such as ``Your API key is x``."""
        name = _SAID_NAME.search(text, max(0, end - 40), end)
        strength = None if name is None else self.strength(name[0])
        if name is None or strength is None:
            return None
        said = _SAID.match(text, end)
        value = None if said is None else _VALUE.match(text, said.end())
        span = None if said is None or value is None else self._said_value(text, name, strength, said, value)
        return self._told(text, end) if span is None and strength in ("password", "token") else span

    def _told(self, text: str, end: int) -> Span | None:
        phrase = _TOLD.match(text, end)
        value = None if phrase is None else _VALUE.match(text, phrase.end())
        if phrase is None or value is None or value["after"] or _OTHER_THING.search(phrase[0]):
            return None
        group = "quoted" if value["quoted"] is not None else "bare"
        word = value[group].rstrip(".:?!")
        if not self._is_key(word) or not any(map(str.isdigit, word)):
            return None
        return value.start(group), value.start(group) + len(word)

    def _said_value(
        self, text: str, name: re.Match[str], strength: Strength, said: re.Match[str], value: re.Match[str]
    ) -> Span | None:
        sign = said["sign"].strip()
        if not sign and " " not in name[0] and strength != "token":
            return None
        group = "quoted" if value["quoted"] is not None else "bare"
        if sign == "|":
            before = text[max(0, name.start() - 8) : name.start()].rstrip(" *_`")
            # the cells of a table; what begins its line may also be a command with a pipe behind it
            cells = before.endswith("|") or (before[-1:] in ("", "\n") and (len(value[group]) >= 16 or "_" in name[0]))
            if not cells or (not before.endswith("|") and not looks_random(value[group])):
                return None
        if value["after"] or (strength == "weak" and is_name(value[group])):
            return None
        dots = 0 if (dot := _DOTS.search(value[group])) is None or group == "quoted" else len(dot[0])
        secret = value[group][: len(value[group]) - dots]
        if not self._judge.is_secret("weak" if strength == "password" else strength, secret, False):
            return None
        begin, stop = _whole(text, value, group)
        return begin, stop - dots


def _name(text: str, start: int, end: int) -> Span:
    """The whole name that a known word was found in."""
    if not text[start:end].isascii():
        return start, end
    first, last = max(0, start - _NAME_LENGTH), end + _NAME_LENGTH
    while start > first and text[start - 1] in _NAME_CHARACTERS:
        start -= 1
    while end < last and text[end : end + 1] in _NAME_CHARACTERS:
        end += 1
    while end > start and text[end - 1] in "_.-":
        end -= 1
    while start < end and (text[start] in ".-" or text[start].isdigit()):
        start += 1
    return start, end


def _line(text: str, offset: int) -> str:
    """The line that holds a character, no more than 600 characters of it."""
    return text[text.rfind("\n", max(0, offset - 600), offset) + 1 :][:600].partition("\n")[0]


def _whole(text: str, value: re.Match[str], group: str) -> Span:
    start, end = value.span(group)
    if end - start < _JUDGED:
        return start, end
    rest = _REST[group].match(text, end)
    return start, end if rest is None else rest.end()
