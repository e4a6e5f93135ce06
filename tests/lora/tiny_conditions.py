"""A folder of small pictures, a tiny SDXL pipeline, and the corpus and shards made of them."""

import numpy as np
from PIL import Image
from trainer import config
from trainer.control import Requests
from trainer.files import digest, sha256, write_json
from trainer.lora import corpus, precompute
from trainer.lora.batches import Items
from trainer.materials import Record

SIZES = ((128, 128), (200, 70), (90, 170))


def base(folder, family="sdxl"):
    """The record of a tiny pipeline in a folder."""
    if not folder.exists():
        import tiny_pipelines  # not always: it loads all that there is of diffusers

        tiny_pipelines.save(family, folder)
    files = [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    found = {"path": str(folder), "found": "path", "repository": None, "revision": None, "package": None}
    what = {"id": "base", "kind": "hub", "title": "tiny", "role": "base", "version": None}
    return Record(**what, **found, files=files, digest=digest([it["sha256"] for it in files]))


def picture(path, seed, size=SIZES[0], **more):
    """A picture of smooth noise in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path, **more)


def settings(run, pictures=None, precompute=None, pack="sdxl_lora"):
    """Those of a run in a folder."""
    group = {"folder": str(run / "mine"), "resolution": 128, "holdout": 0.0, "max_bad_fraction": 0.0}
    shards = {"device": "cpu", "block_shards": 2, "teacher_dtype": "f32"}
    return config.load(
        {
            "pack": pack,
            "runs_dir": str(run.parent),
            "run": run.name,
            "pictures": group | (pictures or {}),
            "precompute": shards | (precompute or {}),
        }
    )


def draw(run, count):
    """A folder of pictures of several shapes, with captions beside them."""
    for number in range(count):
        picture(run / "mine" / f"{number:02d}.png", number, SIZES[number % len(SIZES)])
        (run / "mine" / f"{number:02d}.txt").write_text(f"a picture, number {number}")


def build(run, given):
    """Build the corpus."""
    outputs = {name: run / "corpus" / f"{name}.jsonl" for name in ("train", "val", "text")}
    corpus.build(given.pictures, given.pictures.resolution, outputs | {"summary": run / "corpus.json"})


def fill(run, given, record, split="train", block=0, blocks=1):
    """Fill a block; gives its list."""
    made = precompute.Block(given, {"base": record}, Requests(run), 10**9)
    output = run / "shards" / split / f"{block:04d}.json"
    content = made.fill(output, block, blocks, run / "corpus" / f"{split}.jsonl")
    write_json(output, content)
    return content


def everything(run, given, record, blocks=1):
    """Corpus and shards of all splits; gives the lists of the last block."""
    build(run, given)
    return [fill(run, given, record, split, n, blocks) for split in ("train", "val", "text") for n in range(blocks)]


def files(run, split="train"):
    """The bytes of the shards of a split, and of all else that lies there."""
    return {path.name: path.read_bytes() for path in sorted((run / "shards" / split).iterdir())}


def shard_paths(run, split):
    """The shards of a split."""
    return sorted((run / "shards" / split).glob("*.safetensors"))


def items(run, split="train"):
    """The pictures of a split."""
    rows = list(corpus.read(run / "corpus" / f"{split}.jsonl"))
    return Items(rows, shard_paths(run, split), shard_paths(run, "text"))
