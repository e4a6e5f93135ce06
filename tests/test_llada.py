"""The LLaDA-Image teacher: the published equations, whatever the batch, from a snapshot that is whole or refused."""

import json
import shutil
from pathlib import Path

import pytest
import slow_llada
import tiny_llada
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from trainer import packs
from trainer.errors import TrainerError
from trainer.streaming import Part
from trainer.teachers import llada, llada2_moe


def prompted(text: str) -> str:
    return "".join(packs.get("llada_image").template.around(text))


PROMPTS = [prompted(text) for text in ("a red fox in the snow", "", "the cat, 8 trees", "fox " * 12 + "ring")]
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llada.llada_snapshot(tmp_path_factory.mktemp("llada"))


@pytest.fixture
def copy(snapshot: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(snapshot, tmp_path / "copy"))


def values(teacher: llada.Llada, part: Part) -> State:
    made = {}
    for name, parameter in part.module.named_parameters():
        stored = torch.cat([teacher.weights.tensor(source).flatten() for source in part.sources[name]])
        made[name] = stored.view(parameter.shape).to(parameter.dtype)
    return made


@torch.inference_mode()
def states(teacher: llada.Llada, ids: list[list[int]]) -> dict[str, State]:
    """What each part gives for a batch."""
    padded = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    state = {"ids": padded, "lengths": torch.tensor([len(row) for row in ids])}
    given = {}
    for part in teacher.parts:
        state = given[part.name] = functional_call(part.module, values(teacher, part), (state,))
    return given


def encode(teacher: llada.Llada, ids: list[list[int]]) -> Tensor:
    return states(teacher, ids)["projection"]["rows"]


