"""Qwen3-VL on the executor: transformers' own rows, for both models of the engine, in any batch and memory."""

import json
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from trainer import reference_images, teachers
from trainer.chat_templates import Chat, Prompt, Slots
from trainer.devices import GIB, Budget
from trainer.errors import TrainerError
from trainer.streaming import Activations, Executor, Part, State
from trainer.teachers.qwen3_vl import Qwen3Vl
from transformers import Qwen3Config, Qwen3Model, Qwen3VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

KINDS = ("qwen3_vl_mageflow", "qwen3_vl_qwen_image")
PICTURE = 299
# Rows and columns of tokens of each sample's pictures: one, two, none, and one behind a text of another length.
GRIDS = [[(2, 3)], [(3, 2), (1, 4)], [], [(1, 1)]]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.qwen3_vl_snapshot(tmp_path_factory.mktemp("qwen3_vl"))
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture(scope="module")
def reference(snapshot: Path) -> Qwen3VLModel:
    return Qwen3VLModel.from_pretrained(snapshot).eval()


@pytest.fixture(scope="module", params=KINDS)
def teacher(request: pytest.FixtureRequest, snapshot: Path) -> Qwen3Vl:
    return teachers.load(request.param, snapshot, torch.float32)


def samples() -> list[Prompt]:
    random = np.random.default_rng(0)
    made = []
    for number, grids in enumerate(GRIDS):
        ids, slots = random.integers(0, PICTURE, 3 + 2 * number).tolist(), []
        for rows, columns in grids:
            slots.append(Slots(len(ids), rows, columns))
            ids += [PICTURE] * (rows * columns) + random.integers(0, PICTURE, 4).tolist()
        made.append(Prompt(ids, 2, tuple(slots)))
    return made


def patches() -> list[Tensor]:
    """What the tower reads of every picture of `GRIDS`."""
    random = np.random.default_rng(1)
    sizes = [(32 * rows, 32 * columns, 3) for rows, columns in chain(*GRIDS)]
    return [torch.from_numpy(reference_images.patches(random.normal(size=size).astype(np.float32))) for size in sizes]


def run(teacher: Qwen3Vl, parts: list[Part], states: list[State], folder: Path, ram: int = GIB) -> list[State]:
    executor = Executor("teacher", parts, teacher.weights, torch.device("cpu"), Budget(ram, ram))
    assert executor.resident == (ram == GIB)
    kept = Activations(states.__getitem__, [f"batch{n}" for n in range(len(states))], folder / "kept")
    list(executor.run(kept, lambda number, state: state, lambda: False, lambda number: None))
    return [kept.state(number) for number in range(len(states))]


def see(teacher: Qwen3Vl, folder: Path, ram: int = GIB) -> list[list[State]]:
    """What the tower makes of each sample's pictures, those of six tokens together although their sides differ."""
    wide, high, long, small = patches()
    grids = [2 * torch.tensor(grid) for grid in chain(*GRIDS)]
    states = [
        {"patches": torch.stack([wide, high]), "grid": torch.stack(grids[:2])},
        {"patches": long[None], "grid": grids[2][None]},
        {"patches": small[None], "grid": grids[3][None]},
    ]
    both, third, fourth = run(teacher, teacher.vision_parts, states, folder, ram)
    first, second = ({name: tensor[n] for name, tensor in both.items()} for n in range(2))
    third, fourth = ({name: tensor[0] for name, tensor in state.items()} for state in (third, fourth))
    return [[first], [second, third], [], [fourth]]


def grid_thw(grids: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])


@torch.no_grad()
def tower(reference: Qwen3VLModel) -> tuple[Tensor, Tensor]:
    """Rows of all pictures behind each other, and the features beside them."""
    seen = reference.visual(torch.cat(patches()), grid_thw=grid_thw([*chain(*GRIDS)]), return_dict=True)
    return seen.pooler_output, torch.cat(seen.deepstack_features, dim=-1)


