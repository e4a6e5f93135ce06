"""Precompute of packs with pictures: rows are those of the models alone, bad pictures cost their samples only."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import tiny_pictures
import tiny_runs
import torch
import yaml
from PIL import Image
from test_precompute import Asked
from tokenizers import Tokenizer
from torch import Tensor
from trainer import (
    checkpoints,
    config,
    packs,
    pictures,
    precompute_pictures,
    reference_areas,
    reference_images,
    shards,
    students,
    teachers,
    vision_proj,
)
from trainer.chat_templates import Chat, Prompt
from trainer.config import Settings
from trainer.errors import StoppedError, TrainerError
from trainer.materials import Record
from transformers import Qwen3Config, Qwen3Model, Qwen3VLModel
from workflow import CHECKOUT

PACKS = ("mageflow", "qwen_image")
IDS, PAD, DIM = 151674, 151655, 32
# Width and height; the last is stored lying on its side.
SIZES = [(96, 64), (64, 96), (128, 128), (60, 50), (300, 40), (70, 110)]
TURNED = len(SIZES) - 1
TEXTS = ["a red fox", "", "turn the sky green and add a small boat", "x", "make it a watercolour of a lighthouse"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    if not tiny_models.shared("tokenizers/qwen2/merges.txt"):
        pytest.skip("no shared/tokenizers beside the checkout")
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "teacher": tiny_models.qwen3_vl_snapshot(
            folder / "teacher", hidden=DIM, vocabulary=IDS, picture_id=PAD, max_shard_size="8MB"
        ),
        "tokenizer": tiny_models.qwen2_tokenizer(folder / "tokenizer", merges=None),
        "student": tiny_models.student_gguf(folder / "pig_clip.gguf", tiny_models.qwen3(hidden=DIM, vocabulary=IDS)),
    }
    return {
        id: Record(id, "file", id, id, str(path), "path", None, None, None, None, [], f"digest-{id}")
        for id, path in paths.items()
    }


@pytest.fixture(scope="module")
def projection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "vision_proj.safetensors"
    checkpoints.save(path, {"weight": vision_proj.made_up(DIM, DIM)}, {"fit": None})
    return path


def settings(folder: Path, pack: str, **options: object) -> Settings:
    options = {
        "device": "cpu",
        "batch_tokens": 400,
        "block_shards": 2,
        "teacher_dtype": "f32",
        "student_dtype": "f32",
        "reference_areas": [[4096, 0.5], [16384, 0.5]],
        "two_image_max_area": 4096,
        "max_bad_fraction": 0.5,
    } | options
    return config.load(
        {
            "pack": pack,
            "run": "r",
            "runs_dir": str(folder),
            "corpus": {"image_folders": ["pictures"], "n_image": 20, "n_val_image": 2},
            "adapter": {"width": 64, "depth": 1, "student_dim": DIM, "teacher_dim": DIM, "vision_dim": DIM},
            "precompute": options,
        }
    )


def corpus(folder: Path, samples: int = 14) -> list[dict]:
    """Samples without a picture, with one and with two; ids are even, so that shard 1 of 2 is empty."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(SIZES):
        image, options = tiny_pictures.picture(number, size), {}
        if number == TURNED:
            image, options = image.transpose(Image.Transpose.ROTATE_90), {"exif": Image.Exif()}
            options["exif"][0x0112] = 6
        (images / f"{number}.png").write_bytes(tiny_pictures.encoded(image, **options))
    rows = []
    for n in range(samples):
        a = n // 4
        shown = [[], [a], [a + 2], [(a + 4) % 6, a + 1]][n % 4]
        names = [f"{number}.png" for number in shown]
        rows.append({"id": f"{2 * n:016x}", "text": TEXTS[n % 5], "source": "s", "images": names})
    write(folder, rows)
    return rows


def write(folder: Path, rows: list[dict]) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fill(
    folder: Path,
    pack: str,
    records: dict,
    projection: Path,
    stop_at: int | None = None,
    blocks: int = 1,
    **options: object,
) -> Path:
    """The first shard of block 0."""
    if not (folder / "train.jsonl").exists():
        corpus(folder)
    block = precompute_pictures.PictureBlock(
        settings(folder, pack, **options), records, Asked(stop_at), 10**9, projection
    )
    block.fill(folder / "shards" / "0000.json", 0, blocks, folder / "train.jsonl")
    return folder / "shards" / "0000-00.safetensors"


