"""The adapter file and its companion: GGUF for the engine, written aside, read back, compared, renamed."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from trainer import __version__, adapters, checkpoints
from trainer.adapters.layers import HEAD_DIM
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.files import digest, written_whole
from trainer.materials import Record
from trainer.packs import get as get_pack

PREFIX = "adapter."


def keys(
    settings: Settings,
    tensors: checkpoints.Tensors,
    meta: dict[str, Any],
    materials: list[dict[str, Any]],
    checkpoint: str,
    snapshot: bool,
) -> dict[str, Any]:
    """The keys of the file: what it is, what it was trained from, how far and how well.

    The engine reads none of them. Nothing in them depends on when or where the file was written, so that the same
    checkpoint gives the same bytes.
    """
    pack = get_pack(settings.pack)
    by_role = {record["role"]: record for record in materials}
    synthetic = settings.precompute.teacher == "synthetic"
    teacher, student = by_role.get("teacher", {}), by_role["student"]
    width, in_dim = tensors["in_proj.weight"].shape
    val = meta.get("val") or {}

    def size(name: str, dimension: int) -> int | None:
        return tensors[name].shape[dimension] if name in tensors else None

    values = {
        "general.name": settings.export.name,
        "adapter.pack": pack.name,
        "adapter.contract": pack.contract,
        "adapter.kind": adapters.kind(tensors),
        "adapter.trainer": "gguf-trainer",
        "adapter.trainer_version": __version__,
        "adapter.run": settings.run,
        "adapter.in_dim": in_dim,
        "adapter.out_dim": tensors["out_proj.weight"].shape[0],
        "adapter.width": width,
        "adapter.depth": 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("blocks.")),
        "adapter.heads": width // HEAD_DIM,
        "adapter.num_queries": size("query", 0),
        "adapter.t5_vocab": size("t5_embed.weight", 0),
        "adapter.vis_dim": size("vis_in.weight", 1),
        "adapter.trained_steps": meta["step"],
        "adapter.planned_steps": meta["steps"],
        "adapter.checkpoint": checkpoint,
        "adapter.snapshot": snapshot,
        "adapter.val_cos": val.get(pack.metric),
        "adapter.best_val_cos": meta["best_cos"],
        "adapter.settings": digest(meta["made_from"]),
        "adapter.teacher": "synthetic" if synthetic else teacher.get("repository") or teacher.get("package"),
        "adapter.teacher_revision": None if synthetic else teacher.get("revision") or teacher.get("version"),
        "adapter.teacher_digest": None if synthetic else teacher.get("digest"),
        "adapter.student_digest": student.get("digest"),
    } | pack.gguf
    return {key: value for key, value in values.items() if value is not None}


def write(
    path: Path,
    names: Iterable[str],
    tensor: Callable[[str], torch.Tensor],
    values: dict[str, Any],
    arch: str = "pig",
) -> None:
    """Write a GGUF v3 file whole, after reading it back and comparing every tensor.

    `tensor` gives the tensor of a name. It is asked three times for each, so that no two have to be held at a time: for
    the header, for the data and for the comparison.

    Raises:
        TrainerError: the file at `path` is another run's, the disk is full, or what was read back differs.
    """
    refuse_anothers(path, values["adapter.run"], "nothing was written")
    with written_whole(path) as aside:
        writer = gguf.GGUFWriter(aside, arch=arch)
        for key, value in values.items():
            _add(writer, key, value)
        names = list(names)
        for name in names:
            array = tensor(name).numpy()
            writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in names:
            writer.write_tensor_data(tensor(name).numpy())
        writer.close()
        back = {stored.name: stored for stored in gguf.GGUFReader(aside).tensors}
        if sorted(back) != sorted(names) or any(not _holds(aside, back[name], tensor(name).numpy()) for name in names):
            raise TrainerError(f"{path} read back differently than it was written: check the disk and export again")


def write_adapter(path: Path, tensors: checkpoints.Tensors, values: dict[str, Any]) -> None:
    """Write the file of an adapter; raises as `write`."""
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    write(path, named, named.__getitem__, values)


def _holds(path: Path, stored: gguf.ReaderTensor, array: np.ndarray) -> bool:
    """Whether a tensor of a file is this array. It is read, not mapped: a mapping would grow to the whole file."""
    found = np.fromfile(path, array.dtype, array.size, offset=int(stored.data_offset)).reshape(array.shape)
    return stored.data.shape == array.shape and stored.data.dtype == array.dtype and np.array_equal(found, array)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a GGUF in torch's order of dimensions."""
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def read_keys(path: Path) -> dict[str, Any]:
    """All keys of a GGUF file of ours."""
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def read_tensors(path: Path) -> checkpoints.Tensors:
    """The adapter's tensors, without the prefix.

    Raises:
        TrainerError: not a whole adapter file.
    """
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise TrainerError(f"{path} is not a whole GGUF file ({error}); export it again") from None
    return {name.removeprefix(PREFIX): torch.from_numpy(array) for name, array in arrays.items()}


