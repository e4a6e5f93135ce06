"""The first state of the seed table: the teacher's own token embeddings, compressed to the adapter's width.

E [V, D] is centred and projected on its `width` leading principal directions (eigenvectors of the covariance, f64);
the result is scaled to unit RMS over all entries. Where width > D the remaining columns are zero. It keeps, of what the
teacher knows about its tokens, as much as the width allows, and training goes on from there.
"""

import torch


def compress(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """[V, D] embeddings -> [V, width] f32, entries of unit RMS."""
    centred = embeddings.double() - embeddings.double().mean(0)
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :width]
    # The sign of an eigenvector is arbitrary; fixed so that machines agree.
    largest = directions.abs().argmax(0)
    directions = directions * directions[largest, torch.arange(directions.shape[1])].sign()
    table = torch.zeros(len(embeddings), width, dtype=torch.float64)
    table[:, : directions.shape[1]] = centred @ directions
    return (table / table.square().mean().sqrt().clamp_min(1e-12)).float()
