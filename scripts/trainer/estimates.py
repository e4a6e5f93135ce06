"""What a pack takes with given settings on a given machine: memory, disk and hours, from operations and bytes.

Operations are 2 for each parameter a token is multiplied with, 6 where it is trained. Time is the larger of operations
over the machine's rate and bytes over the disk's; what else there is (starts, tokenizing, validation) is left out.

Memory is that of the tensors that live at once, and a constant for Python and the libraries. On a CPU it was measured
(`benchmarks/memory.py`); of a GPU it is counted.
"""

import math
from dataclasses import dataclass

from trainer import packs
from trainer.config import Settings
from trainer.packs.base import LoraPack

GB = 1e9
# Bytes that autograd keeps, computing in bf16, for a value of a slot in one block of a resampler or of a token-aligned
# adapter, and for one of a student's row that a block of a resampler reads (counted, see the tests).
_KEPT, _KEPT_ALIGNED, _KEPT_READ = 50, 34, 6
_OF_TARGET = 24, 8  # bytes of the loss for a value of a teacher row: six tensors in f32, two more where raw rows count
_HEAD_DIM = 64  # of adapters
_OF_INPUT = 8  # bytes for a value of a student or vision row: as read, standardized in f32, and that in bf16
_HEAPS = 8  # rows of the seed table that n tokens use, over the root of n (2,900 of the demo's 131,000)
_WAITING = 4  # batches in memory: one in work, one being made, two that wait
WEIGHTS = 0.75  # of the memory that precompute may use, what weights and waiting batches get (see `trainer.streaming`)
_OF_TOKEN = 14  # values for one of a token's in a layer of a teacher, while a batch goes through it (measured)
_CPU_TOKENS = 2048  # of a batch, see `devices.batch_tokens`
_GPU_GB = 2.0  # of a GPU, for CUDA's context and libraries, and what the allocator leaves unused
# GB of main memory that training and precompute take without a tensor: Python, and what libraries load and keep for the
# shapes that they meet (measured).
_TRAINING_GB, _PRECOMPUTE_GB = 0.45, 0.65


@dataclass(frozen=True)
class Machine:
    """A machine.

    tflops: bf16 operations that matrix products of these sizes reach, in 10^12 a second.
    disk: GB a second that files are read with.
    gpu: GB of memory of its GPU; 0: it has none.
    """

    name: str
    tflops: float
    disk: float
    gpu: float = 0.0


@dataclass(frozen=True)
class Training:
    """GB that training takes, Python and libraries aside.

    least: weights, gradients and moments, which no smaller batch makes less.
    step: the same, or weights, moments, copies of matrices in bf16 and what is kept of a batch, whichever is more:
        gradients come while the batch goes.
    cpu_step: of a CPU, the sum of all this, as the place of gradients is not used again, and the weights of attention.
    rows: of main memory, the rows that are mixed and the batches that wait, of all processes together.
    copies: of main memory, the state and the whole seed table, while they are written and training goes on.
    saved: the same and the best weights, which may be written just before.
    """

    least: float
    step: float
    cpu_step: float
    rows: float
    copies: float
    saved: float

    @property
    def gpu(self) -> float:
        """Of a GPU."""
        return _GPU_GB + self.step

    @property
    def beside(self) -> float:
        """Of main memory where a GPU trains."""
        return _TRAINING_GB + self.rows + self.saved

    @property
    def cpu(self) -> float:
        """Of main memory where a CPU trains."""
        return _TRAINING_GB + self.rows + max(self.cpu_step + self.copies, self.least + self.saved)

    @property
    def cpu_least(self) -> float:
        """Of that, what no smaller batch makes less."""
        return _TRAINING_GB + self.rows + self.least + self.copies


@dataclass(frozen=True)
class Estimate:
    """Memory and disk in GB, times in hours.

    streamed: memory of a GPU for precompute at least, the teacher streamed through it.
    resident: the same with all of the teacher in it.
    samples: how many are computed.
    stages: disk by stage, once the run is finished.
    disk: at most, which is while training writes a state beside the one before.
    """

    streamed: float
    resident: float
    training: Training
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


def precompute_memory(
    settings: Settings, budget: float, *, teacher: float, largest: float, student: float, file: float
) -> float:
    """GB of main memory that a block of shards takes on a CPU.

    Args:
        settings: of the run.
        budget: GB that it may use.
        teacher: GB of the teacher's weights.
        largest: GB of the largest of its parts.
        student: GB of the student's weights.
        file: GB of the student's file, which stays mapped.
    """
    work, shape, options = packs.get(settings.pack).work, settings.adapter, settings.precompute
    shard, vision = options.shard_size / GB, work.vision_rows * (shape.vision_dim or 0)
    # What the models before the teacher made: a picture's rows go into three more of the teacher's layers.
    results = options.block_shards * shard * 2 * (work.student_tokens * shape.student_dim + 4 * vision)
    room = WEIGHTS * (budget - results)
    held, waiting, copies = teacher, 0.0, 3  # gathered and written, while the next shard grows
    if teacher > room:
        held = (2 if 2 * largest <= room else 1) * largest
        between = max(work.teacher_tokens, _rows(settings)) * shape.teacher_dim
        waiting, copies = max(0.0, min(room - held, options.block_shards * shard * 2 * between)), 1
    tokens = min(options.batch_tokens or _CPU_TOKENS, options.shard_size * work.teacher_tokens)
    batch = 2 * _OF_TOKEN * shape.teacher_dim * tokens / GB
    working = max(student + results, held + results + waiting + batch + copies * shard * sample_bytes(settings))
    return _PRECOMPUTE_GB + file + working


