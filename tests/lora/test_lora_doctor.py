"""The ten questions are answered from a run's files, and each known pattern of failure is found where it is put in."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import loras
import pytest
import torch
from trainer import checkpoints
from trainer.errors import TrainerError
from trainer.files import write_json
from trainer.lora import doctor, files, ladder, objective

SCRIPT = Path(__file__).parents[2] / "scripts" / "lora_doctor.py"
BASE = "b" * 64
ATTENTION = "ZSingleStreamAttnProcessor; native"
BANDS = [f"val_loss_{band}" for band in objective.BANDS]


def metrics(run, losses, vals):
    lines = [",".join(["step", "loss", "grad_norm", *BANDS])]
    for step, loss in enumerate(losses, 1):
        lines.append(",".join([str(step), str(loss), "0.2", *(str(it) for it in vals.get(step, [""] * 5))]))
    (run / "metrics.csv").write_text("\n".join(lines) + "\n")


def rungs(**changes):
    """Of a healthy run of the tiny Z-Image; values of rows by name."""
    gradients = changes.get("gradients", 16)
    made = [
        ladder.Rung("1", (ladder.Row("lora_B gradients", gradients == 16, gradients, "= 16", "of every module"),)),
        ladder.twentieth(replace(loras.trained("z_image").course, scales=changes.get("scales", ()))),
        ladder.conditions(
            changes.get("variable", []), changes.get("apart", 0.0), "b" * 64, changes.get("base", "b" * 64)
        ),
        ladder.compare(ladder.Pictures(0.0, changes.get("shift", 9 / 255), 0.0, 1.0), "f32"),
    ]
    return ladder.to_json(made)


@pytest.fixture
def run(tmp_path):
    """A run's folder as a healthy run leaves it, its LoRA beside it."""
    folder = tmp_path / "fox"
    (folder / "checkpoints").mkdir(parents=True)
    metrics(folder, [0.9, 1.1, 0.8], {1: [1.5, 1.2, 1.1, 1.0, 1.0], 3: [1.4, 1.1, 1.0, 0.9, 0.9]})
    checkpoints.save(folder / "checkpoints" / "best.safetensors", {"model.a": torch.zeros(1)}, {"step": 3})
    write_json(folder / "ladder.json", rungs())
    write_json(folder / "eval.json", {"family": "z_image", "attention": ATTENTION})
    export(folder, loras.lora("z_image"))
    return folder


def export(run, lora, **about):
    about = replace(loras.ABOUT, attention=ATTENTION, **about)
    path = run.parent / "fox.safetensors"
    files.write(path, lora, about)
    files.write_sidecar(path, lora, about, [path])
    return path


def verdicts(run):
    return [it.verdict for it in doctor.answers(doctor.read(run))]


def patterns(run):
    return [it.pattern for it in doctor.findings(doctor.read(run))]


def test_a_healthy_run_is_told_as_one(run):
    size = (run.parent / "fox.safetensors").stat().st_size
    assert doctor.text(doctor.read(run)) == (
        f""" 1 yes     Is the loss finite from the first step?
           0.9 at first, 0.8 at last, all 3 finite
 2 yes     Is a checkpoint written?
           best.safetensors
 3 yes     Is it more than a header?
           32 tensors of 16 modules, {size} bytes: the header and all values
 4 yes     Are the lora_B (lora_up) other than 0?
           16 of 16 that can learn, of 16 modules
 5 yes     Are fixed conditions constants?
           variable conditions 0, to be = 0: fixed ones are constants
 6 yes     Do tokenizer, template and encoder give in pictures what they gave in training?
           encoded 0.0, to be <= 0: tokenizer, template and encoder give what is in the shards
 7 yes     Are VAE and encoders the same files in training and for pictures?
           base {"b" * 64}, to be = {"b" * 64}: VAE and encoders in training and for pictures
 8 yes     Do gradients reach every module, through rotary embeddings too?
           lora_B gradients 16, to be = 16: of every module
 9 yes     Is the loss scale, if there is one, 1 or more?
           none is used: numbers have the range of f32
10 yes     Is the attention that of training for pictures too?
           training by ZSingleStreamAttnProcessor; native, pictures by ZSingleStreamAttnProcessor; native

note: loss at little noise: is higher than others, as a target of noise makes it: compare each band with its start"""
    )


def test_a_run_that_was_resumed_past_a_fault_is_well(run):
    stopped_later(run)
    assert "not finite later" in patterns(run)
    metrics(run, [0.9] * 5, {})
    assert "not finite later" not in patterns(run)


def test_a_run_that_has_not_begun_answers_what_would_tell(tmp_path):
    (tmp_path / "new").mkdir()
    assert verdicts(tmp_path / "new") == ["unknown", "no", "unknown", "unknown", *["unknown"] * 6]
    assert patterns(tmp_path / "new") == []
    with pytest.raises(TrainerError, match="is no folder of a run"):
        doctor.read(tmp_path / "none")


def zeroed(lora, count):
    names = list(lora.modules)[:count]
    return replace(
        lora, modules=lora.modules | {name: (lora.modules[name][0], 0 * lora.modules[name][1]) for name in names}
    )