def test_the_tower_equals_transformers(teacher: Qwen3Vl, reference: Qwen3VLModel, tmp_path: Path) -> None:
    found = [picture for sample in see(teacher, tmp_path) for picture in sample]
    vision, features = tower(reference)
    torch.testing.assert_close(torch.cat([it["vision"] for it in found]), vision, atol=1e-5, rtol=1e-5)
    assert {("deepstack" in it) for it in found} == {teacher.contract.whole}
    if teacher.contract.whole:
        torch.testing.assert_close(torch.cat([it["deepstack"] for it in found]), features, atol=1e-5, rtol=1e-5)


def test_qwen_image_rows_are_the_whole_model_before_its_final_norm(
    snapshot: Path, reference: Qwen3VLModel, tmp_path: Path
) -> None:
    teacher = teachers.load("qwen3_vl_qwen_image", snapshot, torch.float32)
    prompts = samples()
    state = teacher.batch(prompts, see(teacher, tmp_path))
    mask = torch.arange(state["ids"].shape[1]) < torch.tensor([[len(prompt.ids)] for prompt in prompts])
    before_norm = []
    hook = reference.language_model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        reference(
            input_ids=state["ids"],
            attention_mask=mask.long(),
            mm_token_type_ids=(state["ids"] == PICTURE).int(),
            pixel_values=torch.cat(patches()),
            image_grid_thw=grid_thw([*chain(*GRIDS)]),
        )
    hook.remove()
    (found,) = run(teacher, teacher.parts, [state], tmp_path)
    torch.testing.assert_close(found["rows"][mask], before_norm[0][mask], atol=1e-5, rtol=1e-5)


def test_mageflow_rows_are_those_of_a_plain_qwen3_with_embeddings_replaced(
    snapshot: Path, reference: Qwen3VLModel, tmp_path: Path
) -> None:
    teacher = teachers.load("qwen3_vl_mageflow", snapshot, torch.float32)
    text = reference.config.text_config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps")
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    plain = Qwen3Model(Qwen3Config(**{name: getattr(text, name) for name in names}, rope_parameters=rope)).eval()
    plain.load_state_dict(reference.language_model.state_dict())
    prompts = samples()
    (found,) = run(teacher, teacher.parts, [teacher.batch(prompts, see(teacher, tmp_path))], tmp_path)
    vision, _ = tower(reference)
    with torch.no_grad():
        for rows, prompt in zip(found["rows"], prompts, strict=True):
            ids = torch.tensor([prompt.ids])
            embeddings = plain.embed_tokens(ids)
            count = len(prompt.under_pictures)
            embeddings[ids == PICTURE], vision = vision[:count], vision[count:]
            expected = plain(inputs_embeds=embeddings).last_hidden_state[0]
            torch.testing.assert_close(rows[: len(prompt.ids)], expected, atol=1e-5, rtol=1e-5)
    assert not len(vision)


