"""The real engine, given a file of ours, conditions on what our code computes: ids, student states and adapter rows.

Opt-in: needs ggk (`pip install ggk`), on PATH or named by the environment variable GGK.
"""

import json
import os
import shutil
import struct
import subprocess
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tiny_models
import tiny_runs
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.functional import silu
from trainer import checkpoints, config, evaluation, export, students
from trainer.adapters.resampler import Resampler
from trainer.materials import Record
from trainer.packs.base import Pack, Template
from trainer.packs.llada_image import PACK as LLADA
from trainer.packs.pixart import PACK as PIXART
from trainer.prompt_cleaning import for_engine
from trainer.standardization import Standardization
from trainer.teachers import t5
from trainer.tokenization import QWEN_PAD, student_tokenizer

GGK = shutil.which(os.environ.get("GGK") or "ggk")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not GGK, reason="no ggk engine: pip install ggk, or name its executable in GGK"),
    pytest.mark.skipif(not tiny_models.shared("tokenizers"), reason="no shared/tokenizers beside the checkout"),
]
STUDENT, WIDTH = 64, 64

ORDINARY = "A red fox sits in deep snow under a pine tree, watercolor"
LONG = "An old lighthouse on a cliff at dawn, with waves breaking below and gulls in a pale sky; 35mm film. " * 8
PROMPTS = [
    ORDINARY,
    "",
    LONG,
    'Wait -- "what\'s this"? A cat; 100% real, #1 @home: $5... {a|b} -> <c> & *d* ~ e_f = g/h!',
    "(masterpiece:1.3), a ((cat)) [black], photo(s) of \\(dogs\\) and a ( lonely bracket",
    "一只红色的狐狸，在雪地里。「夜」",
    "DON'T we'll I'D it's 'Twas rock'n'roll y'all've O'Brien's '90s",
    "½ cup, x² and Ⅷ, ① ٣ at 1,234.5 and 2024",
    "a fox 🦊🚀 👩‍🚀🇫🇷 ❤️ rocket🚀ship ✨ end👩🏾",
    "one\ntwo\r\n\r\nthree\tfour \u00a0 five  ",
    "naïve café Ångström ﬁne e\u0301 zero\u200bwidth soft\u00adhyphen",
    "“curly” ‘quotes’ — dash… ™ © ® € £ ° ± × ÷ •",
    "안녕하세요 こんにちは Привет مرحبا שלום हिन्दी ไทย ꦗꦮ",
    "a BREAK b, BREAKFAST <lora:style:0.8> c <pad> d</s> e<unk> f <extra_id_0> g ▁h",
    "<think> literal <|im_end|> specials <|endoftext|>",
    " , leading and trailing : ; ! ",
]


class Conditioning(NamedTuple):
    """ids: the seeds [Q] of PixArt's slots, LLaDA-Image's student ids [L]; states [L, STUDENT], rows [Q, D] f32."""

    ids: list[int]
    states: np.ndarray
    rows: np.ndarray


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def pixart_shapes(width: int = 64) -> dict[str, tuple[int, ...]]:
    """A PixArt transformer of one block; the engine takes its sizes from these shapes."""
    block = "transformer_blocks.0"
    shapes = {
        "pos_embed.proj.weight": (width, 4, 2, 2),
        "pos_embed.proj.bias": (width,),
        "caption_projection.y_embedding": (PIXART.queries, PIXART.teacher_dim),
        f"{block}.scale_shift_table": (6, width),
        "scale_shift_table": (2, width),
    }
    for attention in ("attn1", "attn2"):
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes |= linear(f"{block}.{attention}.{part}", width, width)
    return (
        shapes
        | linear(f"{block}.ff.net.0.proj", 4 * width, width)
        | linear(f"{block}.ff.net.2", width, 4 * width)
        | linear("adaln_single.emb.timestep_embedder.linear_1", width, 256)
        | linear("adaln_single.emb.timestep_embedder.linear_2", width, width)
        | linear("adaln_single.linear", 6 * width, width)
        | linear("caption_projection.linear_1", width, PIXART.teacher_dim)
        | linear("caption_projection.linear_2", width, width)
        | linear("proj_out", 2 * 2 * 8, width)
    )


