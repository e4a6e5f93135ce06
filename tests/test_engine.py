"""The real engine, given a file of ours, conditions on what our code computes: ids, student states and adapter rows.

Opt-in: needs ggk (`pip install ggk`), on PATH or named by the environment variable GGK.
"""

import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import tiny_models
import tiny_runs
import torch
from PIL import Image
from safetensors.torch import save_file
from test_qwen3_vl import run
from tokenizers import Tokenizer
from torch.nn.functional import silu
from trainer import adapters, checkpoints, config, evaluation, export, students, teachers
from trainer.batches import Batch
from trainer.chat_templates import Chat
from trainer.config import Settings
from trainer.materials import Record
from trainer.packs.base import AdapterPack, Template
from trainer.packs.llada_image import PACK as LLADA
from trainer.packs.mageflow import PACK as MAGEFLOW
from trainer.packs.pixart import PACK as PIXART
from trainer.packs.qwen_image import PACK as QWEN_IMAGE
from trainer.prompt_cleaning import for_engine
from trainer.reference_images import PATCH, SLOT, patches, qwen_image_pixels
from trainer.standardization import Standardization
from trainer.teachers import t5
from trainer.tokenization import QWEN_PAD, student_tokenizer
from trainer.weights import Weights

GGK = shutil.which(os.environ.get("GGK") or "ggk")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not GGK, reason="no ggk engine: pip install ggk, or name its executable in GGK"),
    pytest.mark.skipif(not tiny_models.shared("tokenizers"), reason="no shared/tokenizers beside the checkout"),
]
STUDENT, WIDTH, VISION = 64, 64, 64

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
    """ids: the seeds [Q] of PixArt's slots, else the student's ids [L]; states [L, STUDENT], rows [Q or L, D] f32.

    vision: rows of the tower [V, VISION]. projected: the student's embeddings of them. places: (first token, tokens) of
    each picture.
    """

    ids: list[int]
    states: np.ndarray
    rows: np.ndarray
    vision: np.ndarray = np.empty((0, VISION))
    projected: np.ndarray = np.empty((0, STUDENT))
    places: tuple[tuple[int, int], ...] = ()


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


def mageflow_shapes(width: int = 3072, blocks: int = 12) -> dict[str, tuple[int, ...]]:
    """A MageFlow transformer, whose sizes are the engine's."""
    shapes = (
        linear("img_in", width, 128) | linear("txt_in", width, MAGEFLOW.teacher_dim) | linear("proj_out", 128, width)
    )
    shapes |= {"txt_norm.weight": (MAGEFLOW.teacher_dim,)} | linear("norm_out.linear", 2 * width, width)
    shapes |= linear("time_text_embed.timestep_embedder.linear_1", width, 256)
    shapes |= linear("time_text_embed.timestep_embedder.linear_2", width, width)
    for block in (f"transformer_blocks.{number}" for number in range(blocks)):
        for part in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"):
            shapes |= linear(f"{block}.attn.{part}", width, width)
        shapes |= {
            f"{block}.attn.{norm}.weight": (128,) for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
        }
        for stream in ("img", "txt"):
            shapes |= linear(f"{block}.{stream}_mod.1", 6 * width, width)
            shapes |= linear(f"{block}.{stream}_mlp.net.0.proj", 4 * width, width)
            shapes |= linear(f"{block}.{stream}_mlp.net.2", width, 4 * width)
    return shapes


