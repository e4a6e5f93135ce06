"""What a LoRA file holds: the same bytes for the same weights, the full strength, all that others ask of it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import loras
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer import export
from trainer.errors import TrainerError
from trainer.files import read_json, sha256, write_json
from trainer.lora import families, files, names

COUNTS = {"sdxl": (32, 32), "flux": (11, 11), "qwen_image": (16, 14), "z_image": (16, 16)}

# Writes all files of some weights, in a process of its own.
WRITER = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from trainer.lora import families, files
out = Path(sys.argv[1])
about = files.About(**eval(sys.argv[2]))
for family in families.names():
    weights = load_file(out.parent / f"{family}-weights.safetensors")
    weights = dict(sorted(weights.items(), key=lambda item: hash(item[0])))
    import torch
    made = files.folded(weights, families.get(family), 16, torch.bfloat16)
    files.write(out / f"{family}.safetensors", made, about)
    files.write_variant(out / f"{family}-variant.safetensors", made, about)
    files.write_gguf(out / f"{family}.gguf", made, about)
    files.write_sidecar(out / f"{family}.safetensors", made, about, [out / f"{family}.safetensors"])
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for family in loras.FAMILIES:
        save_file(loras.weights(family), folder / f"{family}-weights.safetensors")
    about = repr({name: getattr(loras.ABOUT, name) for name in loras.ABOUT.__dataclass_fields__})
    # Each of the two would wait for its imports, not for the other.
    running = []
    for seed in ("1", "2"):
        (folder / seed).mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", WRITER, str(folder / seed), about]
        running.append(subprocess.Popen(command, env=environment))
    assert [process.wait(120) for process in running] == [0, 0]
    return folder / "1", folder / "2"


@pytest.mark.parametrize("family", loras.FAMILIES)
def test_the_same_weights_give_the_same_bytes_in_any_process(two_processes, family):
    for end in (".safetensors", "-variant.safetensors", ".gguf", ".json"):
        one, two = (sha256(folder / f"{family}{end}") for folder in two_processes)
        assert one == two, end


@pytest.mark.parametrize("family", loras.FAMILIES)
def test_the_file_is_of_the_size_that_its_rank_gives(tmp_path, family):
    path = tmp_path / "fox.safetensors"
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        files.write(path, loras.lora(family, dtype=dtype), loras.ABOUT)
        found = files.contents(path, families.get(family))
        modules, live = COUNTS[family]
        linear = [loras.network(family).get_submodule(name) for name in found.modules]
        shapes = [(layer.out_features, layer.in_features) for layer in linear]
        assert found.payload == files.payload_bytes(shapes, loras.RANK, dtype)
        assert found.payload == sum(8 * (out + into) * size for out, into in shapes)
        assert found.whole
        assert found.finite
        assert (len(found.modules), found.tensors, len(found.live), found.rank) == (modules, 2 * modules, live, 8)
        assert found.bytes == path.stat().st_size == found.header + found.payload


def real_shapes(family):
    """Features out and in of the modules of the published network that a LoRA is on, by its config."""
    if family == "sdxl":  # blocks with attention, layers in each, channels; the text has 2048
        found = []
        for blocks, layers, width in ((5, 2, 640), (6, 10, 1280)):
            found += ([(width, width)] * 6 + [(width, 2048)] * 2) * blocks * layers
        return found
    modules, width = {"flux": (19 * 8 + 38 * 3, 3072), "qwen_image": (60 * 8, 3072), "z_image": (34 * 4, 3840)}[family]
    return [(width, width)] * modules


@pytest.mark.parametrize(
    ("family", "modules", "values", "f32", "bf16"),
    [  # modules, values a rank, MB at rank 16
        ("sdxl", 560, 1_451_520, 92.9, 46.4),
        ("flux", 266, 1_634_304, 104.6, 52.3),
        ("qwen_image", 480, 2_949_120, 188.7, 94.4),
        ("z_image", 136, 1_044_480, 66.8, 33.4),
    ],
)
def test_real_sizes_are_those_of_the_published_networks(family, modules, values, f32, bf16):
    shapes = real_shapes(family)
    assert len(shapes) == modules
    assert files.payload_bytes(shapes, 1, torch.int8) == values
    assert round(files.payload_bytes(shapes, 16, torch.float32) / 1e6, 1) == f32
    assert round(files.payload_bytes(shapes, 16, torch.bfloat16) / 1e6, 1) == bf16


def test_dead_modules_of_qwen_image_are_accounted_for():
    family = families.get("qwen_image")
    lora = loras.lora("qwen_image")
    dead = files.dead(family, lora.modules, blocks=2)
    assert dead == {"transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"}
    assert {module for module, (_, b) in lora.modules.items() if not b.any()} == dead
    blocks = [f"transformer_blocks.{n}.attn.{end}" for n in range(60) for end in family.targets]
    assert len(blocks) - len(files.dead(family, blocks, 60)) == 478
    # Without a LoRA on the last block none is dead.
    assert files.dead(family, blocks[:80], 60) == set()


@pytest.mark.parametrize("family", loras.FAMILIES)
def test_strength_is_in_the_tensors_and_alpha_is_the_rank(tmp_path, family):
    path = tmp_path / "fox.safetensors"
    files.write(path, loras.lora(family, alpha=12.0), loras.ABOUT)
    trained, stored = loras.weights(family, 12.0), load_file(path)
    part = families.get(family).part
    assert not any("alpha" in name for name in stored)
    for name, tensor in trained.items():
        scale = 12 / 8 if "lora_B" in name else 1
        assert torch.equal(stored[f"{part}.{name}"], tensor * scale)
    with safe_open(path, "pt") as file:
        adapter = json.loads(file.metadata()[files.ADAPTER])
    assert adapter[f"{part}.r"] == adapter[f"{part}.lora_alpha"] == 8
    assert adapter[f"{part}.target_modules"] == sorted(adapter[f"{part}.target_modules"])


def test_metadata_says_what_the_file_is_and_nothing_of_when_or_where(tmp_path):
    path = tmp_path / "fox.safetensors"
    files.write(path, loras.lora("sdxl"), replace(loras.ABOUT, prediction="epsilon"))
    _, found = files.read(path)
    assert list(found) == sorted(found)
    expected = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.title": "fox",
        "modelspec.resolution": "64x64",
        "modelspec.prediction_type": "epsilon",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "8",
        "ss_network_alpha": "8",
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_steps": "20",
        "gguf_trainer.family": "sdxl",
        "gguf_trainer.base_sha256": "b" * 64,
        "gguf_trainer.dataset_sha256": "d" * 64,
        "gguf_trainer.steps": "20",
        "gguf_trainer.rank": "8",
        "gguf_trainer.alpha": "16.0",
        "gguf_trainer.trigger": "a photo of sks fox",
    }
    assert found.items() >= expected.items()
    assert str(tmp_path) not in str(found)
    assert not any(word in key for key in found for word in ("date", "time", "created"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_value_that_the_file_cannot_hold_writes_nothing(tmp_path, value):
    path = tmp_path / "fox.safetensors"
    weights = {name: tensor.clone() for name, tensor in loras.weights("flux").items()}
    name = "transformer_blocks.0.attn.to_k.lora_B.weight"
    weights[name][3, 2] = value
    with pytest.raises(TrainerError, match=name) as error:
        files.write(path, files.folded(weights, families.get("flux"), 16, torch.float16), loras.ABOUT)
    assert ("is beyond torch.float16" if value == 1e30 else "is not finite") in str(error.value)
    assert not list(tmp_path.iterdir())


def test_no_other_runs_file_is_overwritten(tmp_path):
    path, variant, gguf = (tmp_path / name for name in ("fox.safetensors", "variant.safetensors", "fox.gguf"))
    mine, theirs = loras.ABOUT, replace(loras.ABOUT, run="other")
    lora = loras.lora("z_image")

    def write(about):
        return (
            lambda: files.write(path, lora, about),
            lambda: files.write_variant(variant, lora, about),
            lambda: files.write_gguf(gguf, lora, about),
            lambda: files.write_sidecar(path, lora, about, [path]),
        )

    for _ in range(2):  # one's own may be
        for call in write(mine):
            call()
    before = {file: sha256(file) for file in tmp_path.iterdir()}
    for call in write(theirs):
        with pytest.raises(TrainerError, match="belongs to run fox, not to run other"):
            call()
    assert {file: sha256(file) for file in tmp_path.iterdir()} == before
    save_file({"a": torch.zeros(1)}, path)
    write_json(files.sidecar(path), {"family": "sdxl"})
    for call in write(mine)[0], write(mine)[3]:
        with pytest.raises(TrainerError, match="belongs to another program"):
            call()
    path.write_bytes(b"broken")
    write(mine)[0]()
    assert files.contents(path, families.get("z_image")).whole


def test_the_sidecar_says_the_family_and_the_steps_reached(tmp_path):
    path = tmp_path / "fox.safetensors"
    lora = loras.lora("qwen_image")
    about = replace(loras.ABOUT, dead=2)
    files.write(path, lora, about)
    files.write_sidecar(path, lora, about, [path])
    found = read_json(tmp_path / "fox.json")
    assert (found["family"], found["families"], found["steps"], found["planned_steps"]) == (
        "qwen_image",
        ["qwen_image"],
        20,
        500,
    )
    assert (found["lora_rank"], found["lora_alpha"], found["trained_alpha"]) == (8, 8, 16.0)
    assert (found["modules"], found["live_modules"], found["trigger_prompt"]) == (16, 14, "a photo of sks fox")
    assert found["files"] == [{"name": "fox.safetensors", "bytes": path.stat().st_size, "sha256": sha256(path)}]
    assert "created" not in str(found)


def test_all_files_of_a_lora_are_written_together_and_listed(tmp_path):
    out = tmp_path / "fox.safetensors"
    made = files.write_all(out, loras.lora("flux"), loras.ABOUT)
    assert [path.name for path in made] == ["fox.safetensors", "fox-comfyui.safetensors", "fox.gguf"]
    assert [it["name"] for it in read_json(tmp_path / "fox.json")["files"]] == [path.name for path in made]
    assert all(it["sha256"] == sha256(tmp_path / it["name"]) for it in read_json(tmp_path / "fox.json")["files"])


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "fox.safetensors"
    files.write(path, loras.lora("flux"), loras.ABOUT)
    path.write_bytes(path.read_bytes()[:1024])  # the size of what some trainers left
    with pytest.raises(TrainerError, match="not a whole safetensors file"):
        files.contents(path, families.get("flux"))


# --- names that other programs take ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", loras.FAMILIES)
def test_each_program_knows_every_key_of_the_files_for_it(tmp_path, family):
    its = families.get(family)
    lora, (modules, _) = loras.lora(family), COUNTS[family]
    plain, variant, gguf = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.gguf"))
    files.write(plain, lora, loras.ABOUT)
    files.write_variant(variant, lora, loras.ABOUT)
    files.write_gguf(gguf, lora, loras.ABOUT)
    keys = {plain: load_file(plain).keys(), variant: load_file(variant).keys(), gguf: export.read_arrays(gguf).keys()}
    for path, program, per_module in (
        (plain, "diffusers", 2),
        (plain, "ggk", 2),
        (variant, "ggk", 3),
        (variant, "comfyui", 3),
        (variant, "diffusers", 3),
        (gguf, "ggk", 3),
    ):
        found = names.check(keys[path], its, program)
        assert found.whole, (path, program, found)
        assert str(found) == f"{per_module * modules} of {per_module * modules}"
    assert not any(key.startswith("base_model.") for all_keys in keys.values() for key in all_keys)


def test_variants_are_named_as_programs_read_them(tmp_path):
    found = {}
    for family in loras.FAMILIES:
        files.write_variant(tmp_path / family, loras.lora(family), loras.ABOUT)
        found[family] = set(load_file(tmp_path / family))
    module = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_out_0"
    assert found["sdxl"] >= {f"{module}.lora_down.weight", f"{module}.lora_up.weight", f"{module}.alpha"}
    assert "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight" in found["flux"]
    assert "diffusion_model.transformer_blocks.1.attn.add_k_proj.lora_B.weight" in found["qwen_image"]
    assert "diffusion_model.noise_refiner.0.attention.to_v.lora_A.weight" in found["z_image"]


@pytest.mark.parametrize(
    ("family", "program", "key", "known"),
    [
        # as the engine takes them
        ("sdxl", "ggk", "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.lora_down.weight", True),
        ("sdxl", "ggk", "lora_unet_down_blocks_1_attentions_0_proj_in.lora_up.weight", True),
        ("sdxl", "ggk", "lycoris_unet_mid_block_attentions_0_transformer_blocks_3_ff_net_0_proj.alpha", True),
        ("sdxl", "ggk", "unet.up_blocks.0.attentions.1.transformer_blocks.9.attn2.to_out.0.lora_A.weight", True),
        ("sdxl", "ggk", "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight", False),
        ("sdxl", "ggk", "base_model.model.down_blocks.1.attentions.0.proj_in.lora_A.weight", False),
        ("sdxl", "ggk", "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight", False),
        ("flux", "ggk", "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", True),
        ("flux", "ggk", "lora_unet_single_blocks_37_linear1.lora_up.weight", True),
        ("flux", "ggk", "transformer_blocks.18.attn.add_q_proj.lora_B.weight", True),
        ("flux", "ggk", "diffusion_model.double_blocks.3.txt_mlp.2.lora_A.weight", True),
        ("flux", "ggk", "diffusion_model.transformer_blocks.3.attn.to_q.lora_A.weight", False),
        ("flux", "ggk", "double_blocks.3.txt_mlp.2.lora_A.weight", False),
        ("flux", "ggk", "lora_transformer_transformer_blocks_0_attn_to_q.lora_down.weight", False),
        ("flux", "diffusers", "lora_transformer_transformer_blocks_0_attn_to_q.lora_down.weight", True),
        ("flux", "diffusers", "diffusion_model.transformer_blocks.3.attn.to_q.lora_A.weight", False),
        ("qwen_image", "ggk", "transformer_blocks.59.attn.to_add_out.lora_A.weight", True),
        ("qwen_image", "ggk", "lora_unet_transformer_blocks_0_img_mlp_net_0_proj.lora_down.weight", True),
        ("qwen_image", "ggk", "base_model.model.transformer_blocks.0.attn.to_q.lora_A.weight", False),
        ("qwen_image", "diffusers", "lora_transformer_transformer_blocks_0_attn_to_q.lora_down.weight", False),
        ("z_image", "ggk", "diffusion_model.layers.0.attention.qkv.lora_A.weight", True),
        ("z_image", "ggk", "lora_unet_layers_0_attention_to_q.lora_down.weight", True),
        ("z_image", "ggk", "lora_unet_layers_0_feed_forward_w1.lora_down.weight", False),
        ("z_image", "ggk", "layers.0.attention.to_q.lora_A.weight", False),
        ("z_image", "comfyui", "transformer.layers.0.attention.to_q.lora_A.weight", False),
        ("z_image", "comfyui", "diffusion_model.layers.0.attention.to_q.lora_A.weight", True),
        ("z_image", "ggk", "diffusion_model.layers.0.attention.to_q.weight", False),
    ],
)
def test_the_checker_knows_what_each_program_knows(family, program, key, known):
    found = names.check([key], families.get(family), program)
    assert str(found) == f"{int(known)} of 1"
    assert found.unknown == (() if known else (key,))


def test_queries_keys_and_values_go_together_in_files_for_other_programs(tmp_path):
    family = families.get("z_image")
    weights = {name: tensor for name, tensor in loras.weights("z_image").items() if ".to_k." not in name}
    lora = files.folded(weights, family, 16, torch.float32)
    files.write(tmp_path / "plain", lora, loras.ABOUT)
    files.write_variant(tmp_path / "variant", lora, loras.ABOUT)
    files.write_gguf(tmp_path / "gguf", lora, loras.ABOUT)
    plain, variant = load_file(tmp_path / "plain"), load_file(tmp_path / "variant")
    found = names.check(plain, family, "ggk")
    assert str(found) == "24 of 24"
    assert not found.whole
    assert len(found.missing) == 4
    assert names.check(variant, family, "ggk").whole
    assert names.check(export.read_arrays(tmp_path / "gguf"), family, "ggk").whole
    added = variant["diffusion_model.layers.0.attention.to_k.lora_B.weight"]
    assert added.shape == (64, 8)
    assert not added.any()
    assert variant["diffusion_model.layers.0.attention.to_q.lora_B.weight"].any()
    # diffusers keeps them apart, and needs none of it.
    assert names.check(plain, family, "diffusers").whole


def test_a_layer_of_flux_that_lies_behind_the_attention_needs_it():
    needed = names.missing({"single_transformer_blocks.4.proj_mlp"}, families.get("flux"))
    assert sorted(needed) == [f"single_transformer_blocks.4.attn.to_{end}" for end in "kqv"]
    assert names.missing({"transformer_blocks.0.attn.to_k"}, families.get("qwen_image")) == {}


def test_the_gguf_holds_the_same_values_and_says_what_it_is(tmp_path):
    lora = loras.lora("z_image", dtype=torch.bfloat16)
    path: Path = tmp_path / "fox.gguf"
    files.write_gguf(path, lora, loras.ABOUT)
    arrays, keys = export.read_arrays(path), export.read_keys(path)
    for module, (a, b) in lora.modules.items():
        assert torch.equal(torch.from_numpy(arrays[f"transformer.{module}.lora_A.weight"]), a.float())
        assert torch.equal(torch.from_numpy(arrays[f"transformer.{module}.lora_B.weight"]), b.float())
        assert arrays[f"transformer.{module}.alpha"] == [8]
    assert keys["general.architecture"] == "z_image"
    assert keys["gguf_trainer.family"] == "z_image"
    assert keys["adapter.run"] == "fox"
    files.write_gguf(path, loras.lora("z_image", dtype=torch.float16), loras.ABOUT)
    assert {str(array.dtype) for name, array in export.read_arrays(path).items() if "lora" in name} == {"float16"}