def llada_shapes(width: int = 128, semantic: int = 64) -> dict[str, tuple[int, ...]]:
    """A LLaDA-Image transformer of one block and one refiner a stream; its norms have no weights."""
    inner = 256 * -(-int(width * 8 / 3) // 256)
    time = min(width, 256)
    shapes = {f"{stream}_pad_token": (1, width) for stream in ("x", "cap", "sigvq")}
    for block in ("noise_refiner.0", "context_refiner.0", "sigvq_refiner.0", "layers.0"):
        shapes |= {f"{block}.attention.{part}.weight": (width, width) for part in ("to_q", "to_k", "to_v", "to_out.0")}
        shapes |= {f"{block}.feed_forward.{part}.weight": (inner, width) for part in ("w1", "w3")}
        shapes |= {f"{block}.feed_forward.w2.weight": (width, inner)}
        if block in ("noise_refiner.0", "layers.0"):
            shapes |= linear(f"{block}.adaLN_modulation.0", 4 * width, time)
    return (
        shapes
        | linear("x_embedder", width, 128)
        | linear("t_embedder.mlp.0", min(width, 1024), 256)
        | linear("t_embedder.mlp.2", time, min(width, 1024))
        | linear("cap_embedder.1", width, LLADA.teacher_dim)
        | linear("semantic_embedder.1", width, semantic)
        | linear("sigvq_embedder.1", width, semantic)
        | linear("final_layer.linear", 128, width)
        | linear("final_layer.adaLN_modulation.1", width, time)
    )


def sigvq_shapes(width: int = 64, semantic: int = 64, codes: int = 20) -> dict[str, tuple[int, ...]]:
    """A SigVQ of one block with heads of 4 dimensions."""
    block = "visual.blocks.0"
    return (
        {
            "visual.patch_embed.proj.weight": (width, 3, 16, 16),
            "visual.patch_embed.proj.bias": (width,),
            "visual.embeddings.position_embedding.weight": (4, width),
            "vqmodel.quant_conv.weight": (32, width, 1, 1),
            "vqmodel.quant_conv.bias": (32,),
            "vqmodel.quantize.embedding.weight": (codes, 32),
            "prior_token_embedding.weight": (codes, semantic),
        }
        | {f"{block}.{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        | linear(f"{block}.attn.qkv", 3 * width, width)
        | linear(f"{block}.attn.proj", width, width)
        | linear(f"{block}.mlp.fc1", 2 * width, width)
        | linear(f"{block}.mlp.fc2", width, 2 * width)
        | linear("prior_projector.net.0.proj", semantic, semantic)
        | linear("prior_projector.net.2", semantic, semantic)
    )


def tiny_autoencoder_shapes(channels: int) -> dict[str, tuple[int, ...]]:
    """TAESD, the smallest decoder the engine takes: 3x3 convolutions of 64 channels, latents of `channels`.

    With Flux.2's latents of 32 channels, the blocks beside them also have convolutions of size 1.
    """
    shapes = {}
    # Numbers of the layers: the first and last convolution, those that resize (no bias), and blocks of three.
    for side, ends, resizing, blocks in (
        ("encoder", {0: (64, 3), 14: (channels, 64)}, (2, 6, 10), (1, 3, 4, 5, 7, 8, 9, 11, 12, 13)),
        ("decoder", {0: (64, channels), 18: (3, 64)}, (6, 11, 16), (2, 3, 4, 7, 8, 9, 12, 13, 14, 17)),
    ):
        inner = {f"{n}.conv.{part}": (64, 64) for n in blocks for part in (0, 2, 4)}
        for n, (out, into) in (ends | inner).items():
            shapes |= {f"{side}.layers.{n}.weight": (out, into, 3, 3), f"{side}.layers.{n}.bias": (out,)}
        shapes |= {f"{side}.layers.{n}.weight": (64, 64, 3, 3) for n in resizing}
        for n in (blocks[-3:] if side == "encoder" else blocks[:3]) if channels == 32 else ():
            pool = f"{side}.layers.{n}.pool"
            shapes |= {f"{pool}.0.weight": (256, 64, 1, 1), f"{pool}.3.weight": (64, 256, 1, 1)}
            shapes |= {f"{pool}.1.{part}": (256,) for part in ("weight", "bias")}
    return shapes


def write_zeros(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of f16 zeros: a header and a hole."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + offset)


def write_adapter(folder: Path, pack: Pack) -> None:
    """Export a best checkpoint in which nothing is at its initial value and no standardization is trivial."""
    generator = torch.Generator().manual_seed(1)
    adapter = Resampler(STUDENT, pack.teacher_dim, WIDTH, 2, pack.queries, pack.vocabulary).requires_grad_(False)
    for name, weight in adapter.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name in ("query", "t5_embed.weight"):
            weight.copy_(noise)
        elif weight.ndim == 2:
            weight.copy_(noise / weight.shape[1] ** 0.5)
        else:
            weight.copy_(0.2 * noise + (name.endswith("weight")))
    dims = (STUDENT, STUDENT, pack.teacher_dim, pack.teacher_dim)
    random = (torch.rand(dim, generator=generator) for dim in dims)
    scale = Standardization(*(part + 0.5 * (number % 2) for number, part in enumerate(random)))
    shape = {"width": WIDTH, "depth": 2, "student_dim": STUDENT}
    settings = config.load({"pack": pack.name, "run": "tiny", "runs_dir": str(folder), "adapter": shape})
    best = folder / "best.safetensors"
    meta = {"step": 1, "steps": 1, "best_cos": 0.5, "made_from": {}}
    checkpoints.save(best, checkpoints.pack(adapter, scale), meta)
    export.export_best(settings, tiny_runs.RECORDS, best, folder / f"{pack.name}.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    # The engine's tokenizer is compiled in; its heads have 128 dimensions.
    model = tiny_models.qwen3(hidden=STUDENT, layers=2, heads=2, kv_heads=1, vocabulary=151936)
    tiny_models.student_gguf(folder / "student.gguf", model)
    tiny_models.qwen2_tokenizer(folder / "tokenizer", merges=None)
    tiny_models.t5_snapshot(folder / "teacher", vocabulary=PIXART.vocabulary)
    for pack, shapes, channels in ((PIXART, pixart_shapes(), 4), (LLADA, llada_shapes(), 32)):
        write_adapter(folder, pack)
        write_zeros(folder / f"{pack.name}.safetensors", shapes)
        write_zeros(folder / f"{pack.name}-vae.safetensors", tiny_autoencoder_shapes(channels))
    return folder


@pytest.fixture(scope="module")
def student(folder):
    """Our student's ids of a prompt, and its states, f32."""
    tokenizer = student_tokenizer(folder / "student.gguf", folder / "tokenizer")
    model = students.load(folder / "student.gguf", "qwen3", torch.float32, "cpu")

    def encode(prompt: str, template: Template) -> tuple[list[int], torch.Tensor]:
        (ids,) = tokenizer.encode([prompt], template)
        return ids, model.states(torch.tensor([ids]))

    return encode


@pytest.fixture(scope="module")
def ours(folder, student):
    """Our conditioning of a prompt for PixArt, and its student ids."""
    teacher = t5.load(folder / "teacher", torch.float32, "cpu")
    adapter = evaluation.load_adapter(folder / "pixart.gguf", torch.device("cpu"))

    def encode(prompt: str) -> tuple[list[int], Conditioning]:
        ids, states = student(prompt, PIXART.template)
        (slots,) = teacher.tokenize([prompt], PIXART.queries)
        slots += [0] * (PIXART.queries - len(slots))
        rows = adapter.head(adapter(states, None, torch.tensor([slots])))
        return ids, Conditioning(slots, states[0].numpy(), rows[0].numpy())

    return encode


@pytest.fixture(scope="module")
def ours_of_llada(folder, student):
    """Our conditioning of a prompt for LLaDA-Image."""
    adapter = evaluation.load_adapter(folder / "llada_image.gguf", torch.device("cpu"))

    def encode(prompt: str) -> Conditioning:
        ids, states = student(prompt, LLADA.template)
        return Conditioning(ids, states[0].numpy(), adapter.head(adapter(states, None, None))[0].numpy())

    return encode


@pytest.fixture
def engine(folder, tmp_path):
    """The engine's conditioning of a prompt with the adapter of a pack."""

    def encode(prompt: str, pack: Pack, *more: str) -> Conditioning:
        files = {
            "--diffusion-model": f"{pack.name}.safetensors",
            "--tae": f"{pack.name}-vae.safetensors",
            "--llm": "student.gguf",
            "--llm-adapter": f"{pack.name}.gguf",
        }
        paths = [word for flag, name in files.items() for word in (flag, str(folder / name))]
        # Without a guidance scale of 1 the dump would be the negative prompt's.
        sizes = ["--cfg-scale", "1", "--steps", "1", "-W", "64", "-H", "64", "-t", "1"]
        done = subprocess.run(
            [GGK, "diffuser", "engine", "--", *paths, *sizes, "-o", str(tmp_path / "image.png"), "-p", prompt, *more],
            env=os.environ | {"SD_DUMP_COND": str(tmp_path), "SD_LLADA_DUMP": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        assert (tmp_path / "adapter_out.bin").exists(), done.stdout.decode(errors="replace")[-3000:]
        ids = tmp_path / ("t5_ids.txt" if pack is PIXART else "tokens.txt")
        return Conditioning(
            [int(line) for line in ids.read_text().split()],
            np.fromfile(tmp_path / "qwen_hidden.bin", "<f4").reshape(-1, STUDENT),
            np.fromfile(tmp_path / "adapter_out.bin", "<f4").reshape(-1, pack.teacher_dim),
        )

    return encode


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference in any row, relative to that row's largest value."""
    return float((np.abs(found - expected).max(1) / np.abs(expected).max(1)).max())


@pytest.mark.parametrize("raw", PROMPTS)
def test_the_engine_conditions_on_what_we_compute(ours, engine, raw):
    prompt = for_engine(raw)
    _, expected = ours(prompt)
    found = engine(prompt, PIXART)
    # The engine writes no student ids for PixArt. Every id has states of its own, so equal states mean equal ids.
    assert_same(found, expected)
    assert found.rows.shape == (PIXART.queries, PIXART.teacher_dim)


@pytest.mark.parametrize("raw", PROMPTS)
def test_the_engine_conditions_llada_image_on_what_we_compute(ours_of_llada, engine, raw):
    prompt = for_engine(raw)
    found = engine(prompt, LLADA)
    assert_same(found, ours_of_llada(prompt))
    assert found.rows.shape == (LLADA.queries, LLADA.teacher_dim)
    if not prompt:
        assert len(found.ids) == 24  # contracts/ggk-engine.md 4


def test_the_engine_reads_the_companion_and_takes_a_reference_image_through_it(folder, engine, tmp_path):
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in sigvq_shapes().items()}
    save_file(tensors, tmp_path / "sigvq.safetensors")
    files = [{"name": "sigvq.safetensors"}]
    record = Record("sigvq", "hub", "t", "companion", str(tmp_path), "path", None, None, None, None, files, "d")
    settings = config.load({"pack": "llada_image", "runs_dir": str(tmp_path)})
    export.export_companion(settings, record, Path(settings.companion))
    noise = torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(noise.numpy()).save(tmp_path / "reference.png")
    options = LLADA.companion_options.replace("{companion}", settings.companion).split()
    options = [str(tmp_path / option) if option == "reference.png" else option for option in options]
    engine(ORDINARY, LLADA, *options)
    found = torch.from_numpy(np.fromfile(tmp_path / "sigvq_feats.bin", "<f4").reshape(-1, 64))
    # Whatever code the tower chooses for a patch, its row is one of those that the projector makes of the codes.
    t = {name: tensor.float() for name, tensor in tensors.items()}
    rows = silu(affine(t["prior_token_embedding.weight"], t, "prior_projector.net.0.proj"))
    rows = affine(rows, t, "prior_projector.net.2")
    nearest = torch.cdist(found, rows).argmin(1)
    assert len(found) == 4
    assert len(set(nearest.tolist())) > 1
    assert deviation(found.numpy(), rows[nearest].numpy()) < 1e-3


def affine(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def assert_same(found: Conditioning, expected: Conditioning) -> None:
    assert found.ids == expected.ids
    assert len(found.states) == len(expected.states)
    assert deviation(found.states, expected.states) < 1e-4
    assert deviation(found.rows, expected.rows) < 1e-4


def test_the_empty_prompt_has_an_id_in_both_tokenizers(ours):
    ids, conditioning = ours("")
    assert ids == [QWEN_PAD]
    assert conditioning.ids[:3] == [3, 1, 0]


def test_the_long_prompt_fills_the_window(ours):
    assert 0 not in ours(for_engine(LONG))[1].ids


def test_the_comparison_would_see_another_token_or_another_slot(ours):
    _, one = ours(ORDINARY)
    for other in (ORDINARY.replace("red", "blue"), ORDINARY.replace("fox", "FOX")):
        _, two = ours(other)
        assert deviation(two.states, one.states[: len(two.states)]) > 1e-2
        assert deviation(two.rows, one.rows) > 1e-2