def qwen_image_shapes(width: int = 128) -> dict[str, tuple[int, ...]]:
    """A Qwen-Image 2.1 transformer of one block."""
    block, dim = "transformer_blocks.0", QWEN_IMAGE.teacher_dim
    shapes = {
        "img_in": (width, 64),
        "txt_in.in_layer": (width, dim),
        "txt_in.out_layer": (width, width),
        "time_text_embed.timestep_embedder.linear_1": (width, 256),
        "time_text_embed.timestep_embedder.linear_2": (width, width),
        "modulation.1": (4 * width, width),
        "norm_out.linear": (width, width),
        "proj_out": (64, width),
        "txt_in.text_norm": (dim,),
        f"{block}.attn.norm_q": (width,),
        f"{block}.attn.norm_k": (width,),
        f"{block}.img_mlp.out": (width, 2 * width),
    }
    shapes |= {f"{block}.attn.{part}": (width, width) for part in ("to_q", "to_k", "to_v", "to_out.0")}
    shapes |= {f"{block}.img_mlp.{part}": (2 * width, width) for part in ("proj", "gate_layer")}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def qwen_autoencoder_shapes() -> dict[str, tuple[int, ...]]:
    """Qwen-Image 2.1's autoencoder, whose sizes are the engine's: none that is smaller takes four channels."""

    def convolution(name: str, out: int, into: int, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (out, into, size, size), f"{name}.bias": (out,)}

    def residual(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
        made = {f"{name}.residual.0.gamma": (into,), f"{name}.residual.3.gamma": (out,)}
        made |= convolution(f"{name}.residual.2", out, into, 3) | convolution(f"{name}.residual.6", out, out, 3)
        return made if out == into else made | convolution(f"{name}.shortcut", out, into, 1)

    shapes = convolution("conv1", 128, 128, 1) | convolution("conv2", 64, 64, 1)
    for side, part, sizes, ends, blocks, films, wide in (
        ("encoder", "downsamples", (96, 96, 192, 384, 768, 768), (4, 128), 2, (1, 2, 3), 1),
        ("decoder", "upsamples", (1152, 1152, 1152, 576, 288, 144), (64, 4), 3, (0, 1, 2), 2),
    ):
        middle = sizes[-1] if side == "encoder" else sizes[0]
        shapes |= convolution(f"{side}.conv1", sizes[0], ends[0], 3)
        shapes |= convolution(f"{side}.head.2", ends[1], sizes[-1], 3) | {f"{side}.head.0.gamma": (sizes[-1],)}
        shapes |= residual(f"{side}.middle.0", middle, middle) | residual(f"{side}.middle.2", middle, middle)
        shapes |= {f"{side}.middle.1.norm.gamma": (middle,)}
        shapes |= convolution(f"{side}.middle.1.to_qkv", 3 * middle, middle, 1)
        shapes |= convolution(f"{side}.middle.1.proj", middle, middle, 1)
        for stage, (into, out) in enumerate(pairwise(sizes)):
            name = f"{side}.{part}.{stage}.{part}"
            for number in range(blocks):
                shapes |= residual(f"{name}.{number}", out, out if number else into)
            if stage < 4:
                shapes |= convolution(f"{name}.{blocks}.resample.1", out, out, 3)
            if stage in films:
                shapes |= convolution(f"{name}.{blocks}.time_conv", wide * out, out, 1)
    return shapes


def write_mmproj(path: Path, weights: Weights) -> None:
    """The tower of a snapshot as llama.cpp lays it out: convolutions of the two frames apart, vectors in f32."""
    names = {
        "merger.linear_fc1.": "mm.0.",
        "merger.linear_fc2.": "mm.2.",
        "merger.norm.": "v.post_ln.",
        "pos_embed.": "v.position_embd.",
        "patch_embed.proj.": "v.patch_embd.",
        "blocks.": "v.blk.",
        ".attn.qkv.": ".attn_qkv.",
        ".attn.proj.": ".attn_out.",
        ".mlp.linear_fc1.": ".ffn_up.",
        ".mlp.linear_fc2.": ".ffn_down.",
        ".norm1.": ".ln1.",
        ".norm2.": ".ln2.",
    }
    writer = gguf.GGUFWriter(path, "clip")
    for stored in weights.shapes:
        name = stored.removeprefix("model.visual.")
        if name == stored or name.startswith("deepstack"):
            continue
        for theirs, llama in names.items():
            name = name.replace(theirs, llama)
        tensor = weights.tensor(stored).float()
        if tensor.ndim == 5:
            for frame, suffix in enumerate(("", ".1")):
                writer.add_tensor(name + suffix, tensor[:, :, frame].contiguous().numpy())
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def tiny_settings(folder: Path, pack: AdapterPack) -> Settings:
    """A small adapter for a tiny student, at the engine's own size of a row."""
    shape = {"width": WIDTH, "depth": 2, "student_dim": STUDENT} | ({"vision_dim": VISION} if pack.vision_dim else {})
    return Settings(pack=pack.name, run="tiny", runs_dir=str(folder), adapter=shape)


def write_adapter(folder: Path, pack: AdapterPack) -> None:
    """Export a best checkpoint in which nothing is at its initial value and no standardization is trivial."""
    generator = torch.Generator().manual_seed(1)
    settings = tiny_settings(folder, pack)
    adapter = adapters.fresh(settings.adapter).requires_grad_(False)
    for name, weight in adapter.state_dict().items():
        noise = torch.randn(weight.shape, generator=generator)
        if name in ("query", "t5_embed.weight"):
            weight.copy_(noise)
        elif weight.ndim == 2:
            weight.copy_(noise / weight.shape[1] ** 0.5)
        else:
            weight.copy_(0.2 * noise + (name.endswith("weight")))
    dims = (STUDENT, STUDENT, pack.teacher_dim, pack.teacher_dim, *([VISION] if pack.vision_dim else []))
    random = (torch.rand(dim, generator=generator) for dim in dims)
    scale = Standardization(*(part + 0.5 * (number not in (0, 2)) for number, part in enumerate(random)))
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
    # The engine's towers have 16 heads. It multiplies patches in f16, which holds weights of bf16 as they are.
    qwen = tiny_models.qwen3_vl_snapshot(folder / "qwen", hidden=VISION, tower=(128, 16), dtype=torch.bfloat16)
    write_mmproj(folder / "mmproj.gguf", Weights(qwen))
    for pack, shapes, decoder in (
        (PIXART, pixart_shapes(), tiny_autoencoder_shapes(4)),
        (LLADA, llada_shapes(), tiny_autoencoder_shapes(32)),
        (MAGEFLOW, mageflow_shapes(), tiny_autoencoder_shapes(16)),
        (QWEN_IMAGE, qwen_image_shapes(), qwen_autoencoder_shapes()),
    ):
        write_adapter(folder, pack)
        write_zeros(folder / f"{pack.name}.safetensors", shapes)
        write_zeros(folder / f"{pack.name}-vae.safetensors", decoder)
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
    teacher = t5.load(folder / "teacher", torch.float32)
    adapter = evaluation.load_adapter(folder / "pixart.gguf", torch.device("cpu"))

    def encode(prompt: str) -> tuple[list[int], Conditioning]:
        ids, states = student(prompt, PIXART.template)
        (slots,) = teacher.tokenize([prompt], PIXART.queries)
        slots += [0] * (PIXART.queries - len(slots))
        rows = adapter(alone(states[0], slots=torch.tensor([slots])))
        return ids, Conditioning(slots, states[0].numpy(), rows.numpy())

    return encode


@pytest.fixture(scope="module")
def ours_of_llada(folder, student):
    """Our conditioning of a prompt for LLaDA-Image."""
    adapter = evaluation.load_adapter(folder / "llada_image.gguf", torch.device("cpu"))

    def encode(prompt: str) -> Conditioning:
        ids, states = student(prompt, LLADA.template)
        return Conditioning(ids, states[0].numpy(), adapter(alone(states[0])).numpy())

    return encode


def alone(states: torch.Tensor, **more: torch.Tensor) -> Batch:
    """One sample, of which all rows are wanted."""
    seen = len(more.get("vision", ()))
    return Batch((len(states),), (0,), (seen,), states, states[:0], **more)


@pytest.fixture(scope="module")
def ours_of_chat(folder, student):
    """Our conditioning of a prompt and pictures for a pack that takes some, at an area of reference pictures."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    model = students.load(folder / "student.gguf", "qwen3", torch.float32, "cpu").model

    def encode(text: str, images: list[np.ndarray], area: int, pack: AdapterPack) -> Conditioning:
        teacher = teachers.load(pack.teacher, folder / "qwen", torch.float32)
        contract, adapter = teacher.contract, evaluation.load_adapter(folder / f"{pack.name}.gguf", torch.device("cpu"))
        sizes = [contract.size(*image.shape[:2], area) for image in images]
        chat = Chat(contract.template, tokenizer, folder / "tokenizer")
        (prompt,) = chat.prompts([text], [[(high // SLOT, wide // SLOT) for high, wide in sizes]])
        pixels = [contract.pixels(image, size) for image, size in zip(images, sizes, strict=True)]
        states = [
            # As the engine does: see `folder`.
            {"patches": torch.from_numpy(patches(made)).half().float()[None], "grid": torch.tensor([size]) // PATCH}
            for made, size in zip(pixels, sizes, strict=True)
        ]
        with tempfile.TemporaryDirectory() as place:
            seen = run(teacher, teacher.vision_parts, states, Path(place))
        vision = torch.cat([torch.empty(0, VISION), *(state["vision"][0] for state in seen)])
        at = torch.from_numpy(prompt.under_pictures)
        embeddings = model.embed_tokens(torch.tensor(prompt.ids))
        embeddings[at] = projected = vision @ adapter.vision_proj.weight.T
        hidden = model(inputs_embeds=embeddings[None]).last_hidden_state[0]
        rows = adapter(alone(hidden, vision=vision, vision_at=at))
        places = tuple((slots.start, slots.end - slots.start) for slots in prompt.pictures)
        return Conditioning(prompt.ids, hidden.numpy(), rows.numpy(), vision.numpy(), projected.numpy(), places)

    return encode


@pytest.fixture
def engine(folder, tmp_path):
    """The engine's conditioning of a prompt with the adapter of a pack."""

    def encode(prompt: str, pack: AdapterPack, *more: str, side: int = 64) -> Conditioning:
        files = {
            "--diffusion-model": f"{pack.name}.safetensors",
            "--vae" if pack is QWEN_IMAGE else "--tae": f"{pack.name}-vae.safetensors",
            "--llm": "student.gguf",
            "--llm-adapter": f"{pack.name}.gguf",
        }
        paths = [word for flag, name in files.items() for word in (flag, str(folder / name))]
        # Without a guidance scale of 1 the dump would be the negative prompt's.
        sizes = ["--cfg-scale", "1", "--steps", "1", "-W", str(side), "-H", str(side), "-t", "1"]
        ids = tmp_path / ("t5_ids.txt" if pack is PIXART else "tokens.txt")
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    GGK,
                    "diffuser",
                    "engine",
                    "--",
                    *paths,
                    *sizes,
                    "-o",
                    str(tmp_path / "image.png"),
                    "-p",
                    prompt,
                    *more,
                ],
                env=os.environ | {"SD_DUMP_COND": str(tmp_path), "SD_LLADA_DUMP": str(tmp_path)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if pack.vision_dim and ids.exists() and ids.stat().st_size:  # the last that it dumps
                break  # its transformer is eight gigabytes of zeros
            time.sleep(0.02)
        process.kill()
        process.wait()
        assert ids.exists(), (tmp_path / "log").read_text(errors="replace")[-3000:]
        made = Conditioning(
            [int(line) for line in ids.read_text().split()],
            dumped(tmp_path / "qwen_hidden.bin", STUDENT),
            dumped(tmp_path / "adapter_out.bin", pack.teacher_dim),
        )
        if not (tmp_path / "vis_pos.txt").exists():
            return made
        lines = (tmp_path / "vis_pos.txt").read_text().splitlines()
        return made._replace(
            vision=dumped(tmp_path / "vis_embeds.bin", VISION),
            projected=dumped(tmp_path / "vis_proj.bin", STUDENT),
            places=tuple(tuple(map(int, line.split())) for line in lines),
        )

    return encode


def dumped(file: Path, size: int) -> np.ndarray:
    return np.fromfile(file, "<f4").reshape(-1, size)


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
    options = LLADA.reference_options.replace("{companion}", settings.companion).split()
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


@pytest.mark.parametrize(
    ("raw", "pack"),
    [*((raw, QWEN_IMAGE) for raw in PROMPTS), *((raw, MAGEFLOW) for raw in PROMPTS[:4])],
    ids=lambda it: it.name if isinstance(it, AdapterPack) else None,
)
def test_the_engine_words_and_conditions_text_as_we_do(ours_of_chat, engine, pack, raw):
    prompt = for_engine(raw)
    assert_same(engine(prompt, pack), ours_of_chat(prompt, [], 64 * 64, pack))


# Height and width: portrait and landscape, less than a slot over and under, larger than MageFlow's tower takes, sides
# that are half a slot, two pictures.
PICTURES = [[(200, 300)], [(97, 31)], [(427, 640)], [(400, 384)], [(48, 80)], [(500, 333), (64, 150)]]


@pytest.mark.parametrize("pack", [MAGEFLOW, QWEN_IMAGE], ids=lambda pack: pack.name)
@pytest.mark.parametrize("sizes", PICTURES, ids=str)
def test_the_engine_sees_and_conditions_on_pictures_as_we_do(folder, ours_of_chat, engine, tmp_path, pack, sizes):
    random = np.random.default_rng(len(sizes))
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    options = ["--llm_vision", str(folder / "mmproj.gguf")]
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        options += ["-r", str(tmp_path / f"{number}.png")]
    # The area of the picture that the engine makes is that of Qwen-Image's references.
    found = engine(ORDINARY, pack, *options, side=96)
    expected = ours_of_chat(ORDINARY, images, 96 * 96, pack)
    assert found.places == expected.places
    assert len(found.places) == len(sizes)
    assert deviation(found.vision, expected.vision) < 1e-4
    assert deviation(found.projected, expected.projected) < 1e-4
    assert_same(found, expected)
    assert found.rows.shape == (len(found.ids), pack.teacher_dim)
    if pack is QWEN_IMAGE:
        size = tuple(map(int, (tmp_path / "ref0_shape.txt").read_text().split()))[::-1]
        pixels = np.fromfile(tmp_path / "ref0_rgb.bin", "<f4").reshape(3, *size).transpose(1, 2, 0)
        assert np.abs(pixels - qwen_image_pixels(images[0], size)).max() < 1e-6


def test_another_picture_would_be_seen(ours_of_chat):
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    one, two = (ours_of_chat(ORDINARY, [image], 64 * 64, MAGEFLOW) for image in images)
    assert deviation(two.vision, one.vision) > 1e-2
    assert deviation(two.rows, one.rows) > 1e-2


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
