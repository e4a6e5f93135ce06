"""A LoRA changes pictures as its weights do, and nothing else does; faults that are put in are found by number."""

from dataclasses import replace

import loras
import numpy as np
import pytest
import torch
from PIL import Image
from trainer.files import sha256
from trainer.lora import evaluation, families, files, ladder, models
from trainer.lora.evaluation import Shot

every_family = pytest.mark.parametrize("family", loras.FAMILIES)
SHOTS = [Shot(loras.CAPTION, 0), Shot(loras.CAPTION, 1), Shot("a house", 0, learnt=False)]


def options(family):
    asked = loras.arguments(family)
    del asked["prompt"]
    return asked


def expected(family, dtype=torch.float32):
    its = families.get(family)
    return evaluation.expected(its, loras.network(family), loras.lora(family).modules, loras.RANK, dtype)


def compared(family, path, weights=None, shots=SHOTS[:1], alpha=16.0):
    weights = loras.weights(family, alpha) if weights is None else weights
    return evaluation.compare(loras.pipeline(family), path, weights, alpha, shots, options(family))


def failed(rung):
    return [row.name for row in rung.rows if not row.passed]


@pytest.fixture
def written(tmp_path):
    def write(family, lora=None, **changes):
        path = tmp_path / f"{family}.safetensors"
        files.write(path, lora or loras.lora(family, **changes), loras.ABOUT)
        return path

    return write


@pytest.fixture(scope="module", params=loras.FAMILIES)
def evaluated(request, tmp_path_factory):
    """A whole evaluation: family, file, folder of pictures, content, rungs."""
    family, folder = request.param, tmp_path_factory.mktemp("evaluated")
    its, path = families.get(family), folder / "fox.safetensors"
    files.write(path, loras.lora(family), loras.ABOUT)
    early = folder / "fox-step1.safetensors"
    step_1 = files.folded(loras.trained(family).weights[1], its, 16.0, torch.float32)
    files.write(early, step_1, replace(loras.ABOUT, steps=1))
    content, rungs = evaluation.evaluate(
        loras.pipeline(family),
        path,
        loras.weights(family),
        16.0,
        SHOTS,
        options(family),
        expected(family),
        folder / "eval",
        kept=[(1, early)],
    )
    return family, path, folder / "eval", content, rungs


def test_a_trained_lora_passes_and_an_inert_one_is_the_base_bit_by_bit(evaluated):
    family, _, _, content, rungs = evaluated
    assert [rung.name for rung in rungs] == ["inert", "compare", "weights"]
    inert, pictures, weights = (failed(rung) for rung in rungs)
    assert inert == weights == []
    assert set(pictures) <= {"other prompts", "shift"}  # after 20 steps, which may be too few
    inert, *_ = rungs
    assert {row.name: row.value for row in inert.rows} == dict.fromkeys(
        ("untrained", "at weight 0", "disabled", "unloaded"), 0
    )
    assert content["floor"] == 0
    assert content["reload"] == 0  # the alpha is a power of two times the rank
    assert content["shift"] > 2 / 255
    assert content["modules"]["live"] == content["modules"]["expected_live"]
    assert not getattr(loras.network(family), "peft_config", None)


def test_its_pictures_are_there_from_the_first_step_to_the_last(evaluated):
    _, _, folder, content, _ = evaluated
    assert content["columns"] == ["base", "step 1", "step 20"]
    assert {path.name for path in folder.iterdir()} == {"grid.png"} | {
        f"{kind}-{number}.png" for kind in ("base", "lora", "diff") for number in range(3)
    }
    with Image.open(folder / "grid.png") as sheet:
        assert sheet.size == (3 * 64, 18 + 3 * (18 + 64))
        sheet = np.asarray(sheet.convert("RGB"))
    for number, shot in enumerate(content["shots"]):
        top = 18 + number * (18 + 64) + 18
        for column, name in ((0, "base"), (2, "lora")):
            shown = sheet[top : top + 64, column * 64 : column * 64 + 64]
            assert np.array_equal(shown, np.asarray(Image.open(folder / shot[name])))
    one = sheet[36 : 36 + 64]
    assert not np.array_equal(one[:, :64], one[:, 64:128])
    assert not np.array_equal(one[:, 64:128], one[:, 128:])


@every_family
def test_a_run_on_one_picture_passes_the_first_rungs(written, family):
    its, measured = families.get(family), loras.trained(family)
    step_1 = files.folded(measured.weights[1], its, 16.0, torch.float32)
    path = written(family, step_1)
    course = replace(
        measured.course, losses=measured.course.losses[:1], norms=measured.course.norms[:1], now=measured.vals[1]
    )
    rung = ladder.first(course, measured.gradients, files.contents(path, its), expected(family))
    assert failed(rung) == []
    assert failed(ladder.twentieth(measured.course)) == []


