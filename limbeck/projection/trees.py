"""Events that two vocabularies can both state: cells of tokens, and trees of spellings.

`sigma(t)` is the student's spelling of teacher token t, `tau(s)` the teacher's spelling of student token s. The first
token of a spelling is a prefix of the token, on the other side. Following first tokens from side to side, tokens get
shorter until two of equal bytes point at each other: all tokens that arrive at one such pair are its **cell**. Cells
partition both vocabularies and are the finest parts whose probability both models can state for the next token.

Inside a cell the models differ in where they stop. The **student tree** is the trie of all `sigma(t)`: after student
tokens `a` that begin some spelling, the teacher's next-token distribution says how likely each continuation is. The
**teacher tree** is its mirror. Sorted by spelling, the tokens below a node are a range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from limbeck.errors import ProjectionError

Spelling = tuple[int, ...]
IdArray = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpellingTree:
    """Trie over spellings: the tokens of a coarse vocabulary, spelled in a fine one.

    Nodes are numbered level by level and, within a level, in the order of their spellings, so the children of a node
    follow each other. Node 0 is the empty spelling.

    Attributes:
        order: int32 [n]; coarse ids sorted by spelling. Ids without a spelling are left out.
        parent, token: int32 [nodes]; the node above and the fine token that leads here; -1 at node 0.
        start, stop: int32 [nodes]; range of `order` whose spellings begin with the node's.
        ends: int32 [nodes]; how many of them, the first ones of the range, are spelled exactly so.
        coarse_size, fine_size: number of ids on either side.
    """

    order: IdArray
    parent: IdArray
    token: IdArray
    start: IdArray
    stop: IdArray
    ends: IdArray
    coarse_size: int
    fine_size: int

    def __post_init__(self) -> None:
        nodes = self.parent.size
        for name, array in self.arrays().items():
            if array.dtype != np.int32 or array.ndim != 1 or (name != "order" and array.size != nodes):
                raise ProjectionError(f"tree: `{name}` is {array.dtype} {array.shape}; expected int32 of one length")
        limits = {
            "order": (0, self.coarse_size),
            "parent": (-1, nodes),
            "token": (-1, self.fine_size),
            "start": (0, self.order.size + 1),
            "stop": (0, self.order.size + 1),
            "ends": (0, self.order.size + 1),
        }
        for name, (low, high) in limits.items():
            array = self.arrays()[name]
            if array.size and (array.min() < low or array.max() >= high):
                raise ProjectionError(f"tree: `{name}` has entries outside {low}..{high - 1}")
        inner = np.arange(1, nodes)
        sound = (
            nodes > 0
            and self.parent[0] == self.token[0] == -1
            and (self.parent[1:] >= 0).all()
            and (self.parent[1:] < inner).all()
            and (self.token[1:] >= 0).all()
            and (np.diff(self.child_keys) > 0).all()
            and (self.start + self.ends <= self.stop).all()
            # minlength: nothing has no maximum
            and np.bincount(self.order, minlength=1).max() <= 1
        )
        if not sound:
            raise ProjectionError("tree: the nodes are not those of sorted spellings")

    @classmethod
    def from_spellings(cls, spellings: Sequence[Spelling], fine_size: int) -> SpellingTree:
        """Tree of the spelling of each coarse id; `()` marks an id that cannot be spelled."""
        order = sorted((i for i, spelling in enumerate(spellings) if spelling), key=spellings.__getitem__)
        flat = np.fromiter((token for i in order for token in spellings[i]), dtype=np.int64)
        length = np.fromiter((len(spellings[i]) for i in order), dtype=np.int64, count=len(order))
        offset = np.cumsum(length) - length
        shared = _shared_prefix(flat, offset, length)
        parts = [(np.array([-1]), np.array([-1]), np.array([0]), np.array([len(order)]), np.array([0]))]
        first_node = 0
        for depth in range(1, int(length.max(initial=0)) + 1):
            cuts = np.flatnonzero(shared < depth)  # a spelling that shares less with the one before begins anew
            start = cuts[length[cuts] >= depth]
            stop = np.append(cuts, len(order))[np.searchsorted(cuts, start, side="right")]
            exact = np.concatenate([[0], np.cumsum(length == depth)])
            above = parts[-1][2]
            parent = first_node + np.searchsorted(above, start, side="right") - 1
            parts.append((parent, flat[offset[start] + depth - 1], start, stop, exact[stop] - exact[start]))
            first_node += above.size
        parents, tokens, starts, stops, ends = (np.concatenate(p).astype(np.int32) for p in zip(*parts, strict=True))
        return cls(np.array(order, np.int32), parents, tokens, starts, stops, ends, len(spellings), fine_size)

    def arrays(self) -> dict[str, IdArray]:
        """The stored arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if not field.name.endswith("size")}

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the empty spelling included."""
        return int(self.parent.size)

    @cached_property
    def child_keys(self) -> IntArray:
        """`parent * fine_size + token` of nodes 1, 2, ...: ascending, so a child is found by bisection."""
        # nodes times tokens are beyond int32
        return self.parent[1:].astype(np.int64) * self.fine_size + self.token[1:]

    @cached_property
    def child_offsets(self) -> IntArray:
        """[nodes + 1]; the children of node i are the nodes `offsets[i] : offsets[i + 1]`."""
        return 1 + np.searchsorted(self.parent[1:], np.arange(self.num_nodes + 1))

    @cached_property
    def first(self) -> IdArray:
        """[coarse_size]; the first fine token of each coarse id's spelling, -1 where it has none."""
        out = np.full(self.coarse_size, -1, dtype=np.int32)
        top = np.arange(1, int(self.child_offsets[1]))
        out[self.order] = np.repeat(self.token[top], self.stop[top] - self.start[top])
        return out

    def children(self, nodes: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer]) -> IntArray:
        """The child of each node by each fine token, -1 where there is none or the node is -1 itself."""
        keys = np.asarray(nodes, np.int64) * self.fine_size + tokens
        index = np.searchsorted(self.child_keys, keys)
        # bisection says `size` for keys behind the last
        exists = index < self.child_keys.size
        exists &= self.child_keys[np.where(exists, index, 0)] == keys if self.child_keys.size else False
        return np.where(exists & (np.asarray(nodes) >= 0), index + 1, -1)

    def find(self, spelling: Sequence[int]) -> int:
        """The node of a spelling, -1 where no coarse token's spelling begins so."""
        node = np.zeros(1, np.int64)
        for token in spelling:
            node = self.children(node, np.array([token]))
        return int(node[0])

    @cached_property
    def position(self) -> IdArray:
        """[coarse_size]; position of each coarse id in `order`, -1 where it has no spelling."""
        out = np.full(self.coarse_size, -1, dtype=np.int32)
        out[self.order] = np.arange(self.order.size)
        return out

    @cached_property
    def end_node(self) -> IntArray:
        """[coarse_size]; the node at which each coarse id is spelled, -1 where it has no spelling."""
        out = np.full(self.coarse_size, -1, dtype=np.int64)
        nodes = np.repeat(np.arange(self.num_nodes), self.ends)
        within = np.arange(nodes.size) - np.repeat(np.cumsum(self.ends) - self.ends, self.ends)
        out[self.order[self.start[nodes] + within]] = nodes
        return out

    def followed(self, ids: IntArray, start: IntArray, end: IntArray, coarse: IntArray) -> tuple[int, int]:
        """How many tokens of runs of fine tokens are not the first of their run, and up to how many of them the run
        spells its coarse token. start, end: the runs' half-open ranges in `ids`; coarse: one coarse id each."""
        inner = on_tree = depth = 0
        node = np.zeros(start.size, np.int64)
        while start.size:
            node = self.children(node, ids[start + depth])
            if depth:
                position = self.position[coarse]
                # a node of -1 looks up the last one, which the first condition takes out again
                on_tree += int(((node >= 0) & (position >= self.start[node]) & (position < self.stop[node])).sum())
                inner += start.size
            depth += 1
            longer = end - start > depth
            start, end, node, coarse = start[longer], end[longer], node[longer], coarse[longer]
        return inner, on_tree

    def spellings(self) -> list[Spelling]:
        """The spelling of each coarse id, `()` where it has none: what `from_spellings` was given."""
        out: list[Spelling] = [()] * self.coarse_size
        path: list[Spelling] = [()]
        order, columns = self.order.tolist(), (self.parent, self.token, self.start, self.ends)
        for parent, token, start, ends in zip(*(column[1:].tolist() for column in columns), strict=True):
            path.append((*path[parent], token))
            for coarse in order[start : start + ends]:
                out[coarse] = path[-1]
        return out

    def members(self, node: int) -> IdArray:
        """Coarse ids below a node, those spelled exactly so first."""
        return self.order[self.start[node] : self.stop[node]]