def edit(path: Path, **changes: object) -> None:
    config = json.loads(path.read_text())
    config |= changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def refusal(path: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(TrainerError) as caught:
        llada.load(path, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ids_are_those_of_the_template(snapshot: Path) -> None:
    teacher = llada.load(snapshot, torch.float32)
    ids = teacher.tokenize([prompted("a {red} fox"), prompted("")], 3)
    texts = [teacher.tokenizer.decode(row, skip_special_tokens=False) for row in ids]
    assert texts == [
        "<role>HUMAN</role> Generate an image: a {red} fox\n<role>ASSISTANT</role>\n<IMAGE1>",
        "<role>HUMAN</role> Generate an image.\n<role>ASSISTANT</role>\n<IMAGE1>",
    ]
    markers = [teacher.tokenizer.token_to_id(marker) for marker in ("<role>", "</role>", "<IMAGE1>")]
    assert [row.count(marker) for row in ids for marker in markers] == [2, 2, 1] * 2
    assert teacher.vocabulary is None


def test_ids_are_cut_where_the_pipeline_cuts_them(snapshot: Path) -> None:
    teacher = llada.load(snapshot, torch.float32)
    (long,) = teacher.tokenize([prompted("fox? " * 3000)], 120)
    assert len(long) == 2048
    assert long[:20] == teacher.tokenize([prompted("fox? " * 30)], 120)[0][:20]


def test_rows_equal_the_published_equations(snapshot: Path) -> None:
    teacher = llada.load(snapshot, torch.float32)
    ids = teacher.tokenize(PROMPTS[:2], 0)
    rows = encode(teacher, ids)
    assert rows.shape == (2, teacher.rows, teacher.dim) == (2, 5, 24)
    for row, prompt in zip(rows, ids, strict=True):
        expected = torch.tensor(slow_llada.rows(snapshot, prompt), dtype=torch.float32)
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


def test_other_shapes_equal_the_published_equations(tmp_path: Path) -> None:
    """Two dense layers, several query blocks, all groups kept, wider shared experts, one projection layer."""
    options = {"layers": 4, "dense": 2, "blocks": 2, "kept_groups": 4, "shared": 2, "queries": 3, "experts": 8}
    path = tiny_llada.llada_snapshot(tmp_path / "llada", projection_layers=1, seed=5, **options)
    rope = {"rope_type": "default", "rope_theta": 100, "partial_rotary_factor": 1.0}
    edit(path / "text_encoder" / "config.json", rope_theta=100, partial_rotary_factor=1.0)
    expected = torch.tensor(slow_llada.rows(path, [3, 1, 4, 1, 5, 9, 2]), dtype=torch.float32)
    for rest in ({}, {"rope_theta": "absent", "partial_rotary_factor": "absent", "rope_parameters": rope}):
        edit(path / "text_encoder" / "config.json", **rest)
        rows = encode(llada.load(path, torch.float32), [[3, 1, 4, 1, 5, 9, 2]])[0]
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_row_does_not_depend_on_its_batch(snapshot: Path, dtype: torch.dtype, tolerance: float) -> None:
    teacher = llada.load(snapshot, dtype)
    ids = teacher.tokenize(PROMPTS, 0)
    assert len({len(row) for row in ids}) == len(ids)
    rows = encode(teacher, ids)
    assert rows.dtype == dtype
    assert torch.equal(encode(teacher, ids), rows)
    for row, prompt in zip(rows, ids, strict=True):
        torch.testing.assert_close(row, encode(teacher, [prompt])[0], atol=tolerance, rtol=tolerance)


def test_bf16_rows_are_close_to_those_of_f32(snapshot: Path) -> None:
    ids = llada.load(snapshot, torch.float32).tokenize(PROMPTS, 0)
    narrow, wide = (encode(llada.load(snapshot, dtype), ids) for dtype in (torch.bfloat16, torch.float32))
    # Where two experts are nearly as good, rounding decides: such a row may differ visibly, the others do not.
    assert torch.cosine_similarity(narrow.float(), wide, dim=-1).quantile(0.1) > 0.99


def test_text_does_not_see_the_queries_but_queries_see_all(snapshot: Path, copy: Path) -> None:
    file = copy / "queryformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["meta_queries"][0] *= -1
    save_file(tensors, file, {"format": "pt"})
    teacher, other = (llada.load(path, torch.float32) for path in (snapshot, copy))
    ids = teacher.tokenize(PROMPTS[:1], 0)
    text = len(ids[0])
    before, after = (states(each, ids)["layer 2"]["hidden"][0] for each in (teacher, other))
    assert torch.equal(before[:text], after[:text])
    # The last query was not changed itself: it read the one that was.
    assert not torch.allclose(before[-1], after[-1], atol=1e-4)
    assert not torch.allclose(encode(teacher, ids)[0, -1], encode(other, ids)[0, -1], atol=1e-4)
    swapped = [[ids[0][1], ids[0][0], *ids[0][2:]]]
    assert not torch.allclose(encode(teacher, swapped), encode(teacher, ids), atol=1e-4)


def test_router_chooses_by_bias_within_groups_and_weighs_without_it(snapshot: Path) -> None:
    teacher = llada.load(snapshot, torch.float32)
    router = teacher.parts[3].module.mlp.gate
    gate = slow_llada.Stored(snapshot / "text_encoder")
    name = "model.layers.1.mlp"
    weights = {
        "weight": teacher.weights.tensor(f"text_encoder/{name}.gate.weight"),
        "expert_bias": teacher.weights.tensor(f"text_encoder/{name}.gate.expert_bias"),
    }
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    chosen, shares = functional_call(router, weights, (rows,))
    scores = (rows @ weights["weight"].T).sigmoid()
    by_groups_alone, by_bias_alone = 0, 0
    for row, experts, share, score in zip(rows, chosen, shares, scores, strict=True):
        expected = slow_llada.route(gate, name, row.double().numpy())
        got = dict(zip(experts.tolist(), share.tolist(), strict=True))
        assert got == pytest.approx(expected, abs=1e-6)
        assert len({expert // 4 for expert in got}) <= 2
        by_bias_alone += set(got) != set((score + weights["expert_bias"]).topk(3).indices.tolist())
        by_groups_alone += set(got) != set(
            functional_call(router, weights | {"expert_bias": torch.zeros(16)}, (row[None],))[0][0].tolist()
        )
    assert by_groups_alone > 5  # without the bias others would have been chosen
    assert by_bias_alone > 5  # and so without the groups
    torch.testing.assert_close(shares.sum(-1), torch.full((64,), 2.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 4, 5], [0, 0, 12, 0], [12, 0, 0, 0], [1, 1, 1, 9], [3, 3, 3, 3]])
def test_grouped_product_equals_one_group_after_another(counts: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 16, generator=generator).to(dtype)
    matrices = torch.randn(4, 24, 16, generator=generator).to(dtype)
    ends = torch.tensor(counts).cumsum(0).int()
    groups = zip(rows.split(counts), matrices, strict=True)
    expected = torch.cat([(group.double() @ matrix.double().T) for group, matrix in groups]).to(dtype)
    for product in (llada2_moe.grouped_mm, llada2_moe.padded_mm):
        torch.testing.assert_close(product(rows, matrices, ends), expected)


def test_experts_narrower_than_the_grouped_product_allows_are_padded() -> None:
    rows, matrices, ends = torch.randn(6, 6), torch.randn(2, 5, 6), torch.tensor([2, 6], dtype=torch.int32)
    expected = torch.cat([rows[:2] @ matrices[0].T, rows[2:] @ matrices[1].T])
    torch.testing.assert_close(llada2_moe.grouped_mm(rows, matrices, ends), expected)


def test_router_stays_f32_in_a_bf16_teacher(tmp_path: Path) -> None:
    path = tiny_llada.llada_snapshot(tmp_path / "llada", dtype=torch.bfloat16)
    teacher = llada.load(path, torch.bfloat16)
    dtypes = {name: value.dtype for part in teacher.parts for name, value in part.module.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        "mlp.gate.weight",
        "mlp.gate.expert_bias",
    }
    bias = values(teacher, teacher.parts[3])["mlp.gate.expert_bias"]
    stored = teacher.weights.tensor("text_encoder/model.layers.1.mlp.gate.expert_bias")
    assert torch.equal(bias, stored)
    assert not torch.equal(bias.bfloat16().float(), bias)


def test_every_stored_tensor_has_its_place_and_nothing_is_loaded(snapshot: Path) -> None:
    teacher = llada.load(snapshot, torch.float32)
    used = [source for part in teacher.parts for sources in part.sources.values() for source in sources]
    assert sorted(used) == sorted(set(teacher.weights.shapes) - {"text_encoder/lm_head.weight"})
    for part in teacher.parts:
        parameters = dict(part.module.named_parameters())
        assert parameters.keys() == part.sources.keys()
        assert all(parameter.is_meta for parameter in parameters.values())
        assert not list(part.module.buffers())
        for name, parameter in parameters.items():
            stored = sum(torch.Size(teacher.weights.shapes[source]).numel() for source in part.sources[name])
            assert stored == parameter.numel()
    assert [part.name for part in teacher.parts] == ["embed", "queries", "layer 0", "layer 1", "layer 2", "projection"]


def test_rope_table_starts_at_one_and_falls() -> None:
    table = llada2_moe.rope_table(600000, 64)
    assert table.dtype == torch.float32
    assert table.shape == (32,)
    torch.testing.assert_close(table[[0, 1, 31]], torch.tensor([1.0, 600000 ** (-1 / 32), 600000 ** (-31 / 32)]))
    llada2_moe.check_rope(table, Path("config.json"))


@pytest.mark.parametrize(
    "table",
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 2.0, 4.0], [0.9, 0.5, 0.1], [1.0, float("nan"), 0.1], [1.0, 0.5, 0.6]],
)
def test_wrong_rope_table_is_refused(table: list[float]) -> None:
    with pytest.raises(TrainerError, match=r"config\.json .* does not start with 1 and fall"):
        llada2_moe.check_rope(torch.tensor(table), Path("config.json"))


@pytest.mark.parametrize(
    ("folder", "changes", "says"),
    [
        ("text_encoder", {"rope_theta": 1}, "rope table"),
        ("text_encoder", {"rope_theta": -3}, "rope table"),
        ("text_encoder", {"rope_theta": 0}, "rope table"),
        ("text_encoder", {"rope_scaling": {"type": "yarn", "factor": 4}}, "has rope_type = 'yarn'"),
        ("text_encoder", {"rope_parameters": {"rope_type": "linear"}}, "has rope_type = 'linear'"),
        ("text_encoder", {"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_theta": 9}}, "= 'yarn'"),
        ("text_encoder", {"rope_scaling": "yarn"}, "has rope_scaling = 'yarn'"),
        ("text_encoder", {"partial_rotary_factor": "absent"}, "has no value partial_rotary_factor"),
        ("text_encoder", {"partial_rotary_factor": 0.45}, "rope cannot rotate 7 of 16 dimensions"),
        ("text_encoder", {"model_type": "qwen3_moe"}, "has model_type = 'qwen3_moe', which is not supported"),
        ("text_encoder", {"hidden_act": "gelu"}, "has hidden_act = 'gelu'"),
        ("text_encoder", {"score_function": "softmax"}, "has score_function = 'softmax'"),
        ("text_encoder", {"norm_topk_prob": False}, "has norm_topk_prob = False"),
        ("text_encoder", {"use_qk_norm": False}, "has use_qk_norm = False"),
        ("text_encoder", {"use_qkv_bias": True}, "has use_qkv_bias = True"),
        ("text_encoder", {"use_bias": True}, "has use_bias = True"),
        ("text_encoder", {"num_experts": "absent"}, "has no value num_experts"),
        ("text_encoder", {"num_experts": 18}, "18 experts do not make 4 equal groups"),
        ("text_encoder", {"topk_group": 5}, "3 experts cannot be chosen from 5 of 4 groups"),
        ("text_encoder", {"num_experts_per_tok": 9}, "9 experts cannot be chosen from 2 of 4 groups"),
        ("text_encoder", {"num_attention_heads": 3}, "3 heads cannot share 2 key and value heads"),
        ("text_encoder", {"hidden_size": 40}, "have the hidden sizes [40, 32, 32]"),
        ("text_encoder", {"vocab_size": 100}, "100 token embeddings but a tokenizer of"),
        ("queryformer", {"num_queries": 0}, "has num_queries = 0"),
        ("queryformer", {"num_attention_heads": 5}, "32 dimensions do not make 5 equal heads"),
        ("text_projection", {"projection_dim": "absent"}, "has no value projection_dim"),
        ("text_projection", {"norm_eps": None}, "has norm_eps = None"),
    ],
)
def test_unsupported_configs_are_refused(copy: Path, folder: str, changes: dict[str, object], says: str) -> None:
    edit(copy / folder / "config.json", **changes)
    message = refusal(copy)
    assert says in message
    assert str(copy) in message


def test_broken_snapshots_are_refused(copy: Path) -> None:
    assert "may overflow in f16" in refusal(copy, torch.float16)
    for folder in ("text_encoder", "queryformer", "text_projection"):
        config = copy / folder / "config.json"
        text = config.read_text()
        config.write_text(text[:20])
        assert f"{config} is not usable: invalid JSON" in refusal(copy)
        config.write_text("[1, 2]")
        assert f"{config} is not usable" in refusal(copy)
        config.unlink()
        assert f"{config} cannot be read" in refusal(copy)
        config.write_text(text)
    (copy / "tokenizer" / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be loaded" in refusal(copy)