@every_family
def test_every_dtype_is_within_its_limit_at_an_odd_alpha(written, family):
    for dtype, name in ((torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")):
        path = written(family, alpha=12.0, dtype=dtype)
        rung = ladder.compare(compared(family, path, alpha=12.0).pictures, name)
        assert "reload" not in failed(rung)


def test_live_modules_of_each_family():
    found = {family: (expected(family).modules, expected(family).live) for family in loras.FAMILIES}
    assert found == {"sdxl": (32, 32), "flux": (11, 11), "qwen_image": (16, 14), "z_image": (16, 16)}


# --- faults that are put in -----------------------------------------------------------------------------------------


def with_changed(lora, change):
    return replace(lora, modules={name: change(a, b) for name, (a, b) in lora.modules.items()})


def test_a_lora_without_effect_is_found(written):
    zero = with_changed(loras.lora("z_image"), lambda a, b: (a, torch.zeros_like(b)))
    path = written("z_image", zero)
    rung = ladder.compare(compared("z_image", path).pictures, "f32")
    assert {"shift", "reload"} <= set(failed(rung))
    rung = ladder.weights(files.contents(path, families.get("z_image")), expected("z_image"))
    assert failed(rung) == ["live lora_B"]


def test_a_lora_at_half_its_strength_is_found(written):
    half = with_changed(loras.lora("qwen_image"), lambda a, b: (a, b / 2))
    assert "reload" in failed(ladder.compare(compared("qwen_image", written("qwen_image", half)).pictures, "f32"))


def test_a_lora_of_too_few_modules_is_found(written):
    lora = loras.lora("flux")
    few = replace(lora, modules=dict(list(lora.modules.items())[:5]))
    rung = ladder.weights(files.contents(written("flux", few), families.get("flux")), expected("flux"))
    assert set(failed(rung)) == {"modules", "values", "live lora_B"}


def test_a_lora_that_blanks_pictures_is_found(written, monkeypatch):
    path = written("flux")
    draw = evaluation.draw

    def blank(pipeline, shot, options):
        picture = draw(pipeline, shot, options)
        return np.full_like(picture, 0.5) if pipeline.get_active_adapters() else picture

    monkeypatch.setattr(evaluation, "draw", blank)
    assert "not blank" in failed(ladder.compare(compared("flux", path).pictures, "f32"))


def test_a_base_that_is_never_the_same_twice_is_found(written, monkeypatch):
    path = written("z_image")
    draw, noise = evaluation.draw, np.random.default_rng(0)
    monkeypatch.setattr(evaluation, "draw", lambda *given: draw(*given) + noise.normal(0, 1e-3, (64, 64, 3)))
    found = compared("z_image", path)
    assert "noise floor" in failed(ladder.compare(found.pictures, "f32"))
    assert failed(found.inert) == ["untrained", "at weight 0", "disabled", "unloaded"]


# --- what should not change -----------------------------------------------------------------------------------------


@every_family
def test_conditions_are_constants(family):
    encoder = models.of(loras.folder(family)).text_encoder(torch.float32, loras.CPU)
    (conditions,) = encoder.encode([loras.CAPTION])
    assert evaluation.not_constant(conditions) == []
    assert evaluation.encoded_apart(encoder, {loras.CAPTION: conditions}) == 0
    name, tensor = next(iter(conditions.items()))
    for changed in (tensor.clone().requires_grad_(), (tensor * torch.ones(1, requires_grad=True)), tensor[:1]):
        assert evaluation.not_constant(conditions | {name: changed}) == [name]


def test_another_tokenizer_or_template_is_found():
    encoder = models.of(loras.folder("z_image")).text_encoder(torch.float32, loras.CPU)
    kept = {loras.CAPTION: encoder.encode(["a photo of sks box"])[0]}
    assert evaluation.encoded_apart(encoder, kept) > 1e-3
    assert failed(evaluation.conditions(encoder, kept, "one", "other")) == ["encoded", "base"]
    kept = {loras.CAPTION: encoder.encode(["a photo"])[0]}
    assert evaluation.encoded_apart(encoder, kept) == float("inf")
    kept = {loras.CAPTION: encoder.encode([loras.CAPTION])[0]}
    assert failed(evaluation.conditions(encoder, kept, "one", "one")) == []


def test_pictures_closer_to_the_training_are_told_from_others():
    vae = models.of(loras.folder("flux")).vae(loras.CPU)
    rng = np.random.default_rng(0)
    target, away = (rng.random((64, 64, 3), np.float32) for _ in range(2))
    reference = vae.encode(torch.from_numpy(target).permute(2, 0, 1)[None] * 2 - 1)[0][0]
    near = 0.9 * target + 0.1 * away
    assert evaluation.closer(vae, reference, [away, away], [near, near]) == 1
    assert evaluation.closer(vae, reference, [near, away], [away, near]) == 0.5


def test_the_attention_that_pictures_are_made_by_is_named():
    assert evaluation.attention(loras.network("z_image")) == "ZSingleStreamAttnProcessor; native"
    assert evaluation.attention(loras.network("sdxl")) == "AttnProcessor2_0; native"


def test_a_grid_is_the_same_bytes_and_takes_any_text(tmp_path):
    picture = np.random.default_rng(0).random((96, 32, 3), np.float32)
    rows = ["a fox 🦊 狐狸", "x" * 500]
    for name in "one", "two":
        evaluation.grid(
            ["base", "step 5"], rows, [[picture, 1 - picture], [picture * np.nan, picture]], tmp_path / name
        )
    assert sha256(tmp_path / "one") == sha256(tmp_path / "two")
