"""What a pack takes with given settings on a given machine: memory, disk and hours, from operations and bytes.

Operations are 2 for each parameter a token is multiplied with, 6 where it is trained. Time is the larger of operations
over the machine's rate and bytes over the disk's; what else there is (starts, tokenizing, validation) is left out.
"""

from dataclasses import dataclass

from trainer import packs
from trainer.config import Settings
from trainer.packs.base import LoraPack

GB = 1e9
# Of a training step, bytes that autograd keeps for a slot of width 1 in one block (counted on a run in bf16).
_KEPT = 50
_PYTHON_GB = 2.0  # Python, torch and, on a GPU, CUDA's context


@dataclass(frozen=True)
class Machine:
    """A machine.

    tflops: bf16 operations that matrix products of these sizes reach, in 10^12 a second.
    disk: GB a second that files are read with.
    """

    name: str
    tflops: float
    disk: float


@dataclass(frozen=True)
class Estimate:
    """Memory and disk in GB, times in hours.

    streamed: memory of the device for precompute at least, the teacher streamed through it.
    resident: the same with all of the teacher in it.
    weights: of `training`, what no smaller batch makes less.
    shuffled: main memory that the rows of training take, which are mixed there.
    samples: how many are computed.
    stages: disk by stage, once the run is finished.
    disk: at most, which is while training writes a state beside the one before.
    """

    streamed: float
    resident: float
    training: float
    weights: float
    shuffled: float
    samples: float
    stages: dict[str, float]
    disk: float
    precompute_hours: float
    training_hours: float


def sample_bytes(settings: Settings) -> float:
    """Bytes of an average sample in a shard."""
    work, shape = packs.get(settings.pack).work, settings.adapter
    vision = work.vision_rows * (shape.vision_dim or 0)
    return 2 * (_rows(settings) * shape.teacher_dim + work.student_tokens * shape.student_dim + vision)


def _rows(settings: Settings) -> int:
    """Rows of a sample that are learnt: all queries, where they are not seeded by tokens."""
    shape = settings.adapter
    return shape.queries if shape.queries and not shape.vocabulary else packs.get(settings.pack).work.rows


def estimate(settings: Settings, machine: Machine, samples: float | None = None, size: float | None = None) -> Estimate:
    """Estimate a run; `samples` and their average `size` in bytes where they are known."""
    if isinstance(packs.get(settings.pack), LoraPack):
        from trainer.lora import estimates as of_loras

        return of_loras.estimate(settings, machine, samples, size)
    pack, shape, train = packs.get(settings.pack), settings.adapter, settings.train
    work, width = pack.work, shape.width
    prompts = samples or sum(map(settings.samples, pack.splits))
    size = size or sample_bytes(settings)
    teacher = sum(material.gigabytes for material in pack.materials if material.role == "teacher")

    operations = 2 * prompts * (
        work.teacher_parameters * work.teacher_tokens
        + work.tower_parameters * work.vision_rows
        + work.student_parameters * work.student_tokens
    )  # fmt: skip
    blocks = sum(map(settings.blocks, pack.splits))
    # Each block reads the teacher once and writes its shards.
    moved = blocks * teacher + prompts * size / GB
    precompute = max(operations / (machine.tflops * 1e12), moved / machine.disk)

    macs, matrices, slots = (_resampler if shape.queries else _token_aligned)(settings)
    macs += _rows(settings) * width * shape.teacher_dim
    passes = train.steps * train.batch_size
    training = max(6 * macs * passes / (machine.tflops * 1e12), passes * size / GB / machine.disk)

    parameters = matrices + width * (shape.student_dim + shape.teacher_dim)
    activations = train.batch_size * slots * shape.depth * width * _KEPT
    file, state = 2 * parameters / GB, 12 * parameters / GB
    kept = train.steps // train.keep_every if train.keep_every else 0
    kept = min(kept, train.keep_last or kept)
    vision = shape.vision_dim or 0
    companion = pack.companion.gigabytes if settings.companion and pack.companion else 0
    stages = {
        "materials": sum(m.gigabytes for m in pack.materials),
        "precompute": (prompts * size + 4 * width * (shape.vocabulary or 0) + 4 * shape.student_dim * vision) / GB,
        # The state, the best weights and those to export in f32, and kept steps.
        "train": state + 2 * 2 * file + kept * file,
        "export": file + companion,
    }
    weights = _PYTHON_GB + 16 * parameters / GB
    return Estimate(
        # A quarter of the memory is the batch's; the rest holds two of the teacher's steps, one of which is in work.
        streamed=_PYTHON_GB + 2 * work.teacher_part / 0.75,
        resident=_PYTHON_GB + teacher / 0.75,
        training=weights + activations / GB,
        weights=weights,
        # A window, and the next one, which is read meanwhile.
        shuffled=train.processes * min(2 * train.shuffle_mb * 1e6, prompts * size) / GB,
        samples=prompts,
        stages=stages,
        # The weights to export and the file come when the last state is written.
        disk=sum(stages.values()) + state - 3 * file,
        precompute_hours=precompute / 3600,
        training_hours=training / 3600,
    )


def _resampler(settings: Settings) -> tuple[float, float, int]:
    """Multiplications for a sample and parameters, both without in_proj and out_proj, and the slots of a sample."""
    shape, tokens, width = settings.adapter, packs.get(settings.pack).work.student_tokens, settings.adapter.width
    queries = shape.queries or 0
    macs = shape.depth * (
        queries * 14 * width**2  # self-attention 4, cross-attention 2, MLP 8
        + tokens * 2 * width**2
        + 2 * queries * (queries + tokens) * width
    )
    return macs, shape.depth * 16 * width**2 + (queries + (shape.vocabulary or 0)) * width, queries


def _token_aligned(settings: Settings) -> tuple[float, float, int]:
    """The same of an adapter whose slots are the student's tokens."""
    shape, work, width = settings.adapter, packs.get(settings.pack).work, settings.adapter.width
    tokens, seen = work.student_tokens, work.vision_rows
    skip, vision = shape.student_dim * shape.teacher_dim, (shape.vision_dim or 0) * width
    # Longer samples have more to read than the average one: twice as much, at the packs' mixes.
    macs = shape.depth * tokens * (12 * width**2 + 2 * 2 * tokens * width) + work.rows * skip + seen * vision
    return macs, shape.depth * 12 * width**2 + skip + vision, tokens
