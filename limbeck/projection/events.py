"""What two models whose last tokens differ can still be asked alike.

A model whose last token is `u` has read that what follows did not merge with `u` (see `limbeck.projection.pairs`).
Where two sides stand at one place of a text behind different last tokens, some outcomes are ruled out for one of them
only.
An outcome is the same event for both sides when nothing in it is ruled out by either:

- at a shared boundary the outcomes are cells; one that holds a token which its own side's last token forbids leaves;
- inside a token (a node of a `SpellingTree`, reached after fine tokens `a` with the coarse side still at the root) an
  outcome is a set of next fine tokens together with the coarse tokens that they lie in. `NodeEvents` finds those sets:
  a fine token belongs to the coarse token whose spelling goes on with it, to the coarse token in which it would lie
  (the first one of the coarse spelling of `a` and it), and, where a coarse token ends at `a`, to whatever may follow
  that one. Sets that share a token are one outcome.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from limbeck.projection.pairs import PairRule
from limbeck.projection.trees import SpellingTree, VocabTrees

IdArray = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MOST_NODES = 8192
"""Nodes whose outcomes are kept; beyond them the oldest are forgotten, and found again when they are needed."""


@dataclass(frozen=True, eq=False)
class NodeBuckets:
    """Outcomes at a node that are the same events for both sides, before the root's last tokens are asked.

    fine, coarse: ids; fine_bucket, coarse_bucket: the outcome `0..count-1` of each; own: fine ids that the node's last
    token forbids, so that the fine side gives them no mass. rest: an outcome that holds most fine ids, -1 where there
    is none; its ids are all but `outside`, and not in `fine`. All arrays are int32.
    """

    fine: IdArray
    fine_bucket: IdArray
    coarse: IdArray
    coarse_bucket: IdArray
    own: IdArray
    count: int
    rest: int
    outside: IdArray


class NodeEvents:
    """`NodeBuckets` of the nodes of one tree; each is found once.

    tree: the coarse side's tokens spelled in fine ones; mirror: the fine side's spelled in coarse ones; fine, coarse:
    the sides' pair rules. Tokens that no text gives take part without ruling anything out: they have no mass.
    """

    def __init__(self, tree: SpellingTree, mirror: SpellingTree, fine: PairRule, coarse: PairRule) -> None:
        self.tree, self.mirror, self.fine, self.coarse = tree, mirror, fine, coarse
        self.found: dict[int, NodeBuckets] = {}
        self._heads: dict[bytes, int] = {}

    def __getitem__(self, node: int) -> NodeBuckets:
        if node not in self.found:
            if len(self.found) >= MOST_NODES:
                del self.found[next(iter(self.found))]
            self.found[node] = _Search(self, node).buckets()
        return self.found[node]

    def head(self, data: bytes) -> int:
        """First coarse token of the spelling of some bytes, -1 where they have none."""
        if data not in self._heads:
            self._heads[data] = next(iter(self.coarse.spell(data)), -1)
        return self._heads[data]

    @cached_property
    def sorted_bytes(self) -> tuple[list[bytes], IntArray]:
        """Bytes of all fine tokens that have any, ascending, and their ids."""
        data = self.fine.token_bytes
        order = sorted((token for token in range(self.fine.size) if data[token]), key=data.__getitem__)
        return [data[token] for token in order], np.array(order, np.int64)

    @cached_property
    def outgrown(self) -> BoolArray:
        """bool by coarse id: a fine token begins with it and is longer, so the fine side may have written that one."""
        tree = self.mirror
        top = np.arange(1, int(tree.child_offsets[1]))
        out = np.zeros(self.coarse.size, dtype=bool)
        out[tree.token[top[tree.stop[top] - tree.start[top] > tree.ends[top]]]] = True
        return out

    @cached_property
    def outgrown_before(self) -> IntArray:
        """Such tokens among the first n of the tree's order, for every n."""
        return np.concatenate([[0], np.cumsum(self.outgrown[self.tree.order])])

    def longer(self, prefix: bytes) -> IntArray:
        """Fine ids whose bytes begin with `prefix` and go on."""
        keys, ids = self.sorted_bytes
        after = prefix.rstrip(b"\xff")
        stop = len(keys) if not after else bisect_left(keys, after[:-1] + bytes([after[-1] + 1]))
        return ids[bisect_right(keys, prefix) : stop]