@dataclass(frozen=True, eq=False)
class VocabTrees:
    """Cells and trees of a student's and a teacher's vocabulary.

    Attributes:
        student_cell, teacher_cell: int32 [V_s], [V_t]; the cell of each id, -1 for an id that the other side cannot
            say at all (specials without a partner, ids that no text gives).
        student_tree: the teacher's tokens by their student spelling; teacher_tree: the mirror.
    """

    student_cell: IdArray
    teacher_cell: IdArray
    student_tree: SpellingTree
    teacher_tree: SpellingTree

    def __post_init__(self) -> None:
        sizes = self.student_cell.size, self.teacher_cell.size
        if (self.student_tree.fine_size, self.student_tree.coarse_size) != sizes or (
            self.teacher_tree.coarse_size,
            self.teacher_tree.fine_size,
        ) != sizes:
            raise ProjectionError(f"cells of {sizes[0]} and {sizes[1]} ids do not fit the trees")
        counts = [_cell_sizes(cells) for cells in (self.student_cell, self.teacher_cell)]
        if counts[0].size != counts[1].size or not all(count.all() for count in counts):
            raise ProjectionError("a cell has no token on one of the sides")

    @classmethod
    def from_spellings(cls, sigma: Sequence[Spelling], tau: Sequence[Spelling]) -> VocabTrees:
        """From the student's spelling of each teacher id and the teacher's of each student id (`()`: none).

        A special token is spelled by its partner on the other side.
        """
        student_cell, teacher_cell = find_cells(sigma, tau)
        student_tree = SpellingTree.from_spellings(sigma, len(tau))
        teacher_tree = SpellingTree.from_spellings(tau, len(sigma))
        return cls(student_cell, teacher_cell, student_tree, teacher_tree)

    @property
    def num_cells(self) -> int:
        """Number of cells that both sides have tokens in."""
        return int(self.student_cell.max(initial=-1)) + 1

    @cached_property
    def cell_sizes(self) -> tuple[IntArray, IntArray]:
        """[cells] each: student and teacher ids in every cell."""
        return _cell_sizes(self.student_cell), _cell_sizes(self.teacher_cell)

    def tensors(self) -> dict[str, npt.NDArray[np.int32]]:
        """All arrays, as a projection's file holds them."""
        out = {"student_cell": self.student_cell, "teacher_cell": self.teacher_cell}
        for part, tree in (("student_tree", self.student_tree), ("teacher_tree", self.teacher_tree)):
            out |= {f"{part}.{name}": array for name, array in tree.arrays().items()}
        return out

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[np.int32]]) -> VocabTrees:
        """Trees from what `tensors` gave; raises ProjectionError where an array is missing, unknown or out of range."""
        left = dict(tensors)

        def take(part: str, names: Sequence[str]) -> dict[str, npt.NDArray[np.int32]]:
            missing = [f"{part}.{name}" for name in names if f"{part}.{name}" not in left]
            if missing:
                raise ProjectionError(f"trees: the arrays {missing} are missing; build it anew.")
            return {name: left.pop(f"{part}.{name}") for name in names}

        if not {"student_cell", "teacher_cell"} <= left.keys():
            raise ProjectionError("trees: the arrays of cells are missing; build it anew.")
        cells = left.pop("student_cell"), left.pop("teacher_cell")
        for array in cells:
            if array.dtype != np.int32 or array.ndim != 1 or array.min(initial=0) < -1:
                raise ProjectionError("trees: cells are no int32 numbers from -1 on; build it anew.")
        sizes = cells[0].size, cells[1].size
        tree_names = [f.name for f in fields(SpellingTree) if not f.name.endswith("size")]
        student_tree = SpellingTree(**take("student_tree", tree_names), coarse_size=sizes[1], fine_size=sizes[0])
        teacher_tree = SpellingTree(**take("teacher_tree", tree_names), coarse_size=sizes[0], fine_size=sizes[1])
        if left:
            raise ProjectionError(f"trees: unknown arrays {sorted(left)[:3]}; build it anew.")
        return cls(*cells, student_tree, teacher_tree)