def test_real_prompts_and_pictures_come_out_as_from_transformers_own_processor(tmp_path: Path) -> None:
    """From two pictures and a text to rows, with Qwen's own ids."""
    if not tiny_models.shared("tokenizers/qwen2/merges.txt"):
        pytest.skip("no shared/tokenizers beside the checkout")
    files = tiny_models.qwen2_tokenizer(tmp_path / "qwen2", merges=None)
    path = tiny_models.qwen3_vl_snapshot(tmp_path / "snapshot", hidden=16, vocabulary=151674, picture_id=151655)
    teacher = teachers.load("qwen3_vl_qwen_image", path, torch.float32)
    contract = teacher.contract
    chat = Chat(contract.template, Tokenizer.from_file(str(files / "tokenizer.json")), files)
    random = np.random.default_rng(2)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in ((64, 96), (128, 64))]
    sizes = [contract.size(*image.shape[:2], image.size // 3) for image in images]
    (prompt,) = chat.prompts(["blend both"], [[(high // 32, wide // 32) for high, wide in sizes]])
    states = [
        {
            "patches": torch.from_numpy(reference_images.patches(contract.pixels(image, size)))[None],
            "grid": torch.tensor([size]) // 16,
        }
        for image, size in zip(images, sizes, strict=True)
    ]
    seen = run(teacher, teacher.vision_parts, states, tmp_path)
    pictures = [{name: tensor[0] for name, tensor in state.items()} for state in seen]
    (found,) = run(teacher, teacher.parts, [teacher.batch([prompt], [pictures])], tmp_path)

    half = (0.5, 0.5, 0.5)
    processor = Qwen2VLImageProcessorPil(do_resize=False, image_mean=half, image_std=half, patch_size=16)
    ids = torch.tensor([prompt.ids])
    whole = Qwen3VLModel.from_pretrained(path).eval()
    whole.language_model.norm = torch.nn.Identity()
    with torch.no_grad():
        expected = whole(
            input_ids=ids, mm_token_type_ids=(ids == 151655).int(), **processor(images=images, return_tensors="pt")
        )
    torch.testing.assert_close(found["rows"], expected.last_hidden_state, atol=1e-5, rtol=1e-5)


def test_positions_are_those_of_transformers(snapshot: Path, reference: Qwen3VLModel) -> None:
    teacher = teachers.load("qwen3_vl_qwen_image", snapshot, torch.float32)
    for prompt, grids in zip(samples(), GRIDS, strict=True):
        ids = torch.tensor([prompt.ids])
        expected, _ = reference.get_rope_index(ids, (ids == PICTURE).int(), grid_thw(grids) if grids else None)
        nothing = {"vision": torch.empty(0, teacher.dim), "deepstack": torch.empty(0, 2 * teacher.dim)}
        state = teacher.batch([prompt], [[nothing]])
        assert torch.equal(state["positions"], expected.permute(1, 2, 0))


def test_a_sample_alone_equals_itself_in_a_batch(teacher: Qwen3Vl, tmp_path: Path) -> None:
    prompts, seen = samples(), see(teacher, tmp_path)
    (together,) = run(teacher, teacher.parts, [teacher.batch(prompts, seen)], tmp_path / "a")
    alone = [teacher.batch([prompt], [sample]) for prompt, sample in zip(prompts, seen, strict=True)]
    assert alone[2]["vision"].shape == (1, 0, teacher.dim)
    for number, state in enumerate(run(teacher, teacher.parts, alone, tmp_path / "b")):
        rows = together["rows"][number, : len(prompts[number].ids)]
        torch.testing.assert_close(state["rows"][0], rows, atol=1e-5, rtol=1e-5)


def test_streamed_equals_resident_to_the_bit(teacher: Qwen3Vl, tmp_path: Path) -> None:
    ram = [int(1.1 * max(part.bytes for part in parts) / 0.75) for parts in (teacher.vision_parts, teacher.parts)]
    seen, streamed = see(teacher, tmp_path / "a"), see(teacher, tmp_path / "b", ram[0])
    for whole, piecewise in zip(chain(*seen), chain(*streamed), strict=True):
        assert all(torch.equal(whole[name], piecewise[name]) for name in whole)
    states = [teacher.batch(samples(), seen), teacher.batch(samples()[2:3], [[]])]
    resident = run(teacher, teacher.parts, states, tmp_path / "c")
    for whole, piecewise in zip(resident, run(teacher, teacher.parts, states, tmp_path / "d", ram[1]), strict=True):
        assert torch.equal(whole["rows"], piecewise["rows"])


def test_a_batch_can_be_split(teacher: Qwen3Vl, tmp_path: Path) -> None:
    """The executor takes pieces where memory runs out: also one whose samples have no pictures."""
    prompts, seen = samples(), see(teacher, tmp_path)
    state = teacher.batch([prompts[n] for n in (2, 2, 0, 1)], [seen[n] for n in (2, 2, 0, 1)])
    executor = Executor("teacher", teacher.parts, teacher.weights, torch.device("cpu"), Budget(GIB, GIB))
    rows = []
    for splits in (1, 2):
        executor._splits = splits
        kept = Activations([state].__getitem__, ["batch"], tmp_path / f"{splits}")
        list(executor.run(kept, lambda number, state: state, lambda: False, lambda number: None))
        rows.append(kept.state(0)["rows"])
    torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)


def test_pictures_change_the_rows_behind_them_only(teacher: Qwen3Vl, tmp_path: Path) -> None:
    prompt, seen = samples()[0], see(teacher, tmp_path)[0]
    other = [{name: tensor.flip(0) for name, tensor in picture.items()} for picture in seen]
    (found,) = run(teacher, teacher.parts, [teacher.batch([prompt, prompt], [seen, other])], tmp_path)
    first, second = found["rows"]
    start = prompt.pictures[0].start
    assert torch.equal(first[:start], second[:start])
    assert (first[start:] - second[start:]).abs().amax(-1).min() > 1e-3


def test_sizes_and_embeddings_are_told(teacher: Qwen3Vl, snapshot: Path, reference: Qwen3VLModel) -> None:
    assert (teacher.dim, teacher.vision_dim, teacher.ids) == (32, 32, 300)
    table = teachers.embeddings("qwen3_vl_mageflow", snapshot)
    assert torch.equal(table, reference.get_input_embeddings().weight)


def test_bf16_is_close(snapshot: Path, tmp_path: Path) -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        teacher = teachers.load("qwen3_vl_qwen_image", snapshot, dtype)
        state = teacher.batch(samples()[:1], see(teacher, tmp_path / f"{dtype}")[:1])
        assert state["vision"].dtype == dtype
        rows += [run(teacher, teacher.parts, [state], tmp_path / f"{dtype}")[0]["rows"]]
    assert rows[1].dtype == torch.bfloat16
    assert torch.cosine_similarity(rows[0], rows[1].float(), dim=-1).min() > 0.99


def test_unfit_snapshots_are_refused(snapshot: Path, tmp_path: Path) -> None:
    def refusal(kind: str, path: Path, dtype: torch.dtype = torch.float32) -> str:
        with pytest.raises(TrainerError) as caught:
            teachers.load(kind, path, dtype)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "may overflow in f16" in refusal(KINDS[0], snapshot, torch.float16)
    folder = tmp_path / "copy"
    shutil.copytree(snapshot, folder)
    config = json.loads((folder / "config.json").read_text())
    for changes, says in (
        ({"model_type": "qwen2_5_vl"}, "holds a model of the type qwen2_5_vl, not qwen3_vl"),
        ({"vision_config": config["vision_config"] | {"patch_size": 14}}, "has 14 as vision_config.patch_size where"),
        ({"vision_config": config["vision_config"] | {"depth": 4}}, "lacks the weights model.visual.blocks.3."),
        ({"text_config": config["text_config"] | {"intermediate_size": 64}}, "does not belong to a model of its"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        assert says in refusal(KINDS[0], folder)
    (folder / "config.json").write_text(json.dumps(config))
    file = next(file for file in folder.glob("*.safetensors") if _holds(file, "deepstack_merger_list.1.norm.weight"))
    tensors = load_file(file)
    save_file({name: it for name, it in tensors.items() if "deepstack_merger_list.1" not in name}, file)
    assert "lacks the weights model.visual.deepstack_merger_list.1." in refusal(KINDS[1], folder)
    teachers.load(KINDS[0], folder, torch.float32)  # MageFlow reads no such features


def _holds(file: Path, name: str) -> bool:
    with safe_open(file, "pt") as opened:
        return any(key.endswith(name) for key in opened.keys())  # noqa: SIM118