class _Search:
    """The outcomes of one node. Units are its children, then the coarse tokens that end there; outcomes are units that
    a token joins."""

    def __init__(self, events: NodeEvents, node: int) -> None:
        self.events, tree = events, events.tree
        self.start, self.ends = int(tree.start[node]), int(tree.ends[node])
        self.stop = int(tree.stop[node])
        children = slice(int(tree.child_offsets[node]), int(tree.child_offsets[node + 1]))
        self.token = tree.token[children].astype(np.int64)
        self.starts, self.stops = tree.start[children], tree.stop[children]
        path = []
        while node:
            path.append(int(tree.token[node]))
            node = int(tree.parent[node])
        data = events.fine.token_bytes
        self.text = b"".join(data[token] for token in reversed(path))
        self.forbidden = events.fine.forbidden(path[0])
        self.own = np.zeros(events.fine.size, dtype=bool)
        self.own[self.forbidden] = True
        units = self.token.size + self.ends
        self.joined, self.spoilt = list(range(units)), [False] * units
        self.members: list[list[IntArray]] = [[] for _ in range(units)]
        self.follows: dict[int, BoolArray] = {}  # by unit of a coarse token that ends here: may the fine id follow it

    def unit(self, unit: int) -> int:
        while self.joined[unit] != unit:
            unit = self.joined[unit]
        return unit

    def join(self, first: int, second: int) -> None:
        first, second = self.unit(first), self.unit(second)
        self.joined[second] = first
        self.spoilt[first] |= self.spoilt[second]

    def spoil(self, unit: int) -> None:
        self.spoilt[self.unit(unit)] = True

    def unit_of(self, coarse: int) -> int:
        """The unit of a coarse token, -1 where it is not below the node."""
        place = int(self.events.tree.place[coarse]) if coarse >= 0 else -1
        if not self.start <= place < self.stop:
            return -1
        if place < self.start + self.ends:
            return self.token.size + place - self.start
        return int(np.searchsorted(self.starts, place, side="right")) - 1

    def lies_in(self, fine: int) -> int:
        """The unit of the coarse token in which a fine token would lie, -1 where that is not below the node."""
        return self.unit_of(self.events.head(self.text + self.events.fine.token_bytes[fine]))

    def buckets(self) -> NodeBuckets:
        self._ends()
        self._children()
        self._straddling()
        order, size = self.events.tree.order, self.token.size
        outcomes: dict[int, list[int]] = {}
        for unit in range(size + self.ends):
            if not self.spoilt[self.unit(unit)]:
                outcomes.setdefault(self.unit(unit), []).append(unit)
        fine, coarse = list[IdArray](), list[IdArray]()
        none = np.zeros(0, np.int32)
        rest, outside = -1, none
        for units in outcomes.values():
            inside = np.zeros(self.events.fine.size, dtype=bool)
            for ids in (ids for unit in units for ids in self.members[unit]):
                inside[ids] = True
            held = int(inside.sum())
            if not held:
                continue
            if 2 * held > inside.size:
                rest, outside = len(fine), np.flatnonzero(~inside).astype(np.int32)
            fine.append(np.flatnonzero(inside).astype(np.int32) if 2 * held <= inside.size else none)
            coarse.append(np.concatenate([order[self.place(unit)] for unit in units]))
        numbers = [
            np.repeat(np.arange(len(fine), dtype=np.int32), [ids.size for ids in side]) for side in (fine, coarse)
        ]
        flat = [np.concatenate([none, *side]) for side in (fine, coarse)]
        return NodeBuckets(flat[0], numbers[0], flat[1], numbers[1], self.forbidden, len(fine), rest, outside)

    def place(self, unit: int) -> slice:
        """A unit's range in the tree's order."""
        if unit < self.token.size:
            return slice(int(self.starts[unit]), int(self.stops[unit]))
        at = self.start + unit - self.token.size
        return slice(at, at + 1)

    def _ends(self) -> None:
        """Join what may follow the coarse tokens that end here."""
        events, tree, first = self.events, self.events.tree, self.events.mirror.first
        for unit in range(self.token.size, self.token.size + self.ends):
            coarse = int(tree.order[self.place(unit)][0])
            if events.coarse.spell(self.text) != (coarse,):
                continue  # another token of the same bytes, which no text gives
            barred = np.zeros(events.coarse.size, dtype=bool)
            barred[events.coarse.forbidden(coarse)] = True
            begun = tree.first[~barred]
            begins = np.zeros(events.fine.size, dtype=bool)
            begins[begun[begun >= 0]] = True
            inside = (first >= 0) & ~barred[first]
            self.follows[unit] = begins | inside
            self.members[unit].append(np.flatnonzero(begins | inside))
            if events.outgrown[coarse] or (self.own & (begins | inside)).any():
                self.spoil(unit)
                continue
            for fine in np.flatnonzero(begins & ~inside).tolist():
                other = self.lies_in(fine)
                if other < 0:
                    self.spoil(unit)
                    break
                self.join(unit, other)

    def _children(self) -> None:
        before = self.events.outgrown_before
        outgrown = before[self.stops] > before[self.starts]
        for unit, token in enumerate(self.token.tolist()):
            self.members[unit].append(self.token[unit : unit + 1])
            for end, follows in self.follows.items():
                if follows[token]:
                    self.join(unit, end)
            other = -1 if self.own[token] or outgrown[unit] else self.lies_in(token)
            if other < 0:
                self.spoil(unit)
            else:
                self.join(unit, other)

    def _straddling(self) -> None:
        """Fine tokens that reach over the end of a coarse token which begins at the root."""
        events, depth = self.events, len(self.text)
        data, coarse_data = events.fine.token_bytes, events.coarse.token_bytes
        for unit in range(self.token.size):
            for coarse in events.tree.order[self.place(unit)].tolist():
                if self.spoilt[self.unit(unit)]:
                    break
                rest = coarse_data[coarse][depth:]
                found = [
                    fine
                    for fine in events.longer(rest).tolist()
                    if (head := events.head(data[fine][len(rest) :])) >= 0 and events.coarse.allowed(coarse, head)
                ]
                if not found or events.coarse.spell(coarse_data[coarse]) != (coarse,):
                    continue
                ids = np.array(found)
                self.members[unit].append(ids)
                if self.own[ids].any():
                    self.spoil(unit)
                for end, follows in self.follows.items():
                    if follows[ids].any():
                        self.join(unit, end)