def find_cells(sigma: Sequence[Spelling], tau: Sequence[Spelling]) -> tuple[IdArray, IdArray]:
    """Cell of every student id and of every teacher id, -1 for ids without a partner; see the module's text."""
    firsts = [
        np.fromiter((spelling[0] if spelling else -1 for spelling in side), dtype=np.int64, count=len(side))
        for side in (tau, sigma)
    ]
    return _numbered(_roots(_links(*firsts)), len(tau))


def _links(student_first: IntArray, teacher_first: IntArray) -> IntArray:
    """The token that each one's spelling begins with, student ids first; itself where it has no spelling.

    The first of two tokens that point at each other is the root of both.
    """
    size = student_first.size
    token = np.arange(size + teacher_first.size)
    parent = token.copy()
    parent[:size][student_first >= 0] = size + student_first[student_first >= 0]
    parent[size:][teacher_first >= 0] = teacher_first[teacher_first >= 0]
    return np.where(parent[parent] == token, np.minimum(token, parent), parent)


def _roots(up: IntArray) -> IntArray:
    """Where each token's links lead."""
    root = up
    # each pass doubles the distance, and no chain is longer than there are tokens
    for _ in range(up.size.bit_length()):
        root = root[root]
    if (up[root] != root).any():
        raise ProjectionError("the spellings of the two vocabularies run in circles; they are not those of tokenizers")
    return root


def _numbered(root: IntArray, students: int) -> tuple[IdArray, IdArray]:
    """Cells by root, for student and teacher ids: those with tokens of both sides; -1 elsewhere."""
    has_student, has_teacher = np.zeros(root.size, dtype=bool), np.zeros(root.size, dtype=bool)
    has_student[root[:students]] = True
    has_teacher[root[students:]] = True
    number = np.where(has_student & has_teacher, np.cumsum(has_student & has_teacher) - 1, -1).astype(np.int32)
    return number[root[:students]], number[root[students:]]


def _cell_sizes(cells: IdArray) -> IntArray:
    return np.bincount(cells[cells >= 0])


def _shared_prefix(flat: IntArray, offset: IntArray, length: IntArray) -> IntArray:
    """How many tokens each spelling shares with the one before it; -1 for the first."""
    shared = np.zeros(length.size, dtype=np.int64)
    shared[:1] = -1
    alive = np.arange(1, length.size)
    depth = 0
    while alive.size:
        alive = alive[np.minimum(length[alive], length[alive - 1]) > depth]
        alive = alive[flat[offset[alive] + depth] == flat[offset[alive - 1] + depth]]
        depth += 1
        shared[alive] = depth
    return shared
