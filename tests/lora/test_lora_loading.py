"""A LoRA file goes on a pipeline of its family whole, at the strength it was trained at, or not at all."""

from dataclasses import replace
from itertools import permutations

import loras
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer.errors import TrainerError
from trainer.lora import families, files, loading

PAIRS = list(permutations(loras.FAMILIES, 2))


def picture(family, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return loras.pipeline(family)(**loras.arguments(family), generator=generator, output_type="np").images[0]


def with_weights(family, alpha):
    """The picture with weights on the network as they were trained, and without them."""
    plain = picture(family)
    loading.attach(loras.network(family), loras.weights(family, alpha), alpha)
    try:
        return picture(family), plain
    finally:
        loras.pipeline(family).unload_lora_weights()


def with_file(family, path, load=loading.load):
    load(loras.pipeline(family), path)
    try:
        return picture(family)
    finally:
        loras.pipeline(family).unload_lora_weights()


def without_metadata(path):
    save_file(load_file(path), path)


def with_diffusers_alone(pipeline, path):
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file of each family, for diffusers."""
    folder = tmp_path_factory.mktemp("written")
    for family in loras.FAMILIES:
        files.write(folder / f"{family}.safetensors", loras.lora(family), loras.ABOUT)
    return folder


@pytest.mark.parametrize("alpha", [16.0, 12.0])
@pytest.mark.parametrize("family", loras.FAMILIES)
def test_files_apply_what_was_trained(tmp_path, family, alpha):
    expected, plain = with_weights(family, alpha)
    assert np.abs(expected - plain).mean() > 1 / 255
    path = tmp_path / "fox.safetensors"
    limits = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
    for dtype, limit in limits.items():
        files.write(path, loras.lora(family, alpha, dtype), loras.ABOUT)
        assert np.abs(with_file(family, path) - expected).max() <= limit, dtype
    files.write(path, loras.lora(family, alpha), loras.ABOUT)
    without_metadata(path)
    assert np.abs(with_file(family, path) - expected).max() <= (0 if alpha == 16 else 5e-6)
    assert np.abs(with_file(family, path, with_diffusers_alone) - expected).max() <= 1e-5
    variant = tmp_path / "variant.safetensors"
    files.write_variant(variant, loras.lora(family, alpha), loras.ABOUT)
    assert np.abs(with_file(family, variant, with_diffusers_alone) - expected).max() <= 1e-5


@pytest.mark.parametrize("family", loras.FAMILIES)
def test_diffusers_own_file_without_metadata_would_be_at_another_strength(tmp_path, family):
    # What the tests above would be blind to if alpha made no difference.
    expected, _ = with_weights(family, 16.0)
    part = families.get(family).part
    path = tmp_path / "theirs.safetensors"
    save_file({f"{part}.{name}": tensor for name, tensor in loras.weights(family).items()}, path)
    assert np.abs(with_file(family, path, with_diffusers_alone) - expected).max() > 1e-3


@pytest.mark.parametrize(("family", "other"), PAIRS)
def test_a_lora_of_another_family_is_refused(written, tmp_path, family, other):
    pipeline = loras.pipeline(family)
    theirs, ours = families.get(other).title, families.get(family).title
    with pytest.raises(TrainerError, match=f"is a LoRA of {theirs}, not of {ours}"):
        loading.load(pipeline, written / f"{other}.safetensors")
    path = tmp_path / "nameless.safetensors"
    save_file(load_file(written / f"{other}.safetensors"), path)
    with pytest.raises(TrainerError, match="has no family in its metadata and has"):
        loading.load(pipeline, path)
    assert not getattr(loras.network(family), "peft_config", None)


def test_diffusers_would_take_it_without_a_word(written):
    pipeline = loras.pipeline("flux")
    with_diffusers_alone(pipeline, written / "qwen_image.safetensors")
    try:
        assert loras.network("flux").peft_config
    finally:
        pipeline.unload_lora_weights()


def test_it_says_whose_the_keys_are(written, tmp_path):
    path = tmp_path / "nameless.safetensors"
    save_file(load_file(written / "z_image.safetensors"), path)
    with pytest.raises(TrainerError, match=r"all its keys are Z-Image's"):
        loading.load(loras.pipeline("sdxl"), path)


@pytest.mark.parametrize("family", loras.FAMILIES)
def test_every_module_takes_it(written, family):
    pipeline = loras.pipeline(family)
    other = next(it for it in loras.FAMILIES if it != family)
    try:
        modules = loading.load(pipeline, written / f"{family}.safetensors")
        assert modules == sorted(loras.lora(family).modules)
        with pytest.raises(TrainerError, match="is a LoRA of"):  # no other family's goes on beside it
            loading.load(pipeline, written / f"{other}.safetensors", name="another")
        loading.load(pipeline, written / f"{family}.safetensors", name="another")
    finally:
        pipeline.unload_lora_weights()


def test_a_lora_of_a_larger_model_is_refused(tmp_path):
    path = tmp_path / "large.safetensors"
    lora = loras.lora("z_image")
    wide = {name: (torch.zeros(8, 3840), torch.ones(3840, 8)) for name in lora.modules}
    files.write(path, replace(lora, modules=wide), loras.ABOUT)
    with pytest.raises(TrainerError, match="for a module of 64 x 64"):
        loading.load(loras.pipeline("z_image"), path)
    deep = {"layers.29.attention.to_q": (torch.zeros(8, 64), torch.ones(64, 8))}
    files.write(path, replace(lora, modules=deep), loras.ABOUT)
    with pytest.raises(TrainerError, match=r"layers\.29\.attention\.to_q\.lora_[AB]\.weight, of no module of Z-Image"):
        loading.load(loras.pipeline("z_image"), path)


def test_what_diffusers_drops_is_seen(written, monkeypatch):
    pipeline = loras.pipeline("z_image")
    whole = type(pipeline).load_lora_weights

    def careless(self, folder, weight_name, adapter_name):
        state = load_file(f"{folder}/{weight_name}")
        kept = {name: tensor for name, tensor in state.items() if ".layers.1." not in name}
        whole(self, kept, adapter_name=adapter_name)

    monkeypatch.setattr(type(pipeline), "load_lora_weights", careless)
    with pytest.raises(TrainerError, match=r"on 4 of 16 modules .* layers\.1\.attention\.to_k"):
        loading.load(pipeline, written / "z_image.safetensors")
    assert not getattr(loras.network("z_image"), "peft_config", None)


def test_a_strength_other_than_full_is_seen(written, monkeypatch):
    pipeline = loras.pipeline("z_image")
    whole = type(pipeline).load_lora_weights

    def weak(self, folder, weight_name, adapter_name):
        whole(self, folder, weight_name=weight_name, adapter_name=adapter_name)
        for layer in self.transformer.modules():
            if adapter_name in getattr(layer, "scaling", {}):
                layer.scaling[adapter_name] = 0.5

    monkeypatch.setattr(type(pipeline), "load_lora_weights", weak)
    with pytest.raises(TrainerError, match="on 16 of 16 modules as it is"):
        loading.load(pipeline, written / "z_image.safetensors")
