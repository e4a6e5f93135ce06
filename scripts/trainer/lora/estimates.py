"""What a LoRA takes: see `trainer.estimates`. Operations are counted as there; the base's weights get no gradient.

Sizes are of the published models; the demo's tiny one counts as nearly nothing.
"""

from dataclasses import dataclass

from trainer import packs
from trainer.config import Settings
from trainer.estimates import GB, Estimate, Machine, Training
from trainer.lora import families
from trainer.lora.families import Name

_PYTHON_GB = 2.0  # Python, torch and, on a GPU, CUDA's context
_VAE_GB = 0.3  # its weights
_VAE_MACS = 4e6  # a pixel that is encoded
_BUS = 12.0  # GB a second from main memory to a GPU
_BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "nf4": 0.56}


@dataclass(frozen=True)
class _Work:
    """What a family's models take.

    encoder: GB of the text encoders in bf16. caption: tokens of an average one. caption_bytes: of its embeddings.
    rank: parameters that a rank adds. width, blocks: of the network. pixels: a side that makes one of its tokens.
    busy: multiplications for a token, as a share of the network's parameters.
    vae: bytes of memory that the VAE takes for a pixel that it encodes, in f32 (measured on a CPU).
    """

    encoder: float
    caption: int
    caption_bytes: int
    rank: int
    width: int
    blocks: int
    pixels: int = 16
    busy: float = 1.0
    vae: float = 2600


_WORK: dict[Name, _Work] = {
    "sdxl": _Work(1.6, 77, 318_000, 1_451_520, 1280, 70, pixels=32, busy=1.1),
    "flux": _Work(9.8, 512, 4_196_000, 1_634_304, 3072, 57),
    "qwen_image": _Work(16.6, 60, 430_000, 2_949_120, 3072, 60, vae=5100),
    "z_image": _Work(8.0, 60, 307_000, 1_044_480, 3840, 34),
}


def estimate(settings: Settings, machine: Machine, samples: float | None = None, size: float | None = None) -> Estimate:
    """Estimate a run; `samples` and their average `size` in bytes where they are known."""
    pack, options, lora, train = packs.get(settings.pack), settings.pictures, settings.lora, settings.train
    family, work = families.get(pack.family), _WORK[pack.family]
    (base,) = (material.gigabytes for material in pack.materials if material.role == "base")
    share = min(1.0, base / family.gigabytes)  # of the published model
    resolution = options.resolution or family.resolution

    counted = {split: settings.samples(split) for split in pack.splits}
    pictures, captions = counted["train"] + counted["val"], counted["text"]
    samples = samples or pictures + captions
    scale = samples / (pictures + captions)
    variants = options.variants * (2 if options.flip else 1)
    latents = 2 * 4 * family.latent_channels * (resolution // 8) ** 2
    stored = size * samples if size else scale * (pictures * variants * latents + captions * share * work.caption_bytes)

    network, encoder = share * family.gigabytes / 2 * GB, share * work.encoder / 2 * GB  # parameters
    encoding = 2 * scale * (pictures * variants * _VAE_MACS * resolution**2 * share + captions * encoder * work.caption)
    tokens = (resolution / work.pixels) ** 2 + (work.caption if family.objective == "flow" else 0)
    passes = train.steps * train.batch_size
    # Forward and back to activations, and forward once more where they are computed a second time.
    operations = passes * (6 if lora.checkpointing else 4) * network * work.busy * tokens

    parameters = lora.rank * work.rank * share
    kept = (
        2
        * train.batch_size
        * tokens
        * work.width
        * share
        * (work.blocks + 34 if lora.checkpointing else 34 * work.blocks)
    )
    numbers = _BYTES["bf16" if lora.base_precision == "auto" else lora.base_precision]
    least = _BYTES["nf4"] if lora.base_precision == "auto" else 0.1 * numbers if lora.offload else numbers
    # Every block comes for the forward pass, and once more to go back, while nothing is computed.
    moved = train.steps * 2 * numbers * network / GB if lora.offload else 0.0
    if lora.offload:
        numbers *= 0.1  # a few blocks at a time
    step = (numbers * network + 16 * parameters + kept) / GB
    file, state = 2 * parameters / GB, 12 * parameters / GB
    steps = train.steps // train.keep_every if train.keep_every else 0
    steps = min(steps, train.keep_last or steps)
    # The VAE and the text encoders are in jobs of their own.
    resident = _PYTHON_GB + share * max(work.encoder, _VAE_GB + work.vae * resolution**2 / GB)
    stages = {
        "materials": sum(material.gigabytes for material in pack.materials),
        "precompute": stored / GB,
        "train": state + 2 * 2 * file + steps * 2 * file,
        "export": file,
    }
    return Estimate(
        streamed=resident,
        resident=resident,
        training=Training(
            least=(least * network + 16 * parameters) / GB,
            step=step,
            cpu_step=step,
            rows=train.batch_size * latents / GB,
            copies=state,
            saved=state + 2 * file,
        ),
        samples=samples,
        stages=stages,
        disk=sum(stages.values()) + state,
        precompute_hours=max(encoding / (machine.tflops * 1e12), (base + stored / GB) / machine.disk) / 3600,
        training_hours=(max(operations / (machine.tflops * 1e12), passes * latents / GB / machine.disk) + moved / _BUS)
        / 3600,
    )
