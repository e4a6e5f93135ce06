"""A base that cannot be trained is refused in a sentence, by its name or its small files, and no weight is opened."""

import json

import pytest
from trainer import config, finding, packs
from trainer.errors import TrainerError
from trainer.lora import bases, families
from trainer.packs.loras import _base

CLASSES = {"unet": "UNet2DConditionModel", "transformer": "ZImageTransformer2DModel"}


def write(folder, family="z_image", config=None, **index):
    """A pipeline's folder without weights that could be read."""
    about = families.get(family)
    index = {"_class_name": about.pipeline, "vae": ["diffusers", "AutoencoderKL"]} | index
    files = {"model_index.json": index, f"{about.part}/config.json": config or {}, "vae/config.json": {}}
    files |= {f"{it}/config.json": {} for it in about.text_encoders} | {
        "scheduler/scheduler_config.json": {"shift": 6.0}
    }
    files |= {f"{it.replace('text_encoder', 'tokenizer')}/{name}": {} for it in about.text_encoders
              for name in ("tokenizer_config.json", "tokenizer.json")}  # fmt: skip
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    for name in (f"{about.part}/diffusion_pytorch_model", "vae/diffusion_pytorch_model",
                 *(f"{it}/model" for it in about.text_encoders)):  # fmt: skip
        (folder / f"{name}.safetensors").write_bytes(b"not to be opened")
    return folder


def refused(call, *args):
    with pytest.raises(TrainerError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def of_name(base, family="sdxl", precision="auto", trusted=()):
    return refused(bases.refuse_name, base, families.get(family), precision, trusted)


@pytest.mark.parametrize("family", families.names())
def test_a_family_is_told_by_its_class_whatever_the_folder_is_called(tmp_path, family):
    folder = write(tmp_path / "flux-or-sdxl-gguf", family)
    assert bases.family_of(folder) is families.get(family)
    bases.check(folder, families.get(family), "auto")
    bases.refuse_name(str(folder), families.get(family), "auto")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("my-sdxl-merge", "sdxl"),
        ("stable-diffusion-xl-base-1.0", "sdxl"),
        ("FLUX.1-dev", "flux"),
        ("Qwen-Image-2512", "qwen_image"),
        ("Z-Image-Turbo", "z_image"),
        ("dreams", None),
    ],
)
def test_a_name_counts_only_where_there_is_no_class(tmp_path, name, family):
    (tmp_path / name).mkdir()
    found = bases.family_of(tmp_path / name)
    assert found is (families.get(family) if family else None)


def test_a_base_of_another_family_is_refused(tmp_path):
    folder = write(tmp_path / "mine", "flux")
    assert "is FLUX.1, and this pack trains SDXL" in refused(bases.check, folder, families.get("sdxl"), "auto")
    assert "is FLUX.1 by its name" in of_name("black-forest-labs/FLUX.1-dev")
    other = write(tmp_path / "other", "sdxl", _class_name="StableDiffusion3Pipeline")
    told = refused(bases.check, other, families.get("sdxl"), "auto")
    assert "is a StableDiffusion3Pipeline, which cannot be trained here; trainable are SDXL" in told


@pytest.mark.parametrize(
    "base", ["me/flux.gguf", "/models/z-image-q4_0.GGUF", "city96/FLUX.1-dev-gguf", "/gguf/none-gguf"]
)
def test_gguf_is_no_base_and_what_is_trainable_is_told(base):
    told = of_name(base)
    assert "is a GGUF model" in told
    assert all(families.get(name).title in told for name in families.names())


@pytest.mark.parametrize(
    "word",
    ["sd3-medium", "stable-diffusion-3.5", "PixArt-Sigma", "Sana", "Lumina-2", "CogView4", "Hunyuan-DiT", "HunyuanDiT"],
)
def test_families_that_only_run_are_refused_by_name(word):
    assert "cannot be trained here" in of_name(f"unsloth/{word}")


def test_a_word_within_another_is_no_other_family():
    bases.refuse_name("oksana/sdxl-illumination", families.get("sdxl"), "auto", ["oksana/*"])


def test_only_trusted_repositories_are_downloaded_and_the_settings_may_add_some():
    assert "add it to lora.trusted" in of_name("somebody/sdxl")
    bases.refuse_name("somebody/sdxl", families.get("sdxl"), "auto", ["somebody/*"])
    bases.refuse_name("unsloth/sdxl", families.get("sdxl"), "auto")
    for name in families.names():
        bases.refuse_name(families.get(name).repository, families.get(name), "auto")


def test_numbers_that_a_family_cannot_have_are_refused():
    for name in families.names():
        family = families.get(name)
        if name in ("qwen_image", "z_image"):
            assert "needs bf16" in refused(bases.refuse_name, family.repository, family, "f16")
        else:
            bases.refuse_name(family.repository, family, "f16")


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16", "auto", "nf4"])
def test_a_base_of_4_bits_is_for_no_dense_precision(tmp_path, precision):
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    folder, flux = write(tmp_path / "dense", "flux", config=quantized), families.get("flux")
    assert bases.is_four_bits(folder, flux)
    if precision in ("auto", "nf4"):
        bases.check(folder, flux, precision)
        bases.refuse_name("unsloth/FLUX.1-dev-bnb-4bit", flux, precision)
    else:
        assert "stored in 4 bits" in refused(bases.check, folder, flux, precision)
        assert "stored in 4 bits" in of_name("unsloth/FLUX.1-dev-bnb-4bit", "flux", precision)