def nan_at_once(run):
    metrics(run, ["nan", 1.0, 1.0], {})


def nan_at_once_and_stopped(run):
    (run / "metrics.csv").unlink()
    (run / "logs").mkdir()
    said = "error: the loss or its gradient was not finite in step 1 (fox.png: its loss is nan); see step 7"
    (run / "logs" / "train.log").write_text(f"training\n{said}\n")


def nan_later(run):
    metrics(run, [1.0, 1.0, "inf"], {})


def stopped_later(run):
    (run / "logs").mkdir()
    (run / "logs" / "train.log").write_text("error: the loss or its gradient was not finite in step 4 (fox.png)\n")


def no_checkpoint(run):
    (run / "checkpoints" / "best.safetensors").unlink()


def truncated_checkpoint(run):
    path = run / "checkpoints" / "best.safetensors"
    path.write_bytes(path.read_bytes()[:-2])


def truncated_file(run):
    path = run.parent / "fox.safetensors"
    path.write_bytes(path.read_bytes()[:1024])


def most_zero(run):
    export(run, zeroed(loras.lora("z_image"), 12))


def one_zero(run):
    export(run, zeroed(loras.lora("z_image"), 1))


def variable(run):
    write_json(run / "ladder.json", rungs(variable=["embeds"]))


def other_tokenizer(run):
    write_json(run / "ladder.json", rungs(apart=0.3))


def other_base(run):
    write_json(run / "ladder.json", rungs(base="c" * 64))


def cut_gradients(run):
    write_json(run / "ladder.json", rungs(gradients=4))


def collapsing(run):
    write_json(run / "ladder.json", rungs(scales=[8.0, 4.0, 2.0, 1.0, 0.5]))


def other_attention(run):
    write_json(run / "eval.json", {"family": "z_image", "attention": "AttnProcessor; _flash_3"})


def ignored(run):
    write_json(run / "ladder.json", rungs(shift=0.0))


def other_family(run):
    write_json(run / "eval.json", {"family": "flux", "attention": ATTENTION})


def rising(run):
    metrics(run, [1.0] * 3, {1: [1.0] * 5, 3: [1.0, 1.0, 1.2, 1.0, 1.0]})


@pytest.mark.parametrize(
    ("fault", "question", "pattern"),
    [
        (nan_at_once, 1, "not finite at the first step"),
        (nan_at_once_and_stopped, 1, "not finite at the first step"),
        (nan_later, 1, "not finite later"),
        (stopped_later, None, "not finite later"),
        (no_checkpoint, 2, None),
        (truncated_checkpoint, 3, None),
        (most_zero, 4, "lora_B stays 0"),
        (one_zero, 4, "lora_B stays 0"),
        (variable, 5, None),
        (other_tokenizer, 6, None),
        (other_base, 7, None),
        (cut_gradients, 8, None),
        (collapsing, 9, "the loss scale collapses"),
        (other_attention, 10, None),
        (ignored, None, "pictures ignore the LoRA"),
        (other_family, None, "pictures ignore the LoRA"),
        (rising, None, "a band rises"),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_a_fault_is_found(run, fault, question, pattern):
    before = patterns(run)
    fault(run)
    assert [number for number, it in enumerate(verdicts(run), 1) if it == "no"] == ([question] if question else [])
    assert [it for it in patterns(run) if it not in before] == ([pattern] if pattern else [])


def test_a_file_of_1_kb_is_no_lora(run):
    truncated_file(run)
    answer = doctor.answers(doctor.read(run))[2]
    assert answer.verdict == "no"
    assert "is not a whole safetensors file" in answer.words


def test_dead_modules_are_no_fault(tmp_path):
    folder = tmp_path / "fox"
    folder.mkdir()
    export(folder, loras.lora("qwen_image"), dead=2)
    assert verdicts(folder)[3] == "yes"
    export(folder, loras.lora("qwen_image"))
    assert verdicts(folder)[3] == "no"


def test_the_script_answers_and_says_by_its_status_whether_something_is_wrong(run):
    def told(*options):
        command = [sys.executable, str(SCRIPT), str(run), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    healthy = told()
    assert healthy.returncode == 0, healthy.stderr
    assert healthy.stdout.rstrip() == doctor.text(doctor.read(run))
    one_zero(run)
    ill = told("--json")
    assert ill.returncode == 1
    assert [it["verdict"] for it in json.loads(ill.stdout)["answers"]].count("no") == 1


def test_the_course_of_a_run_is_read_from_its_metrics(run):
    start = [1.6] * 5
    found = ladder.course(run / "metrics.csv", 2, start)
    assert found == ladder.Course([0.9, 1.1], [0.2, 0.2], start, [1.5, 1.2, 1.1, 1.0, 1.0])
    assert ladder.course(run / "metrics.csv", 3, start).now == [1.4, 1.1, 1.0, 0.9, 0.9]
    metrics(run, [1.0], {})
    with pytest.raises(TrainerError, match="nothing was validated up to step 1"):
        ladder.course(run / "metrics.csv", 1, start)