@pytest.fixture(scope="module", params=PACKS)
def made(request: pytest.FixtureRequest, tmp_path_factory, records, projection) -> tuple[str, Path, Path]:
    """A pack, a folder and its shard."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, fill(folder, request.param, records, projection)


def shown(row: dict, folder: Path, pack: str, chat: Chat) -> tuple[Prompt, list[Tensor], list[tuple[int, int]]]:
    """A sample's prompt, and its pictures' patches and sizes, from the picture as Pillow opens and turns it."""
    contract = teachers.contract(f"qwen3_vl_{pack}")
    area = reference_areas.draw(row["images"], row["text"], [(4096, 0.5), (16384, 0.5)], 4096)
    images = [np.asarray(pictures.open_rgb(folder / "images" / name)) for name in row["images"]]
    sizes = [contract.size(*image.shape[:2], area) for image in images]
    patches = [
        torch.from_numpy(reference_images.patches(contract.pixels(image, size)))
        for image, size in zip(images, sizes, strict=True)
    ]
    (prompt,) = chat.prompts([row["text"]], [[(high // 32, wide // 32) for high, wide in sizes]])
    return prompt, patches, sizes


@torch.no_grad()
def test_rows_are_those_of_each_sample_alone(made, records: dict, projection: Path) -> None:
    """Teacher: transformers' own classes. Student: its model with embeddings replaced."""
    pack, folder, file = made
    path = Path(records["teacher"].path)
    whole = Qwen3VLModel.from_pretrained(path).eval()
    text = whole.config.text_config
    whole.language_model.norm = torch.nn.Identity() if pack == "qwen_image" else whole.language_model.norm
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps")
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    plain = Qwen3Model(Qwen3Config(**{name: getattr(text, name) for name in names}, rope_parameters=rope)).eval()
    plain.load_state_dict(whole.language_model.state_dict(), strict=pack == "mageflow")
    student = students.load(records["student"].path, "qwen3", torch.float32, "cpu").model
    weight = checkpoints.load(projection)[0]["weight"]
    tokenizer = Tokenizer.from_file(str(Path(records["tokenizer"].path) / "tokenizer.json"))
    chat = Chat(teachers.contract(f"qwen3_vl_{pack}").template, tokenizer, "here")
    shard = shards.Shard(file)
    stored = {rows.id: rows for rows in tiny_runs.read(shard)}
    corpus_rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(stored) == len(corpus_rows) == 14
    for row in corpus_rows:
        found = stored[row["id"]]
        prompt, patches, sizes = shown(row, folder, pack, chat)
        ids = torch.tensor([prompt.ids])
        grid = torch.tensor([[1, high // 16, wide // 16] for high, wide in sizes])
        vision = whole.visual(torch.cat(patches), grid_thw=grid).pooler_output if patches else torch.empty(0, DIM)
        if pack == "qwen_image":
            pixels = {"pixel_values": torch.cat(patches), "image_grid_thw": grid} if patches else {}
            expected = whole(input_ids=ids, mm_token_type_ids=(ids == PAD).int(), **pixels).last_hidden_state[0]
        else:
            embeddings = plain.embed_tokens(ids)
            embeddings[ids == PAD] = vision
            expected = plain(inputs_embeds=embeddings).last_hidden_state[0]
        wanted = chat.supervised(prompt).nonzero()[0].tolist()
        assert found.target_at == wanted
        assert found.start == prompt.start
        assert found.vision_at == (ids[0] == PAD).nonzero()[:, 0].tolist()
        same(found.target, expected[wanted])
        same(found.vision, vision)
        embeddings = student.embed_tokens(ids)
        embeddings[ids == PAD] = vision @ weight.T
        same(found.student, student(inputs_embeds=embeddings).last_hidden_state[0])
    picture_rows = [len(rows.vision) for rows in stored.values()]
    assert min(picture_rows) == 0
    assert len(set(picture_rows)) > 3
    assert shard.header["rows"] < shard.header["student_rows"] or pack == "mageflow"


def same(found: Tensor, expected: Tensor) -> None:
    """But for bf16's last digit."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=2**-8)


def test_moments_are_those_of_the_rows(made) -> None:
    check_moments(made[2])


def check_moments(file: Path) -> None:
    shard = shards.Shard(file)
    for name in ("student", "target", "vision"):
        rows = torch.cat([getattr(row, name) for row in tiny_runs.read(shard)]).double()
        torch.testing.assert_close(shard.columns[f"{name}_sum"], rows.sum(0))
        torch.testing.assert_close(shard.columns[f"{name}_sumsq"], rows.square().sum(0))


def test_streamed_equals_resident_to_the_bit(made, tmp_path: Path, records: dict, projection: Path) -> None:
    pack, _, file = made
    # The embeddings, the largest part, take 18.6 MiB.
    streamed = fill(tmp_path, pack, records, projection, ram_gib=27 / 1024)
    assert streamed.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(("pack", "ram"), [("mageflow", 0.5), ("qwen_image", 27 / 1024)])
def test_a_block_that_was_stopped_in_any_model_goes_on_there(
    tmp_path: Path, records: dict, projection: Path, pack: str, ram: float
) -> None:
    small = {"ram_gib": ram, "batch_tokens": 150}
    plain = fill(tmp_path / "plain", pack, records, projection, **small).read_bytes()
    places, ended = set(), False
    while not ended:
        try:
            result = fill(tmp_path / "stopped", pack, records, projection, 5, **small)
            ended = True
        except StoppedError:
            places |= {path.parent.name for path in (tmp_path / "stopped" / "shards").glob("*/*/*.safetensors")}
    assert places == {"tower", "student", "teacher"}
    assert result.read_bytes() == plain
    assert not list((tmp_path / "stopped" / "shards").glob("*.partial"))


def test_a_shard_is_the_same_whichever_others_are_made_with_it(tmp_path: Path, records: dict, projection: Path) -> None:
    rows = corpus(tmp_path)
    for n, row in enumerate(rows):
        row["id"] = f"{n:016x}"
    write(tmp_path, rows)
    first = fill(tmp_path, "qwen_image", records, projection)
    second = first.with_name("0000-01.safetensors")
    before = [file.read_bytes() for file in (first, second)]
    for file in (first, second):
        file.unlink()
        fill(tmp_path, "qwen_image", records, projection)
        assert [file.read_bytes() for file in (first, second)] == before


def test_a_picture_without_a_header_is_skipped_before_any_weight_is_read(
    tmp_path: Path, records: dict, projection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = corpus(tmp_path)
    (tmp_path / "images" / "1.png").write_bytes(b"no picture")
    bad = [row["id"] for row in rows if "1.png" in row["images"]]
    file = fill(tmp_path, "qwen_image", records, projection)
    reason = "a picture that cannot be read"
    assert shards.Shard(file).header["skipped"] == [{"id": id, "reason": reason} for id in bad]
    assert len(shards.Shard(file)) == len(rows) - len(bad)
    file.unlink()
    monkeypatch.setattr(students, "load", lambda *a: pytest.fail("the student was loaded"))
    monkeypatch.setattr(precompute_pictures.PictureBlock, "_run", lambda *a: pytest.fail("the tower was loaded"))
    with pytest.raises(
        TrainerError,
        match=f"of 14 samples .* cannot be used .{len(bad)} a picture that cannot be read.*delete .* if pictures",
    ):
        fill(tmp_path, "qwen_image", records, projection, max_bad_fraction=0.1)


@pytest.mark.parametrize("pack", PACKS)
def test_a_picture_that_is_damaged_further_in_costs_its_samples_only(
    tmp_path: Path, records: dict, projection: Path, pack: str, made
) -> None:
    rows = corpus(tmp_path)
    path = tmp_path / "images" / "2.png"
    path.write_bytes(path.read_bytes()[:-200])
    assert pictures.size(path) == (128, 128)
    bad = [row["id"] for row in rows if "2.png" in row["images"]]
    file = fill(tmp_path, pack, records, projection)
    shard = shards.Shard(file)
    assert {item["id"] for item in shard.header["skipped"]} == set(bad)
    assert {item["reason"] for item in shard.header["skipped"]} == {"a picture that cannot be read"}
    assert shard.header["ids"] == [row["id"] for row in rows if row["id"] not in bad]
    check_moments(file)
    if pack == made[0]:
        whole = shards.Shard(made[2])
        kept = {rows.id: rows for rows in tiny_runs.read(whole)}
        for rows in tiny_runs.read(shard):
            assert torch.equal(rows.target, kept[rows.id].target)


def test_a_shard_is_made_again_when_its_pictures_are_there_again(
    tmp_path: Path, records: dict, projection: Path, made
) -> None:
    pack, _, file = made
    corpus(tmp_path)
    path = tmp_path / "images" / "2.png"
    path.rename(tmp_path / "aside")
    assert len(shards.Shard(fill(tmp_path, pack, records, projection))) < 14
    (tmp_path / "aside").rename(path)
    assert fill(tmp_path, pack, records, projection).read_bytes() == file.read_bytes()


def test_a_sample_too_long_for_the_student_is_skipped(tmp_path: Path, records: dict, projection: Path) -> None:
    rows = corpus(tmp_path)
    rows[5]["text"] = "word " * 2400
    write(tmp_path, rows)
    shard = shards.Shard(fill(tmp_path, "qwen_image", records, projection))
    assert shard.header["skipped"] == [{"id": rows[5]["id"], "reason": "longer than 2304 student tokens"}]
    assert len(shard) == 13


def test_rows_of_a_byte_a_value_are_within_half_a_step(made, tmp_path: Path, records: dict, projection: Path) -> None:
    pack, _, file = made
    small = fill(tmp_path, pack, records, projection, storage="int8")
    assert small.stat().st_size < 0.7 * file.stat().st_size
    narrow, wide = shards.Shard(small), shards.Shard(file)
    assert narrow.header["storage"] == "int8"
    for name in ("student", "target", "vision"):
        found, expected = (
            torch.cat([getattr(row, name) for row in tiny_runs.read(it)]).float() for it in (narrow, wide)
        )
        columns = expected.square().mean(0).sqrt()
        steps = (expected / columns).abs().amax(1, keepdim=True) * columns / 127
        # And what bf16 rounds off again.
        assert ((found - expected).abs() <= 0.501 * steps + expected.abs() * 2**-8).all()
        assert tiny_runs.read(narrow)[0].student.dtype == torch.bfloat16
    for mine, other in zip(tiny_runs.read(narrow), tiny_runs.read(wide), strict=True):
        assert (mine.vision_at, mine.target_at, mine.start) == (other.vision_at, other.target_at, other.start)
    check_moments(small)


def test_a_few_large_dimensions_leave_the_others_their_digits_in_a_byte(tmp_path: Path) -> None:
    """As those of Qwen3-VL before its final norm."""
    rows = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    rows[:, [7, 90]] *= 1000
    rows[3] = 0
    sample = shards.Rows("0", [], rows.bfloat16(), rows.bfloat16())
    shards.write(tmp_path / "a.safetensors", [sample], {}, (256, 256), storage="int8")
    found = tiny_runs.read(shards.Shard(tmp_path / "a.safetensors"))[0].target.float()
    assert not found[3].any()
    others = [n for n in range(256) if n not in (7, 90)]
    assert torch.cosine_similarity(found[:, others], rows[:, others])[torch.arange(300) != 3].min() > 0.9997


def test_values_whose_squares_are_too_large_or_small_for_f32_are_kept_in_a_byte(tmp_path: Path) -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    rows[0, 0], rows[:, 5] = 1e20, rows[:, 5] * 1e-25
    sample = shards.Rows("0", [], rows.bfloat16(), rows.bfloat16())
    shards.write(tmp_path / "a.safetensors", [sample], {}, (64, 64), storage="int8")
    found = tiny_runs.read(shards.Shard(tmp_path / "a.safetensors"))[0].target.float()
    assert found.isfinite().all()
    others = [n for n in range(64) if n]
    assert torch.cosine_similarity(found[1:, others], rows[1:, others]).min() > 0.9997


def test_a_synthetic_teacher_needs_no_snapshot_and_shows_pictures(
    tmp_path: Path, records: dict, projection: Path
) -> None:
    own = {id: record for id, record in records.items() if id != "teacher"}
    file = fill(tmp_path, "mageflow", own, projection, teacher="synthetic")
    shard = shards.Shard(file)
    assert shard.header["synthetic"]
    assert len(shard) == 14
    before = {rows.id: rows.target[-1].clone() for rows in tiny_runs.read(shard)}
    check_moments(file)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    first = next(row for row in rows if len(row["images"]) == 1)
    first["images"] = ["5.png"]
    write(tmp_path, rows)
    other = shards.Shard(fill(tmp_path, "mageflow", own, projection, teacher="synthetic"))
    changed = [rows.id for rows in tiny_runs.read(other) if not torch.equal(rows.target[-1], before[rows.id])]
    assert changed == [first["id"]]


def test_what_rows_are_made_from_is_in_the_header(tmp_path: Path, records: dict, projection: Path) -> None:
    headers = {pack: shards.Shard(fill(tmp_path / pack, pack, records, projection)).header for pack in PACKS}
    assert all("vision_proj" in header and "storage" not in header for header in headers.values())
    assert "reference_areas" in headers["qwen_image"]
    assert "reference_areas" not in headers["mageflow"]  # its engine does not scale to an area
    other = tmp_path / "other.safetensors"
    checkpoints.save(other, {"weight": vision_proj.made_up(DIM, DIM)}, {"fit": 0.5})
    shutil.copytree(tmp_path / "mageflow", tmp_path / "again")
    before = (tmp_path / "again" / "shards" / "0000-00.safetensors").stat().st_mtime_ns
    assert fill(tmp_path / "again", "mageflow", records, projection).stat().st_mtime_ns == before
    assert fill(tmp_path / "again", "mageflow", records, other).stat().st_mtime_ns != before


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_bytes_of_a_sample_are_those_that_a_shard_takes(
    tmp_path: Path, records: dict, projection: Path, storage: str
) -> None:
    """But for the header, what each shard has once, and three tensors' last offsets."""
    file = fill(tmp_path, "qwen_image", records, projection, storage=storage)
    shard = shards.Shard(file)
    rows = tiny_runs.read(shard)
    dims = DIM, DIM, DIM
    told = sum(shards.sample_bytes(len(it.student), len(it.target), len(it.vision), dims, storage) for it in rows)
    with open(file, "rb") as stored:
        header = 8 + int.from_bytes(stored.read(8), "little")
    once = 6 * 8 * DIM + 3 * 8 + (3 * 4 * DIM if storage == "int8" else 0)
    assert told == file.stat().st_size - header - once


def default_mix(storage: str, text_tokens: int, instruction_tokens: int, tokenizer: Tokenizer) -> float:
    """GB of both splits of Qwen-Image as the pack ships it, with pictures of 640 x 480."""
    shipped = config.load(yaml.safe_load((CHECKOUT / "packs/qwen_image/pack.yaml").read_text()))
    contract, counts, options = teachers.contract("qwen3_vl_qwen_image"), shipped.corpus, shipped.precompute
    chat = Chat(contract.template, tokenizer, "here")

    def size(tokens: int, pictures: int) -> float:
        areas = [it for it in options.reference_areas if pictures < 2 or it[0] <= options.two_image_max_area]
        total = 0.0
        for area, share in areas:
            high, wide = contract.size(480, 640, area)
            (prompt,) = chat.prompts([" fox" * tokens], [[(high // 32, wide // 32)] * pictures])
            assert len(prompt.ids) <= packs.get("qwen_image").max_student_tokens
            rows = len(prompt.ids), int(chat.supervised(prompt).sum()), len(prompt.under_pictures)
            total += share * shards.sample_bytes(*rows, (1024, 4096, 4096), storage)
        return total / sum(share for _, share in areas)

    one, none = counts.n_image + counts.n_val_image, counts.n_text + counts.n_val_text
    pictures = one * size(instruction_tokens, 1) + counts.n_two * size(instruction_tokens, 2)
    return (pictures + none * size(text_tokens, 0)) / 1e9


def test_the_default_mix_of_qwen_image_takes_less_than_the_reference_and_half_of_that_in_int8(records: dict) -> None:
    tokenizer = Tokenizer.from_file(str(Path(records["tokenizer"].path) / "tokenizer.json"))
    whole, half = (default_mix(storage, 60, 20, tokenizer) for storage in ("bf16", "int8"))
    print(f"{whole:.1f} GB in bf16, {half:.1f} GB in int8")
    assert whole < 170
    assert half < 0.51 * whole
