"""The real engine, given LoRA files of ours, makes the picture that it makes of weights they were added to by hand.

Opt-in, as the tests of test_engine.py.
"""

import re
import subprocess
from functools import cache

import loras
import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image
from safetensors.torch import save_file
from test_engine import GGK, linear, tiny_autoencoder_shapes
from trainer.lora import families, files, ladder, names

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not GGK, reason="no ggk engine: pip install ggk, or name its executable in GGK"),
]
WIDTH, TEXT, RANK, ALPHA = 256, 64, 8, 12.0  # the engine's heads have 128 dimensions, its embedding of time 256
BLOCKS = ("noise_refiner.0", "context_refiner.0", "layers.0")
FUSED = ("to_q", "to_k", "to_v")
Z_IMAGE = families.get("z_image")


def bare(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)}


def z_image_shapes() -> dict[str, tuple[int, ...]]:
    """A Z-Image transformer of one block a stream, by the names of its authors."""
    shapes = {"x_pad_token": (1, WIDTH), "cap_pad_token": (1, WIDTH), "cap_embedder.0.weight": (TEXT,)}
    shapes |= linear("x_embedder", WIDTH, 64) | linear("cap_embedder.1", WIDTH, TEXT)
    shapes |= linear("t_embedder.mlp.0", 256, 256) | linear("t_embedder.mlp.2", 256, 256)
    shapes |= linear("final_layer.linear", 64, WIDTH) | linear("final_layer.adaLN_modulation.1", WIDTH, 256)
    for block in BLOCKS:
        shapes |= bare(f"{block}.attention.qkv", 3 * WIDTH, WIDTH) | bare(f"{block}.attention.out", WIDTH, WIDTH)
        shapes |= {f"{block}.attention.{norm}.weight": (128,) for norm in ("q_norm", "k_norm")}
        shapes |= {f"{block}.{part}_norm{n}.weight": (WIDTH,) for part in ("attention", "ffn") for n in (1, 2)}
        shapes |= {f"{block}.feed_forward.{part}.weight": (768, WIDTH) for part in ("w1", "w3")}
        shapes |= bare(f"{block}.feed_forward.w2", WIDTH, 768)
        if not block.startswith("context"):
            shapes |= linear(f"{block}.adaLN_modulation.0", 4 * WIDTH, 256)
    return shapes


def values(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights that keep what goes through them about as large as it was."""
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name] = (
            1 + 0.1 * noise if len(shape) == 1 and "bias" not in name else noise / max(10, noise[0].numel()) ** 0.5
        )
    return made


def merged(base: dict[str, torch.Tensor], lora: files.Lora) -> dict[str, torch.Tensor]:
    """Weights of the authors' layout with a LoRA added to them."""
    made = {name: tensor.clone() for name, tensor in base.items()}
    for module, (a, b) in lora.modules.items():
        place, _, part = module.rpartition(".attention.")
        if part == "to_out.0":
            made[f"{place}.attention.out.weight"] += b @ a
        else:
            at = FUSED.index(part) * WIDTH
            made[f"{place}.attention.qkv.weight"][at : at + WIDTH] += b @ a
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The engine's files, LoRAs of all of attention and of the queries alone, and weights that these were added to."""
    folder = tmp_path_factory.mktemp("engine")
    generator = torch.Generator().manual_seed(2)
    base = values(z_image_shapes(), generator)
    save_file(base, folder / "base.safetensors")
    decoder = values(tiny_autoencoder_shapes(16), generator)
    decoder["decoder.layers.18.weight"] /= 10  # or pictures would be all black and white
    save_file(decoder, folder / "tae.safetensors")
    model = tiny_models.qwen3(hidden=TEXT, layers=2, heads=2, kv_heads=1, vocabulary=151936)
    tiny_models.student_gguf(folder / "text.gguf", model)
    for name, parts in (("all", (*FUSED, "to_out.0")), ("queries", ("to_q",)), ("values", ("to_v",))):
        weights = {}
        for module in (f"{block}.attention.{part}" for block in BLOCKS for part in parts):
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=generator) / WIDTH**0.5
            weights[f"{module}.lora_B.weight"] = torch.randn(WIDTH, RANK, generator=generator) / 3
        lora = files.folded(weights, Z_IMAGE, ALPHA, torch.float32)
        files.write(folder / f"{name}.safetensors", lora, loras.ABOUT)
        files.write_variant(folder / f"{name}-variant.safetensors", lora, loras.ABOUT)
        files.write_gguf(folder / f"{name}-gguf.gguf", lora, loras.ABOUT)
        save_file(merged(base, lora), folder / f"merged-{name}.safetensors")
    return folder