class LastTokens:
    """What a side's last token rules out at a root; each token's list is made once.

    exact: ids of this side that cannot follow. Otherwise (the cheap form) ids of the other side whose spelling begins
    with such a token. rule None: nothing is known of this side.
    """

    def __init__(self, rule: PairRule | None, tree: SpellingTree, *, exact: bool) -> None:
        self.rule, self.tree, self.exact, self.found = rule, tree, exact, dict[int, IdArray]()

    def __getitem__(self, last: int) -> IdArray:
        """int32, ascending: ids that `last` (-1: unknown) rules out."""
        if last not in self.found:
            ids = np.zeros(0, np.int32) if self.rule is None or last < 0 else self.rule.forbidden(last)
            if not self.exact:
                top = self.tree.children(np.zeros_like(ids), ids)
                ranges = [self.tree.order[self.tree.start[n] : self.tree.stop[n]] for n in top[top >= 0].tolist()]
                ids = np.sort(np.concatenate([np.zeros(0, np.int32), *ranges]))
            self.found[last] = ids
        return self.found[last]


Facts = dict[str, dict[int, Any]]
"""What `Conditions` has found, by table and key."""


@dataclass(frozen=True, eq=False)
class Runs:
    """One side's tokens of some chunks: ids, the first of each chunk in them and how many there are; last: the token
    before each chunk, -1 where it is unknown."""

    ids: IntArray
    first: IntArray
    count: IntArray
    last: IntArray


class Conditions:
    """All that conditioning asks of one pair of vocabularies, in the cheap or the exact form.

    Answers are found when they are first asked for, and kept. `news` finds those that some chunks will need, so that a
    data loader's process can do it ahead and send them; `learn` takes them.

    Attributes:
        student, teacher: what the sides' last tokens rule out at a root.
        events: of the student tree and of the teacher tree; None in the cheap form, and where a side has no merges.
    """

    def __init__(self, trees: VocabTrees, *, exact: bool) -> None:
        self.student = LastTokens(trees.student_pairs, trees.student_tree, exact=exact)
        self.teacher = LastTokens(trees.teacher_pairs, trees.teacher_tree, exact=exact)
        self.events: tuple[NodeEvents, NodeEvents] | None = None
        if exact and trees.student_pairs is not None and trees.teacher_pairs is not None:
            mine, theirs = (trees.student_tree, trees.student_pairs), (trees.teacher_tree, trees.teacher_pairs)
            self.events = (
                NodeEvents(mine[0], theirs[0], mine[1], theirs[1]),
                NodeEvents(theirs[0], mine[0], theirs[1], mine[1]),
            )

    def _tables(self) -> dict[str, LastTokens | NodeEvents]:
        tables: dict[str, LastTokens | NodeEvents] = {"student": self.student, "teacher": self.teacher}
        if self.events is not None:
            tables |= {"student_nodes": self.events[0], "teacher_nodes": self.events[1]}
        return tables

    def news(self, student: Runs, teacher: Runs) -> Facts:
        """What these chunks need and was not known here before."""
        wanted = {"student": set(student.last.tolist()), "teacher": set(teacher.last.tolist())}
        if self.events is not None:
            for name, events, fine, coarse in (
                ("student_nodes", self.events[0], student, teacher),
                ("teacher_nodes", self.events[1], teacher, student),
            ):
                wanted[name] = set(events.tree.inner_nodes(fine.ids, fine.first, fine.count, coarse.ids[coarse.first]))
        return {
            name: {key: table[key] for key in sorted(wanted[name] - table.found.keys())}
            for name, table in self._tables().items()
        }

    def learn(self, facts: Facts) -> None:
        """Take what `news` found elsewhere."""
        for name, table in self._tables().items():
            table.found.update(facts.get(name, {}))
