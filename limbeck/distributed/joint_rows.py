"""A teacher split over ranks that read different rows: they run it together, on one place's rows after the other.

Both meshes number their ranks tensor innermost, then context, then data. So the ranks that hold one copy of the teacher
are a block of neighbours, and so are those that read one place's rows; a block of the teacher lies inside a block of
the student, or meets several. Any two sizes go together: where a place's rows meet two blocks, both run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.distributed.mesh import MeshShape, ParallelDims


def places_met(student: MeshShape, teacher: MeshShape, block: int) -> list[int]:
    """Data-parallel places of the student whose rows are read in a block of the teacher's ranks."""
    first, last = block * teacher.same_rows, (block + 1) * teacher.same_rows - 1
    return list(range(first // student.same_rows, last // student.same_rows + 1))


@dataclass(frozen=True)
class JointRows:
    """The passes of one block of a teacher's ranks, all of which take part in each.

    ``owners``: per pass the rank within the block that brings the rows; ``own``: the pass with this rank's rows.
    """

    comm: Comm
    owners: tuple[int, ...]
    own: int

    @classmethod
    def plan(cls, student: MeshShape, teacher: ParallelDims, *, alike: bool) -> JointRows | None:
        """None where every block of the teacher reads one place's rows. Every rank must ask.

        Args:
            alike: all blocks take as many passes, because they exchange shards in each; the last is then repeated.
        """
        shape = teacher.shape
        met = [places_met(student, shape, block) for block in range(shape.data)]
        most = max(len(places) for places in met)
        if most == 1:
            return None
        rank, places = Comm.world().rank, met[teacher.data.rank]
        first = teacher.data.rank * shape.same_rows
        owners = [max(place * student.same_rows, first) - first for place in places]
        if alike:
            owners += owners[-1:] * (most - len(owners))
        return cls(teacher.rows, tuple(owners), places.index(rank // student.same_rows))

    @torch.no_grad()
    def passes(self, ids: Tensor, lengths: Tensor) -> Iterator[tuple[bool, Tensor, Tensor]]:
        """Per pass: whether it holds this rank's rows, ids ``[B, T]`` and lengths ``[B]`` on the CPU; sizes differ.

        ids, lengths: this rank's rows, possibly none.
        """
        # the ranks of one copy of a teacher, per micro-batch: first how many rows each has, then all ids and lengths,
        # 8 bytes a token; rows are small beside the teacher's forward pass, which all of them run
        shapes = [tuple(size.tolist()) for size in self.comm.gather(torch.tensor(ids.shape))]
        rows, width = (max(column) for column in zip(*shapes, strict=True))
        mine = torch.cat((lengths[:, None].to(ids), F.pad(ids, (0, width - ids.shape[1]))), 1)
        mine = F.pad(mine, (0, 0, 0, rows - ids.shape[0])).contiguous()
        found = self.comm.gather(mine) if rows else [mine] * self.comm.size
        for number, owner in enumerate(self.owners):
            rows, width = shapes[owner]
            table = found[owner][:rows].cpu()
            yield number == self.own, table[:, 1 : width + 1], table[:, 0]