def refuse_anothers(path: Path, run: str, outcome: str) -> None:
    """Stop if a file is there and another run's.

    Raises:
        TrainerError: it is; with the outcome of this.
    """
    if not path.exists():
        return
    try:
        owner = read_keys(path).get("adapter.run")
    except (OSError, ValueError, IndexError, KeyError):
        return  # a broken file is nobody's
    if owner != run:
        raise TrainerError(
            f"{path} belongs to {f'run {owner}' if owner else 'another program'}, not to run {run}: {outcome}; "
            "set export.name or export.dir to something else"
        )


def export_best(settings: Settings, materials: list[dict[str, Any]], best: Path, out: Path) -> None:
    """Write the best checkpoint as the run's adapter file, and copy it to `export.copy_to`.

    Raises:
        TrainerError: as `write`; or the copy cannot be made.
    """
    tensors, meta = checkpoints.load(best)
    adapter = checkpoints.exported(*checkpoints.unpack(tensors))
    with copied(settings, out):
        write_adapter(out, adapter, keys(settings, adapter, meta, materials, "best", snapshot=False))


def export_companion(settings: Settings, record: Record, out: Path) -> None:
    """Write the file that goes with the adapter, and copy it to `export.copy_to`.

    It holds the material's tensors under their own names, all of them in f16.

    Raises:
        TrainerError: as `write`; or a value that f16 cannot hold, or the copy cannot be made.
    """
    weights = [Path(record.path) / file["name"] for file in record.files if file["name"].endswith(".safetensors")]
    values = {
        "general.name": out.name.removesuffix("-f16.gguf"),
        "adapter.pack": settings.pack,
        "adapter.trainer": "gguf-trainer",
        "adapter.trainer_version": __version__,
        "adapter.run": settings.run,
        "companion.id": record.id,
        "companion.repository": record.repository,
        "companion.revision": record.revision,
        "companion.digest": record.digest,
    }
    holders = {}
    for path in weights:
        with safe_open(path, "pt") as file:
            holders |= dict.fromkeys(file.keys(), path)

    def tensor(name: str) -> torch.Tensor:
        with safe_open(holders[name], "pt") as file:  # opened anew: a mapping that stays would grow to the whole file
            half = file.get_tensor(name).half()
        if not torch.isfinite(half).all():
            raise TrainerError(
                f"tensor {name} of {record.path} has a value that f16 cannot hold: no {out.name} was written; set "
                "export.companion to false to go on without it"
            )
        return half

    with copied(settings, out):
        write(out, sorted(holders), tensor, {key: value for key, value in values.items() if value is not None})


@contextmanager
def copied(
    settings: Settings, *written: Path, refuse: Callable[[Path, str | None, str], None] = refuse_anothers
) -> Iterator[None]:
    """Write files within; they are then copied to `export.copy_to`, where no other run's may be (see `refuse`)."""
    folder = Path(settings.export.copy_to).expanduser() if settings.export.copy_to else None
    if folder:
        for path in written:
            refuse(folder / path.name, settings.run, "nothing was written")
    yield
    if folder:
        try:
            for path in written:
                with written_whole(folder / path.name) as aside:
                    shutil.copyfile(path, aside)
        except OSError as error:
            raise TrainerError(f"export.copy_to cannot be used ({error}): name a folder you can write to") from None
