"""The ladder passes what is well and fails each fault that is put in, by number."""

import json
import math
from dataclasses import replace

import pytest
from trainer.files import to_json
from trainer.lora import ladder
from trainer.lora.files import Contents
from trainer.lora.ladder import Course, Expected, Gradients, Pictures

NAN = math.nan
MODULES = tuple(f"transformer_blocks.{n}.attn.to_q" for n in range(16))
EXPECTED = Expected(modules=16, live=14, payload=32768)
CONTENTS = Contents(
    tensors=32,
    bytes=36864,
    header=4096,
    payload=32768,
    modules=MODULES,
    live=MODULES[:14],
    finite=True,
    rank=8,
    norm=3.0,
)
GRADIENTS = Gradients(a_zero=16, b_nonzero=14, base=0)
START = [1.4, 1.3, 1.2, 1.1, 1.0]


def course(steps, ratio, **changes):
    """Losses that scatter as real ones do, and bands that fall together."""
    losses = [1.0 + 0.3 * math.sin(7 * n) for n in range(steps)]
    norms = [0.1 + 0.05 * math.sin(3 * n) for n in range(steps)]
    return replace(Course(losses, norms, START, [value * ratio for value in START]), **changes)


def with_value(values, index, value):
    return [*values[:index], value, *values[index + 1 :]]


def rung_1(reached=None, gradients=GRADIENTS, contents=CONTENTS, expected=EXPECTED):
    return ladder.first(reached or course(1, 0.999), gradients, contents, expected)


def rung_500(reached=None, contents=CONTENTS, pictures=1, norm=1.0, best=None):
    return ladder.five_hundredth(reached or course(500, 0.9), pictures, contents, EXPECTED, norm, best)


def failed(rung):
    return [row.name for row in rung.rows if not row.passed]


WELL = Pictures(floor=0.0, shift=8 / 255, reload=0.0, spread=0.9, other=4 / 255, closer=1.0)


def test_a_healthy_run_passes_every_rung():
    rungs = [
        ladder.inert(0.0, 0.0, 0.0, 0.0),
        rung_1(),
        ladder.twentieth(course(20, 0.98)),
        ladder.hundredth(course(100, 0.92), pictures=1),
        rung_500(best=(450, 1.07)),
        ladder.compare(WELL, "bf16"),
        ladder.resume(True, 0.0),
        ladder.engines({"FLUX.1": True}, (48, 48)),
    ]
    assert [failed(rung) for rung in rungs] == [[]] * len(rungs)
    content = ladder.to_json(rungs, family="z_image")
    assert content["passed"]
    assert ladder.failures(content) == []
    assert json.loads(to_json(content)) == content
    assert set(content["rungs"][0]["rows"][0]) == {"name", "passed", "value", "limit", "words", "warning"}


def test_what_was_measured_on_tiny_models_passes():
    # Ratios of the fixed validation loss on one picture after 1, 20, 100 and 500 steps.
    for one, twenty, hundred, all_ in (
        (0.9988, 0.9911, 0.9271, 0.9006),
        (0.9995, 0.9792, 0.8211, 0.7530),
        (0.9994, 0.9730, 0.7739, 0.7541),
        (0.9989, 0.9797, 0.9111, 0.8528),
    ):
        assert rung_1(course(1, one)).passed
        assert ladder.twentieth(course(20, twenty)).passed
        assert ladder.hundredth(course(100, hundred), 1).passed
        assert rung_500(course(500, all_)).passed


