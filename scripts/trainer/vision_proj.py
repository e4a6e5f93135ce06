"""What makes student embeddings of the rows of a teacher's tower: ridge least squares over the shared vocabulary.

The tower's rows stand for embeddings of the teacher. W [student_dim, teacher_dim] minimises, over the tokens that both
have,

    |E_t W^T - E_s|^2 + lambda |W|^2,    lambda = RIDGE * mean(diag(E_t^T E_t)),

so that what lies among the teacher's embeddings comes to lie at the like place among the student's. It is never
trained: the student's states depend on it.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

RIDGE = 1e-4
# Tokens at once. More would not be faster, and lose digits in f32.
_CHUNK = 4096
# Of so many chunks, one tells how well W fits.
_SAMPLED = 8
# Columns of the symmetric matrix at once: of what is the same on both sides of its diagonal, half is left out.
_COLUMNS = 512

# Rows `start` to `stop` of a table of embeddings.
Table = Callable[[int, int], Tensor]


def fit(teacher: Table, student: Table, count: int) -> tuple[Tensor, float]:
    """Fit W, and tell how well.

    Products are of f32 rows less their chunk's mean, which most of their length is where embeddings have a common
    direction; they are added up in f64, so that what is lost is far below lambda.

    Args:
        teacher: the teacher's table; rows of teacher_dim.
        student: the student's table; rows of student_dim.
        count: tokens that both have.

    Returns:
        W [student_dim, teacher_dim] f32, and the mean cosine of E_t W^T to E_s over some of the tokens.
    """
    size, wanted_size = teacher(0, 1).shape[1], student(0, 1).shape[1]
    # Above its diagonal; what is below is never read.
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, wanted_size, dtype=torch.float64)
    offsets = []
    for rows, wanted in _chunks(teacher, student, count):
        (mean, rows), (wanted_mean, wanted) = _centred(rows), _centred(wanted)
        for at in range(0, size, _COLUMNS):
            left = rows[:, at : at + _COLUMNS].T
            gram[at : at + _COLUMNS, at:] += left @ rows[:, at:]
            cross[at : at + _COLUMNS] += left @ wanted
        # What is left of the sums is rounding; it counts where the means are large.
        offsets.append((mean, rows.sum(0), wanted_mean, wanted.sum(0), torch.tensor([len(rows)])))
    means, rests, wanted_means, wanted_rests, counts = (torch.stack(of).double() for of in zip(*offsets, strict=True))
    gram.addmm_(means.T, rests + counts * means).addmm_(rests.T, means)
    cross.addmm_(means.T, wanted_rests + counts * wanted_means).addmm_(rests.T, wanted_means)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    factor = torch.linalg.cholesky(gram, upper=True)
    del gram
    weight = torch.cholesky_solve(cross, factor, upper=True).T.float().contiguous()
    cosines = [
        F.cosine_similarity(rows @ weight.T, wanted, dim=-1)
        for rows, wanted in _chunks(teacher, student, count, _SAMPLED)
    ]
    return weight, float(torch.cat(cosines).mean())


def made_up(student_dim: int, vision_dim: int) -> Tensor:
    """A fixed random W, for a teacher without embeddings."""
    return torch.randn(student_dim, vision_dim, generator=torch.Generator().manual_seed(4321)) / vision_dim**0.5


def _centred(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of rows, and the rows less it."""
    mean = rows.mean(0)
    return mean, rows - mean


def _chunks(teacher: Table, student: Table, count: int, step: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, count, step * _CHUNK):
        stop = min(start + _CHUNK, count)
        yield teacher(start, stop).float(), student(start, stop).float()