def used_rows(settings: Settings, prompts: float) -> float:
    """Rows of the seed table whose tokens occur in so many prompts."""
    return min(settings.adapter.vocabulary or 0, _HEAPS * math.sqrt(prompts * packs.get(settings.pack).work.rows))


def training_memory(settings: Settings, prompts: float, size: float) -> Training:
    """Memory of training on so many samples of `size` bytes."""
    shape, train, work = settings.adapter, settings.train, packs.get(settings.pack).work
    _, matrices = (_resampler if shape.queries else _token_aligned)(settings)
    matrices += shape.width * (shape.student_dim + shape.teacher_dim)
    table = shape.width * (shape.vocabulary or 0)
    parameters = matrices + shape.width * used_rows(settings, prompts)
    slots, tokens = shape.queries or work.student_tokens, work.student_tokens
    seen = shape.queries + tokens if shape.queries else tokens
    kept = slots * _KEPT + tokens * _KEPT_READ if shape.queries else tokens * _KEPT_ALIGNED
    raw = packs.get(settings.pack).metric != "cos_centered"
    sample = (
        shape.depth * shape.width * kept
        + sum(_OF_TARGET[: 1 + raw]) * _rows(settings) * shape.teacher_dim
        + _OF_INPUT * (tokens * shape.student_dim + work.vision_rows * (shape.vision_dim or 0))
    )
    # A weight in bf16 for each head and pair of rows.
    attention = 2 * shape.depth * shape.width / _HEAD_DIM * slots * seen
    part = train.batch_size / train.processes
    if train.batch_tokens:
        part = min(part, max(1, train.batch_tokens / (work.student_tokens + _rows(settings))))
    # A window, and the next one, which is read meanwhile.
    windows = train.processes * min(2e6 * train.shuffle_mb, prompts * size)
    return Training(
        least=16 * parameters / GB,
        step=max(16 * parameters, 12 * parameters + 2 * matrices + part * sample) / GB,
        cpu_step=(16 * parameters + 2 * matrices + part * (sample + attention)) / GB,
        rows=(windows + _WAITING * train.batch_size * size) / GB,
        # The table that the rows in training are part of, and a copy of it in each file.
        copies=(12 * parameters + 2 * 4 * table) / GB,
        saved=(16 * parameters + 3 * 4 * table) / GB,
    )


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

    macs, matrices = (_resampler if shape.queries else _token_aligned)(settings)
    macs += _rows(settings) * width * shape.teacher_dim
    passes = train.steps * train.batch_size
    training = max(6 * macs * passes / (machine.tflops * 1e12), passes * size / GB / machine.disk)

    parameters = matrices + width * (shape.student_dim + shape.teacher_dim + (shape.vocabulary or 0))
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
    return Estimate(
        # A quarter of the memory is the batch's; the rest holds two of the teacher's steps, one of which is in work.
        streamed=_GPU_GB + 2 * work.teacher_part / 0.75,
        resident=_GPU_GB + teacher / 0.75,
        training=training_memory(settings, prompts, size),
        samples=prompts,
        stages=stages,
        # The weights to export and the file come when the last state is written.
        disk=sum(stages.values()) + state - 3 * file,
        precompute_hours=precompute / 3600,
        training_hours=training / 3600,
    )


def _resampler(settings: Settings) -> tuple[float, float]:
    """Multiplications for a sample and parameters, both without in_proj, out_proj and seed table."""
    shape, tokens, width = settings.adapter, packs.get(settings.pack).work.student_tokens, settings.adapter.width
    queries = shape.queries or 0
    macs = shape.depth * (
        queries * 14 * width**2  # self-attention 4, cross-attention 2, MLP 8
        + tokens * 2 * width**2
        + 2 * queries * (queries + tokens) * width
    )
    return macs, shape.depth * 16 * width**2 + queries * width


def _token_aligned(settings: Settings) -> tuple[float, float]:
    """The same of an adapter whose slots are the student's tokens."""
    shape, work, width = settings.adapter, packs.get(settings.pack).work, settings.adapter.width
    tokens, seen = work.student_tokens, work.vision_rows
    skip, vision = shape.student_dim * shape.teacher_dim, (shape.vision_dim or 0) * width
    # Longer samples have more to read than the average one: twice as much, at the packs' mixes.
    macs = shape.depth * tokens * (12 * width**2 + 2 * 2 * tokens * width) + work.rows * skip + seen * vision
    return macs, shape.depth * 12 * width**2 + skip + vision
