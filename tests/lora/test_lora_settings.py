"""Settings of LoRA packs: what others give is coerced or refused in a sentence, and is for the packs it is for."""

import json
import math

import pytest
import yaml
from PIL import Image
from trainer import aliases, config, doctor, estimates, materials, packs
from trainer.errors import TrainerError
from trainer.estimates import Machine
from trainer.packs.base import LoraPack
from workflow import CHECKOUT

LORAS = [name for name in packs.names() if isinstance(packs.get(name), LoraPack)]


def load(pack="sdxl_lora", **groups):
    return config.load({"pack": pack, **groups})


def refusal(**given):
    with pytest.raises(TrainerError) as caught:
        load(**given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def pictures(tmp_path):
    """A folder of so many pictures, with captions."""

    def write(count):
        folder = tmp_path / "pictures"
        folder.mkdir(exist_ok=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:04d}.png")
            (folder / f"{number:04d}.txt").write_text("a thing")
        return str(folder)

    return write


@pytest.mark.parametrize(
    ("group", "key", "given", "becomes"),
    [
        ("train", "lr", "1e-4", 1e-4),
        ("train", "steps", "500", 500),
        ("lora", "rank", "8", 8),
        ("lora", "alpha", "", 16.0),
        ("lora", "alpha", "null", 16.0),
        ("lora", "base", "  ", None),
        ("lora", "flow_shift", "none", None),
        ("lora", "snr_gamma", "", 5.0),
        ("lora", "snr_gamma", 0, 0.0),
        *(("lora", "checkpointing", word, False) for word in ("none", "false", "0", "no", "off", "", False)),
        *(("lora", "checkpointing", word, True) for word in ("true", "unsloth", "1", "on", True)),
        ("pictures", "caption_column", "", "text"),
        ("pictures", "caption_column", None, "text"),
        ("pictures", "instance_prompt", " ", None),
        ("train", "grad_clip", 0, 0.0),
        ("train", "grad_clip", -1, 0.0),
        ("publish", "repository", "", None),
        ("precompute", "device", "", "auto"),
    ],
)
def test_strings_and_blanks_are_coerced(group, key, given, becomes):
    assert getattr(getattr(load(**{group: {key: given}}), group), key) == becomes


@pytest.mark.parametrize("value", ["nan", "inf", "1e309", "-inf", 1e309, math.nan])
@pytest.mark.parametrize(
    ("group", "key"),
    [
        ("train", "lr"),
        ("train", "weight_decay"),
        ("lora", "alpha"),
        ("lora", "dropout"),
        ("lora", "flow_shift"),
        ("lora", "guidance"),
        ("lora", "ema"),
        ("pictures", "regularization_weight"),
    ],
)
def test_what_is_no_finite_number_is_refused(group, key, value):
    assert f"`{group}.{key}`" in refusal(pack="flux_lora", **{group: {key: value}})


@pytest.mark.parametrize(
    ("group", "key", "values"),
    [
        ("train", "steps", (0, -1)),
        ("train", "batch_size", (0,)),
        ("train", "lr", (0, -1e-4, 2)),
        ("train", "seed", (-1, 2**63)),
        ("lora", "rank", (0, -4)),
        ("lora", "alpha", (0, -16)),
        ("lora", "dropout", (-0.1, 1)),
        ("lora", "ema", (-0.1, 1)),
        ("lora", "snr_gamma", (-5,)),
        ("lora", "text_dropout", (-0.1, 1.1)),
        ("lora", "checkpointing", ("perhaps", None)),
        ("lora", "optimizer", ("sgd",)),
        ("pictures", "resolution", (0, 32, 500, 520)),
        ("pictures", "variants", (0, 17)),
        ("pictures", "holdout", (-0.1, 1)),
        ("evaluate", "seeds", ([],)),
    ],
)
def test_what_is_out_of_range_is_refused_by_its_name(group, key, values):
    for value in values:
        assert f"`{group}.{key}" in refusal(**{group: {key: value}})


@pytest.mark.parametrize("value", [0, -1, "0", "fast", True])
def test_a_flow_shift_is_a_number_above_0_or_auto(value):
    assert "above 0, auto or null" in refusal(pack="flux_lora", lora={"flow_shift": value})
    assert load("flux_lora", lora={"flow_shift": "3"}).lora.flow_shift == 3.0
    assert load("flux_lora").lora.flow_shift == "auto"


@pytest.mark.parametrize(
    ("pack", "lora", "said"),
    [
        ("flux_lora", {"snr_gamma": 5}, "FLUX.1 has no such weights"),
        ("sdxl_lora", {"flow_shift": "auto"}, "SDXL has no such schedule"),
        ("z_image_lora", {"guidance": 3.5}, "Z-Image is not told any"),
    ],
)
def test_what_a_family_does_not_have_is_refused(pack, lora, said):
    assert said in refusal(pack=pack, lora=lora)


def test_a_learning_rate_of_1_is_for_the_optimizer_that_finds_its_own():
    assert load(train={"lr": 1}, lora={"optimizer": "prodigy"}).train.lr == 1
    assert "prodigy" in refusal(train={"lr": 1})


def test_unknown_keys_are_refused_with_the_nearest_one_or_what_there_is_instead():
    assert "did you mean `lora.rank`?" in refusal(lora={"rnak": 4})
    assert "did you mean `pictures.resolution`?" in refusal(pictures={"resolutoin": 512})
    assert "train.decay_fraction" in refusal(train={"lr_scheduler_type": "cosine"})
    assert "set train.steps" in refusal(num_train_epochs=3)
    assert "HF_TOKEN" in refusal(hf_token="secret")
    assert "secret" not in refusal(hf_token="secret")


@pytest.mark.parametrize("pack", LORAS)
def test_defaults_are_the_familys(pack):
    shipped = yaml.safe_load((CHECKOUT / "packs" / pack / "pack.yaml").read_text())
    made = config.load(shipped)
    assert made.lora.alpha == made.lora.rank
    if pack != "lora_demo":
        expected = {
            "sdxl": (1024, 5.0, 0.05),
            "flux": (512, 0, 0),
            "qwen_image": (512, 0, 0.05),
            "z_image": (768, 0, 0),
        }
        given = made.pictures.resolution, made.lora.snr_gamma, made.lora.text_dropout
        assert given == expected[packs.get(pack).family]
        assert (made.train.steps, made.train.warmup, made.train.decay_fraction) == (500, 20, 0)
        assert made.train.lr == (5e-5 if pack == "qwen_image_lora" else 1e-4)
    assert made.exports[0].endswith(f"{made.export.name}.safetensors")
    assert len(set(made.exports)) == 4


# Of which packs a setting is


@pytest.mark.parametrize(
    ("pack", "group", "key", "value", "said"),
    [
        ("sdxl_lora", "corpus", "n_train", 5, "trains no adapter"),
        ("sdxl_lora", "corpus", "image_folders", ["x"], "trains no adapter"),
        ("sdxl_lora", "adapter", "width", 64, "trains no adapter"),
        ("sdxl_lora", "train", "cos_weight", 1, "trains no adapter"),
        ("sdxl_lora", "precompute", "teacher", "synthetic", "trains no adapter"),
        ("sdxl_lora", "export", "companion", False, "trains no adapter"),
        ("demo", "lora", "rank", 4, "trains no LoRA"),
        ("demo", "pictures", "flip", True, "trains no LoRA"),
        ("mageflow", "evaluate", "seeds", [3], "trains no LoRA"),
    ],
)
def test_settings_of_another_kind_are_refused(pack, group, key, value, said):
    shipped = yaml.safe_load((CHECKOUT / "packs" / pack / "pack.yaml").read_text())
    told = refusal(**shipped | {group: shipped.get(group, {}) | {key: value}})
    assert told == f"the pack {pack} {said}; leave the setting `{group}.{key}` out"


def stages(settings):
    return config.stage_settings(settings)


def test_nothing_of_a_lora_depends_on_settings_of_adapters_nor_the_other_way(tmp_path, pictures):
    base = {"runs_dir": str(tmp_path)}
    lora = json.dumps(stages(load(**base, pictures={"folder": pictures(3)})) | {"run": None})
    adapter = json.dumps(stages(config.load(base)) | {"run": None})
    for word in ("cos_weight", "n_train", "student_dim", "storage", "recipe", 'companion": true'):
        assert word not in lora
    for word in ("rank", "resolution", "checkpointing", "seeds", "bf16_only"):
        assert word not in adapter
    assert "seed_table" not in json.loads(lora)


@pytest.mark.parametrize(
    ("group", "changes", "stale"),
    [
        ("train", {"steps": 7}, {"plan"}),
        ("train", {"lr": 3e-4}, {"train"}),
        ("lora", {"rank": 4}, {"train"}),
        ("lora", {"offload": True, "checkpointing": False, "trusted": ["me/x"]}, set()),
        ("pictures", {"flip": True}, {"corpus", "precompute"}),
        ("pictures", {"resolution": 512}, {"corpus"}),  # whose rows the shards are made from
        ("precompute", {"teacher_dtype": "f32"}, {"precompute"}),
        ("evaluate", {"seeds": [4]}, {"evaluate"}),
        ("export", {"dtype": "f32"}, {"export"}),
        ("lora", {"base": "unsloth/sdxl-copy"}, {"materials"}),
    ],
)
def test_a_change_makes_its_own_stage_stale_and_no_other(tmp_path, pictures, group, changes, stale):
    given = {"runs_dir": str(tmp_path), "pictures": {"folder": pictures(3)}}
    before, after = stages(load(**given)), stages(load(**given | {group: given.get(group, {}) | changes}))
    assert {name for name in before if before[name] != after[name]} - {"run"} == stale


def test_pictures_have_to_be_given_and_to_be_there():
    with pytest.raises(TrainerError, match=r"set pictures\.folder to their folder"):
        stages(load())
    with pytest.raises(TrainerError, match=r"nowhere does not exist; correct its path in pictures\.folder"):
        stages(load(pictures={"folder": "nowhere"}))


def test_the_number_of_blocks_seldom_changes_when_pictures_come(pictures):
    given = {"precompute": {"shard_size": 4, "block_shards": 2}}
    blocks = []
    for count in range(1, 41, 3):
        made = load(**given, pictures={"folder": pictures(count), "holdout": 0.1})
        assert made.blocks("train") * 8 >= count
        assert made.samples("val") == (count if count < 10 else math.ceil(count / 10))
        blocks.append(made.blocks("train"))
    assert set(blocks) == {1, 2, 4, 8}


# Names that other trainers use


@pytest.mark.parametrize("group", ["", "train", "lora"])
def test_names_of_other_trainers_are_understood_with_a_word(group):
    given = {"max_steps": 12, "learning_rate": 2e-4, "lora_r": 4, "lora_alpha": 8, "model_name": "unsloth/sdxl"}
    settings, words = aliases.understood({group: given} if group else given)
    assert settings["train"] == {"steps": 12, "lr": 2e-4}
    assert settings["lora"] == {"rank": 4, "alpha": 8, "base": "unsloth/sdxl"}
    assert f"`{group + '.' if group else ''}max_steps` is taken as `train.steps`" in words
    assert len(words) == 5


def test_a_settings_own_name_counts_over_an_alias_in_the_same_file():
    settings, words = aliases.understood({"max_steps": 12, "train": {"steps": 7}})
    assert settings == {"train": {"steps": 7}}
    assert words == ["`max_steps` is left aside for `train.steps`"]
    with pytest.raises(TrainerError, match=r"`max_steps` and `train_steps` both mean the setting `train\.steps`"):
        aliases.understood({"max_steps": 12, "train_steps": 12})


def test_a_later_file_wins_under_whatever_name(tmp_path):
    pack, own = tmp_path / "pack.yaml", tmp_path / "own.yaml"
    pack.write_text("pack: sdxl_lora\ntrain: {steps: 500, lr: 1e-4}")
    own.write_text("max_steps: 90\nlora: {r: 4}\n")
    merged, words = config.merged([pack, own], {"random_seed": "3"})
    made = config.load(merged)
    assert (made.train.steps, made.train.lr, made.train.seed, made.lora.rank) == (90, 1e-4, 3, 4)
    assert len(words) == 3
    assert config.read_steps([str(pack), str(own)], {}, 7) == 90  # also while training runs
    assert config.read_steps([str(pack), str(own)], {"max_train_steps": 40}, 7) == 40


def test_every_alias_means_a_setting_that_there_is():
    for name in set(aliases.ALIASES.values()):
        group, key = name.split(".")
        assert key in type(getattr(load(), group)).model_fields
    assert "pictures.seed" not in aliases.ALIASES.values()
    assert aliases.understood({"pictures": {"seed": 3}}) == ({"pictures": {"seed": 3}}, [])


# Materials and estimates


def test_another_base_is_another_material():
    assert materials.get(load("z_image_lora"), "base").repository == "Tongyi-MAI/Z-Image"
    other = materials.get(load("z_image_lora", lora={"base": "unsloth/Z-Image"}), "base")
    assert (other.repository, other.revision) == ("unsloth/Z-Image", "main")
    assert load("z_image_lora", lora={"base": "/models/mine"}).materials.paths == {"base": "/models/mine"}
    assert "two places" in refusal(lora={"base": "/a"}, materials={"paths": {"base": "/b"}})


@pytest.mark.parametrize("pack", LORAS)
def test_a_base_is_the_files_of_diffusers_and_no_others(pack):
    from trainer.completeness import matching

    base = next(it for it in packs.get(pack).materials if it.role == "base")
    part = "unet" if pack == "sdxl_lora" else "transformer"
    wanted = ["model_index.json", f"{part}/diffusion_pytorch_model-00001-of-00003.safetensors", "vae/config.json"]
    wanted += ["text_encoder/model.safetensors", "tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"]
    others = [
        f"{part}/diffusion_pytorch_model.fp16.safetensors",
        f"{part}/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        f"{part}/diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
        *("text_encoder/model.fp16.safetensors", "text_encoder/pytorch_model.bin", "vae_1_0/config.json"),
        *("flux1-dev.safetensors", "ae.safetensors", "sd_xl_base_1.0.safetensors", "README.md", "tokenizer/code.py"),
        *("unet/openvino_model.xml", "text_encoder/model.onnx"),
    ]
    assert matching(wanted + others, base.patterns + base.optional) == wanted


@pytest.mark.parametrize("pack", LORAS)
def test_estimates_grow_with_what_is_asked_for(pack, pictures):
    given = {"pictures": {"folder": pictures(3)}} if pack != "lora_demo" else {}

    def made(**groups):
        return estimates.estimate(load(pack, **given | groups), Machine("any", 1, 1))

    plain = made()
    assert plain.training.step > plain.training.least > 0
    assert made(lora={"rank": 64}).stages["export"] == pytest.approx(4 * plain.stages["export"])
    assert made(lora={"offload": True}).training.gpu < plain.training.gpu
    assert made(lora={"base_precision": "nf4"}).training.gpu < plain.training.gpu
    assert made(train={"steps": 40000}).training_hours > plain.training_hours
    if pack == "flux_lora":
        assert plain.stages["export"] == pytest.approx(0.0523, rel=0.01)  # rank 16 in bf16
        assert 25 < made(train={"batch_size": 1}).training.gpu < 32


def test_the_doctor_counts_pictures_and_tells_what_a_gated_base_takes(tmp_path, pictures, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    given = {"runs_dir": str(tmp_path), "train": {"device": "cpu"}, "precompute": {"device": "cpu"}}
    made = load("flux_lora", **given, pictures={"folder": pictures(3)})
    config.write_stage_settings(made)
    told = {check.text: check.level for check in doctor.checks(made, 1 << 40)}
    assert any("is gated: accept its license" in text for text, level in told.items() if level == "PROBLEM")
    assert any(
        "3 pictures in" in text and "0 without a caption" in text for text, level in told.items() if level == "ok"
    )
    assert any(text.startswith("disk: ") and "for 3 pictures" in text for text in told)
    assert any(text.startswith("time left: precompute") for text in told)
    (tmp_path / "pictures" / "0001.txt").unlink()
    told = {check.text: check.level for check in doctor.checks(made, 1 << 40)}
    assert any("1 without a caption" in text for text, level in told.items() if level == "PROBLEM")