@pytest.mark.parametrize(
    ("rung", "row"),
    [
        # a loss that is no number
        (rung_1(course(1, 0.999, losses=[NAN])), "loss finite"),
        (ladder.twentieth(course(20, 0.98, losses=with_value([1.0] * 20, 12, NAN))), "loss finite"),
        (ladder.hundredth(course(100, 0.92, losses=with_value([1.0] * 100, 99, math.inf)), 1), "loss finite"),
        (rung_500(course(500, 0.9, losses=with_value([1.0] * 500, 3, NAN))), "loss finite"),
        (rung_1(course(1, 0.999, losses=[])), "loss finite"),
        # weights that stay 0, and gradients that are cut
        (rung_1(contents=replace(CONTENTS, live=())), "live lora_B"),
        (rung_500(contents=replace(CONTENTS, live=MODULES[:13])), "live lora_B"),
        (rung_1(contents=replace(CONTENTS, live=MODULES)), "live lora_B"),
        (rung_1(gradients=replace(GRADIENTS, b_nonzero=3)), "lora_B gradients"),
        (rung_1(gradients=replace(GRADIENTS, a_zero=15)), "lora_A gradients"),
        (rung_1(gradients=replace(GRADIENTS, base=1)), "base gradients"),
        (rung_1(course(1, 0.999, norms=[0.0])), "gradient norm"),
        # a norm that explodes
        (rung_1(course(1, 0.999, norms=[math.inf])), "gradient norm finite"),
        (ladder.twentieth(course(20, 0.98, norms=[0.1] * 19 + [1.1])), "largest gradient norm"),
        (ladder.twentieth(course(20, 0.98, norms=[0.1] * 19 + [NAN])), "gradient norm finite"),
        (rung_500(contents=replace(CONTENTS, norm=math.inf)), "norm of the LoRA"),
        (rung_500(norm=3.5), "norm of the LoRA"),
        # losses that rise
        (rung_1(course(1, 1.02)), "val"),
        (rung_1(course(1, 0.85)), "val"),
        (ladder.twentieth(course(20, 1.001)), "val"),
        (ladder.twentieth(course(20, 0.98, losses=[1.0] * 10 + [1.6] * 10)), "loss"),
        (ladder.twentieth(course(20, 0.98, now=with_value([v * 0.9 for v in START], 2, 1.27))), "worst band"),
        (ladder.hundredth(course(100, 0.995), 10), "val"),
        (
            ladder.hundredth(course(100, 0.9, now=[v * 0.9 for v in START[:3]] + START[3:]), 1),
            "bands below their start",
        ),
        (rung_500(course(500, 0.98)), "val"),
        (rung_500(course(500, 0.9, now=with_value([v * 0.9 for v in START], 4, 1.0))), "bands .5, .7 and .9"),
        (rung_500(course(500, 0.9, now=with_value([v * 0.8 for v in START], 0, 1.5))), "band .1"),
        (rung_500(course(500, NAN)), "val"),
        # a file that is none
        (rung_1(contents=replace(CONTENTS, bytes=1024)), "bytes"),
        (rung_1(contents=replace(CONTENTS, payload=1024, bytes=5120)), "values"),
        (rung_1(contents=replace(CONTENTS, tensors=30)), "tensors"),
        (rung_1(contents=replace(CONTENTS, modules=MODULES[:15])), "modules"),
        (rung_1(contents=replace(CONTENTS, finite=False)), "values finite"),
        (rung_500(contents=replace(CONTENTS, finite=False)), "values finite"),
        # a scale that collapses
        (ladder.twentieth(course(20, 0.98, scales=[2, 1, 0.5])), "loss scale"),
        (ladder.twentieth(course(20, 0.98, scales=[64, 32, 16, 8])), "halvings of the loss scale"),
        # pictures
        (ladder.compare(replace(WELL, shift=0.0), "bf16"), "shift"),
        (ladder.compare(replace(WELL, shift=NAN), "bf16"), "shift"),
        (ladder.compare(replace(WELL, floor=1 / 255, shift=8 / 255), "bf16", "cuda"), "shift"),
        (ladder.compare(replace(WELL, floor=1e-7), "bf16"), "noise floor"),
        (ladder.compare(replace(WELL, spread=0.1), "bf16"), "not blank"),
        (ladder.compare(replace(WELL, reload=2e-5), "f32"), "reload"),
        (ladder.compare(replace(WELL, reload=5e-3), "bf16"), "reload"),
        (ladder.compare(replace(WELL, closer=0.4), "bf16"), "closer to the training"),
        (ladder.inert(0.0, 1e-7, 0.0, 0.0), "at weight 0"),
        (ladder.resume(False, 0.0), "file"),
        (ladder.resume(True, 1e-3, "cuda"), "losses"),
        (ladder.engines({"FLUX.1": False}, None), "refused by FLUX.1"),
        (ladder.engines({}, (44, 48)), "applied by ggk"),
    ],
)
def test_a_fault_fails_its_rung(rung, row):
    assert row in failed(rung)
    assert not rung.passed
    assert any(line.startswith(f"{rung.name}: {row} is ") for line in ladder.failures(ladder.to_json([rung])))


@pytest.mark.parametrize(
    ("rung", "row"),
    [
        (rung_500(best=(300, 1.0)), "val of held-out pictures"),
        (ladder.compare(replace(WELL, shift=130 / 255), "bf16"), "collapse"),
        (ladder.compare(replace(WELL, shift=1 / 255, other=None), "bf16", steps=20), "shift"),
        (ladder.compare(replace(WELL, other=9 / 255), "bf16"), "other prompts"),
    ],
)
def test_a_warning_fails_no_rung(rung, row):
    assert failed(rung) == [row]
    assert rung.passed
    assert ladder.failures(ladder.to_json([rung])) == []


def test_many_pictures_are_learnt_more_slowly():
    assert ladder.hundredth(course(100, 0.999), pictures=11).passed
    assert rung_500(course(500, 0.985), pictures=11).passed


def test_a_low_band_above_the_others_is_no_fault():
    assert START[0] == max(START)
    assert rung_500(course(500, 0.9)).passed


def test_bands_on_a_GPU_may_differ_a_little_and_on_a_CPU_not():  # noqa: N802
    pictures = replace(WELL, floor=0.4 / 255)
    assert ladder.compare(pictures, "bf16", "cuda").passed
    assert failed(ladder.compare(pictures, "bf16", "cpu")) == ["noise floor"]