@cache
def picture(folder, model: str, lora: str = "", mode: str = "auto") -> tuple[np.ndarray, tuple[int, int] | None]:
    """The engine's picture, and how many tensors it said it applied, of how many."""
    out = folder / f"{model}-{lora}-{mode}.png"
    prompt = f"a fox<lora:{lora}:1>" if lora else "a fox"
    options = {
        "--diffusion-model": folder / f"{model}.safetensors",
        "--tae": folder / "tae.safetensors",
        "--llm": folder / "text.gguf",
        "--lora-model-dir": folder,
        "--lora-apply-mode": mode,
        "--cfg-scale": 1,
        "--steps": 2,
        "--seed": 3,
        "-W": 64,
        "-H": 64,
        "-t": 1,
        "-o": out,
        "-p": prompt,
    }
    command = [GGK, "diffuser", "engine", "--", *(str(it) for option in options.items() for it in option), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    said = done.stdout + done.stderr
    assert out.exists(), said[-3000:]
    # A line for the text encoder, to which nothing applies, and one for the network.
    applied = re.findall(r"\((\d+) / (\d+)\) LoRA tensors have been applied", said)
    return np.asarray(Image.open(out).convert("RGB")).astype(int), max(
        ((int(n), int(m)) for n, m in applied), default=None
    )


@pytest.mark.parametrize("file", ["all", "all-variant", "all-gguf"])
@pytest.mark.parametrize("mode", ["immediately", "at_runtime"])
def test_a_lora_changes_the_engines_picture_as_the_merged_weights_do(folder, file, mode):
    base, _ = picture(folder, "base")
    by_hand, _ = picture(folder, "merged-all")
    found, applied = picture(folder, "base", file, mode)
    total = 24 if file == "all" else 36  # with alphas
    assert ladder.engines({}, applied).passed
    assert applied == (total, total)
    change = np.abs(by_hand - base).mean()
    assert change > 2
    # Sums round elsewhere, those of activations most.
    assert np.abs(found - by_hand).max() <= (1 if mode == "immediately" else 2)
    assert np.abs(found - by_hand).mean() < 0.02 * change


@pytest.mark.parametrize("part", ["queries", "values"])
@pytest.mark.parametrize("mode", ["immediately", "at_runtime"])
def test_a_lora_of_queries_or_values_alone_is_whole_in_the_files_for_the_engine(folder, part, mode):
    by_hand, _ = picture(folder, f"merged-{part}")
    base, _ = picture(folder, "base")
    change = np.abs(by_hand - base).mean()
    assert change > 0.5
    for file in "variant", "gguf":
        found, applied = picture(folder, "base", f"{part}-{file}", mode)
        assert applied == (27, 27)  # queries, keys and values
        assert np.abs(found - by_hand).mean() < 0.02 * change


def test_the_file_for_diffusers_would_lose_them_as_the_checker_says(folder):
    by_hand, _ = picture(folder, "merged-values")
    found, _ = picture(folder, "base", "values", "at_runtime")
    assert np.abs(found - by_hand).mean() > 0.2
    stored, _ = files.header(folder / "values.safetensors")
    assert not names.check(stored, Z_IMAGE, "ggk").whole


def test_keys_that_the_checker_does_not_know_the_engine_does_not_apply(folder):
    tensors, _ = files.read(folder / "all.safetensors")
    renamed = {name.replace("transformer.", "base_model.model."): it for name, it in tensors.items()}
    save_file(renamed, folder / "renamed.safetensors")
    base, _ = picture(folder, "base")
    found, applied = picture(folder, "base", "renamed")
    checked = names.check(renamed, Z_IMAGE, "ggk")
    assert applied == (checked.known, checked.total) == (0, 24)
    assert np.array_equal(found, base)
