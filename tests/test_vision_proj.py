"""vision_proj: the ridge solution, from tables that are read in pieces."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from trainer import students, teachers, vision_proj
from trainer.weights import Weights


def tables(count: int, teacher: int, student: int, common: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A teacher's and a student's embeddings, all with a share of one direction; bf16 as they are stored."""
    random = torch.Generator().manual_seed(0)
    core = torch.randn(count, 48, generator=random)
    spread = torch.logspace(0, -3, teacher)  # from strong to weak directions
    rows = core @ torch.randn(48, teacher, generator=random) / 7 + torch.randn(count, teacher, generator=random)
    rows = 0.03 * (rows * spread + common * torch.randn(teacher, generator=random))
    wanted = core @ torch.randn(48, student, generator=random) / 7 + torch.randn(count, student, generator=random)
    return rows.bfloat16(), (0.02 * (wanted + common)).bfloat16()


def exact(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Least squares in f64 with the ridge as further rows."""
    rows, wanted = rows.double(), wanted.double()
    ridge = (vision_proj.RIDGE * rows.square().sum(0).mean()).sqrt()
    stacked = torch.cat([rows, ridge * torch.eye(rows.shape[1], dtype=torch.float64)])
    return torch.linalg.lstsq(stacked, torch.cat([wanted, wanted.new_zeros(rows.shape[1], wanted.shape[1])])).solution.T


@pytest.mark.parametrize("common", [0.0, 10.0])
def test_it_is_the_ridge_solution_also_where_all_embeddings_share_a_direction(
    monkeypatch: pytest.MonkeyPatch, common: float
) -> None:
    monkeypatch.setattr(vision_proj, "_COLUMNS", 100)
    monkeypatch.setattr(vision_proj, "_SAMPLED", 1)
    rows, wanted = tables(9000, 256, 64, common)
    weight, fit = vision_proj.fit(lambda a, b: rows[a:b], lambda a, b: wanted[a:b], len(rows))
    expected = exact(rows, wanted)
    assert (weight.shape, weight.dtype) == ((64, 256), torch.float32)
    assert (weight - expected).norm() / expected.norm() < 1e-4
    cosines = torch.cosine_similarity(rows.double() @ expected.T, wanted.double(), dim=-1)
    assert abs(fit - cosines.mean()) < 1e-5
    assert 0.3 < fit < 1


def test_what_maps_exactly_is_found() -> None:
    rows = torch.randn(5000, 32, generator=torch.Generator().manual_seed(1))
    turned = rows @ torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(2))).Q
    assert vision_proj.fit(lambda a, b: rows[a:b], lambda a, b: turned[a:b], len(rows))[1] > 0.9999


def test_tables_are_read_by_rows(tmp_path: Path) -> None:
    folder = tiny_models.qwen3_vl_snapshot(tmp_path / "teacher")
    weights, name = teachers.embedding_table("qwen3_vl_mageflow", folder)
    whole = teachers.embeddings("qwen3_vl_mageflow", folder)
    assert torch.equal(weights.rows(name, 37, 120), whole[37:120])
    info = students.inspect(tiny_models.student_gguf(tmp_path / "student.gguf", matrices=Type.Q8_0))
    student = students.load(info.path, "qwen3", torch.float32, "cpu")
    assert torch.equal(students.embeddings(info, 5, 77), student.model.embed_tokens.weight[5:77])


def test_rows_come_in_the_type_they_are_stored_in(tmp_path: Path) -> None:
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(10, 3, 2))).bfloat16()
    save_file({"table": table}, tmp_path / "model.safetensors")
    assert torch.equal(Weights(tmp_path).rows("table", 4, 9), table[4:9])