def test_what_the_config_says_counts_over_the_name(tmp_path):
    folder = write(tmp_path / "flux-nf4", "flux")
    bases.refuse_name(str(folder), families.get("flux"), "bf16")
    bases.check(folder, families.get("flux"), "bf16")
    other = write(tmp_path / "fp8", "flux", config={"quantization_config": {"quant_method": "fp8"}})
    assert "is quantized (fp8)" in refused(bases.check, other, families.get("flux"), "auto")


def test_pickled_weights_are_refused_and_never_opened(tmp_path):
    folder = write(tmp_path / "base")
    (folder / "text_encoder" / "model.safetensors").rename(folder / "text_encoder" / "pytorch_model.bin")
    told = refused(bases.check, folder, families.get("z_image"), "auto")
    assert "text_encoder/pytorch_model.bin" in told
    assert "never read" in told


@pytest.mark.parametrize(
    "index",
    [
        {"_class_name": ["pipeline", "MyPipeline"]},
        {"transformer": ["my_module", "MyTransformer"]},
        {"auto_map": {"AutoModel": "x.Y"}},
    ],
)
def test_code_of_a_base_is_never_run(tmp_path, index):
    told = refused(bases.check, write(tmp_path / "base", **index), families.get("z_image"), "auto")
    assert "code of its own, which is never run" in told


def test_code_of_a_part_is_never_run(tmp_path):
    folder = write(tmp_path / "base", config={"auto_map": {"AutoModel": "x.Y"}})
    assert "transformer/config.json asks for code" in refused(bases.check, folder, families.get("z_image"), "auto")


def test_gated_repositories_need_a_token_and_copies_of_them_do_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for token in (None, "", "  "):
        assert "is gated: accept its license" in refused(bases.refuse_gated, "black-forest-labs/FLUX.1-dev", token)
    bases.refuse_gated("black-forest-labs/FLUX.1-dev", "hf_x")
    bases.refuse_gated("stabilityai/stable-diffusion-xl-base-1.0", None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    made = config.load({"pack": "flux_lora"})
    assert "is gated" in refused(finding.prepare, made, "base")
    bases.refuse_name(str(write(tmp_path / "FLUX.1-dev", "flux")), families.get("flux"), "auto")


def test_a_distilled_base_is_warned_of(tmp_path):
    z_image = families.get("z_image")
    assert "is distilled to a few steps" in bases.warnings("Tongyi-MAI/Z-Image-Turbo", z_image)[0]
    assert bases.warnings("Tongyi-MAI/Z-Image", z_image) == []
    folder = write(tmp_path / "mine")
    assert bases.warnings(str(folder), z_image) == []
    (folder / "scheduler" / "scheduler_config.json").write_text('{"shift": 3.0}')
    assert len(bases.warnings(str(folder), z_image)) == 1
    assert (
        len(config.warnings(config.load({"pack": "z_image_lora", "lora": {"base": "Tongyi-MAI/Z-Image-Turbo"}}))) == 1
    )
    assert config.warnings(config.load({"pack": "demo"})) == []


@pytest.mark.parametrize(
    ("capability", "free", "four_bits", "becomes"),
    [
        (None, 0, False, "f32"),
        ((8, 0), 40, False, "bf16"),
        ((7, 5), 40, False, "f16"),
        ((8, 9), 20, False, "nf4"),
        ((8, 9), 40, True, "nf4"),
    ],
)
def test_automatic_precision_follows_the_machine(capability, free, four_bits, becomes):
    flux = families.get("flux")
    assert bases.precision("auto", flux, capability, four_bits, free, 24) == becomes
    assert bases.precision("nf4", flux, capability, four_bits, free, 24) == "nf4"


def test_a_family_that_overflows_in_f16_is_never_kept_in_it():
    for name in families.names():
        found = bases.precision("auto", families.get(name), (7, 5), False, 40, 24)
        assert found == ("nf4" if families.get(name).bf16_only else "f16")


def test_bf16_that_a_gpu_only_emulates_is_refused():
    flux = families.get("flux")
    assert "compute capability 8.0" in refused(bases.precision, "bf16", flux, (7, 5), False, 40, 24)
    assert bases.precision("bf16", flux, (8, 0), False, 1, 24) == "bf16"


def test_settings_and_the_material_job_refuse_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(pack, **lora):
        return config.load({"pack": pack, "lora": lora})

    assert "GGUF" in refused(lambda: load("flux_lora", base="city96/FLUX.1-dev-gguf"))
    assert "trusted" in refused(lambda: load("sdxl_lora", base="somebody/thing"))
    assert "needs bf16" in refused(lambda: load("qwen_image_lora", base_precision="f16"))
    write(tmp_path / "mine", "flux")
    told = refused(finding.prepare, load("sdxl_lora", base="./mine"), "base")
    assert "materials.paths.base cannot be used" in told
    assert "is FLUX.1, and this pack trains SDXL" in told


@pytest.mark.parametrize("family", families.names())
def test_the_materials_patterns_cover_a_pipelines_folder(tmp_path, family):
    from trainer.completeness import folder_files

    base = _base(families.get(family))
    assert len(folder_files(write(tmp_path / "base", family), base.patterns, base.optional)) > 8
    assert packs.get(f"{family}_lora").materials == (base,)
