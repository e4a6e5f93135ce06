"""Which caption belongs to which picture of a folder: the documented order, and nothing passed over in silence."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.errors import TrainerError
from trainer.lora import captions

PROMPT = "a photo of sks"


def folder(root: Path, **files: bytes | str | list) -> Path:
    """A folder of files, `__` for the dot of a name; lists are lines of JSON. Pictures are never opened here."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        (root / name.replace("__", ".")).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def found(root: Path, **changes) -> captions.Captions:
    return captions.discover(str(root), "pictures.folder", **changes)


def one(root: Path, **changes) -> tuple[str | None, str]:
    """Caption and origin of the only picture."""
    (picture,) = found(root, **changes).pictures
    return picture.text, picture.origin


def reasons(listed: captions.Captions) -> dict[str, str]:
    return {row["file"]: row["reason"] for row in listed.skipped}


LINE = [{"file_name": "a.png", "text": "from metadata"}]

CASES = {
    "a .txt beside it": ({"a__txt": " a dog \n"}, {}, ("a dog", "sidecar")),
    "a .caption beside it": ({"a__caption": "a dog"}, {}, ("a dog", "sidecar")),
    "the .txt before the .caption": ({"a__caption": "two", "a__txt": "one"}, {}, ("one", "sidecar")),
    "a sidecar before metadata": ({"a__caption": "one", "metadata__jsonl": LINE}, {}, ("one", "sidecar")),
    "an empty sidecar for metadata": ({"a__txt": " \n", "metadata__jsonl": LINE}, {}, (None, "")),
    "an empty sidecar for metadata, not for the prompt": (
        {"a__txt": "", "metadata__jsonl": LINE},
        {"instance_prompt": PROMPT},
        (PROMPT, "instance prompt"),
    ),
    "file_name in metadata": ({"metadata__jsonl": LINE}, {}, ("from metadata", "metadata.jsonl")),
    "image in metadata": (
        {"metadata__jsonl": [{"image": "a.png", "text": "by image"}]},
        {},
        ("by image", "metadata.jsonl"),
    ),
    "file in metadata, as a path": (
        {"metadata__jsonl": [{"file": "./a.png", "text": "by file"}]},
        {},
        ("by file", "metadata.jsonl"),
    ),
    "a path of elsewhere in metadata": (
        {"metadata__jsonl": [{"file": "train/sub\\a.png", "text": "by base"}]},
        {},
        ("by base", "metadata.jsonl"),
    ),
    "captions.jsonl": (
        {"captions__jsonl": [{"file_name": "a.png", "text": "second"}]},
        {},
        ("second", "captions.jsonl"),
    ),
    "metadata.jsonl before captions.jsonl": (
        {"metadata__jsonl": LINE, "captions__jsonl": [{"file_name": "a.png", "text": "second"}]},
        {},
        ("from metadata", "metadata.jsonl"),
    ),
    "another column": (
        {"metadata__jsonl": [{"file_name": "a.png", "text": "no", "tags": "a dog"}]},
        {"column": "tags"},
        ("a dog", "metadata.jsonl"),
    ),
    "null and blank in metadata": (
        {"metadata__jsonl": [{"file_name": "a.png", "text": None}, {"file_name": "a.png", "text": " "}]},
        {"instance_prompt": PROMPT},
        (PROMPT, "instance prompt"),
    ),
    "metadata before the prompt": (
        {"metadata__jsonl": LINE},
        {"instance_prompt": PROMPT},
        ("from metadata", "metadata.jsonl"),
    ),
    "the prompt alone": ({}, {"instance_prompt": PROMPT}, (PROMPT, "instance prompt")),
    "nothing": ({}, {}, (None, "")),
    "marks and line ends of Windows": ({"a__txt": b"\xef\xbb\xbfa dog\r\nruns\r\n"}, {}, ("a dog\nruns", "sidecar")),
}


@pytest.mark.parametrize("case", CASES)
def test_captions_are_found_in_the_documented_order(tmp_path, case):
    files, changes, expected = CASES[case]
    root = folder(tmp_path, a__png="", **files)
    assert one(root, **changes) == expected
    assert not found(root, **changes).faults


def test_captions_that_disagree_are_listed_and_those_that_agree_are_not(tmp_path):
    same = [{"file_name": "a.png", "text": "one"}, {"file_name": "b.png", "text": "b"}]
    other = [{"file_name": "a.png", "text": "two"}]
    root = folder(
        tmp_path, a__png="", b__png="", a__txt="one\n", a__caption="three", metadata__jsonl=same, captions__jsonl=other
    )
    listed = found(root)
    assert [row["passed_over"] for row in listed.disagreements] == ["a.caption", "captions.jsonl, line 1"]
    assert {row["file"] for row in listed.disagreements} == {"a.png"}
    assert {row["taken"] for row in listed.disagreements} == {"a.txt"}
    assert not listed.faults


def test_two_captions_of_one_table_are_a_fault_as_no_order_decides(tmp_path):
    rows = [{"file_name": "a.png", "text": "one"}, {"file": "sub/a.png", "text": "two"}, *LINE]
    assert not found(folder(tmp_path / "agree", a__png="", metadata__jsonl=[*LINE, *LINE])).faults
    # A line of a.png itself, so sub/a.png is another picture.
    (fault,) = found(folder(tmp_path / "exact", a__png="", metadata__jsonl=rows[:2] + rows[:1] + rows[2:])).faults
    assert "line 4 and line 1 give a.png different captions" in fault
    (fault,) = found(
        folder(tmp_path / "base", a__png="", metadata__jsonl=[{"file": f"{n}/a.png", "text": n} for n in "xy"])
    ).faults
    assert '("y", "x")' in fault


@pytest.mark.parametrize("name", ["a.txt", "a.caption", "metadata.jsonl", "captions.jsonl"])
def test_what_is_not_utf8_is_a_fault_with_its_place_and_a_guess(tmp_path, name):
    before = '{"file_name": "b.png", "text": "é"}\n'.encode() if name.endswith(".jsonl") else b""
    data = before + "the dog’s bone".encode("cp1252")
    root = folder(tmp_path, a__png="", **{name.replace(".", "__"): data})
    (fault,) = found(root).faults
    place = f"{name}, line 2" if before else name
    assert fault.startswith(f"{place} is not UTF-8: byte {len(before) + 7} is 0x92 (as cp1252 it says ")
    assert '"the dog’s bone"' in fault
    assert "\n" not in fault


def test_the_byte_is_counted_from_the_files_beginning_also_behind_a_mark(tmp_path):
    root = folder(tmp_path, a__png="", a__txt=b"\xef\xbb\xbfab\x92", b__png="", b__txt="ein Hund".encode("utf-16"))
    folder(root, c__png="", c__txt="ein Fuchs".encode("utf-16-le"))
    first, second, third = found(root).faults
    assert "byte 5 is 0x92" in first
    assert "byte 1 is 0x00" in third
    assert 'as utf-16 it says "ein Fuchs"' in third
    assert 'as utf-16 it says "ein Hund"' in second


def test_lines_that_say_nothing_have_a_row_each(tmp_path):
    lines = [
        "not json",
        "[1, 2]",
        '{"text": "no file"}',
        '{"file_name": "a.png", "text": null}',
        '{"file_name": "gone.png", "text": "lost"}',
        '{"file_name": "a.png", "text": "\\ud83d"}',
        "",
        '{"file_name": "a.png", "text": "line\u2028separator"}',
        "[" * 100_000,
    ]
    listed = found(folder(tmp_path, a__png="", metadata__jsonl="\r\n".join(lines)))
    told = {row: reason.partition(" (")[0] for row, reason in reasons(listed).items()}
    assert told == {
        "metadata.jsonl, line 1": "no JSON",
        "metadata.jsonl, line 2": "no JSON object",
        "metadata.jsonl, line 3": "no file under file_name, image, file",
        "metadata.jsonl, line 4": "no caption of a.png under `text`",
        "metadata.jsonl, line 5": "names gone.png, and there is no such picture",
        "metadata.jsonl, line 6": "halves of characters, which are no text",
        "metadata.jsonl, line 9": "no JSON",
    }
    assert listed.pictures[0].text == "line\u2028separator"


def test_files_that_are_not_used_have_a_row_each(tmp_path):
    root = folder(tmp_path, a__png="", a__txt="a", notes__txt="of nothing", other__jsonl="{}", old__caption="x")
    folder(root / "10_sks", b__png="", c__JPG="", d__heic="")
    folder(root / "texts", e__txt="")
    listed = found(root)
    assert [picture.file for picture in listed.pictures] == ["a.png"]
    assert reasons(listed) == {
        "10_sks": f"a folder with 3 pictures: only those directly in {root} are taken",
        "notes.txt": "the caption of no picture",
        "old.caption": "the caption of no picture",
        "other.jsonl": "of .jsonl files only metadata.jsonl and captions.jsonl are read",
    }


def test_pictures_of_other_formats_are_told_of_with_their_captions_unlisted(tmp_path):
    lines = [{"file_name": "c.avif", "text": "c"}]
    files = {"a.png": "", "b.HEIC": "", "b.txt": "b", "c.avif": "", "d.gif": "", "e.tiff": "", "metadata.jsonl": lines}
    listed = found(folder(tmp_path, **files))
    assert [row["file"] for row in listed.unreadable] == ["b.HEIC", "c.avif", "d.gif", "e.tiff"]
    assert listed.unreadable[0]["reason"] == "HEIC is not read: convert it to PNG or JPEG"
    assert not listed.skipped


def test_files_of_apple_and_hidden_ones_are_no_pictures(tmp_path):
    root = folder(tmp_path, a__png="", a__txt="a")
    folder(root, **{"._a.png": "", "._a.txt": b"\x92", ".b.png": "", "._metadata.jsonl": b"\xff"})
    listed = found(root)
    assert [picture.file for picture in listed.pictures] == ["a.png"]
    assert not listed.faults
    assert not listed.skipped


def test_stems_that_only_look_alike_are_different_ones(tmp_path):
    names = {"straße.png": "", "strasse.png": "", "a.b.png": "", "a.c.png": "", "a.b.txt": "of b"}
    listed = found(folder(tmp_path, **names))
    assert not listed.faults
    assert {picture.file: picture.text for picture in listed.pictures}["a.b.png"] == "of b"


def test_two_pictures_of_one_stem_and_stems_that_differ_by_case_are_faults(tmp_path):
    root = folder(tmp_path, a__png="", a__jpg="", B__png="", b__webp="", c__txt="c", C__png="")
    case, stems, sidecar = found(root).faults
    assert stems == "a.jpg, a.png have one stem, so that captions could be of either; rename all but one"
    assert case == "B.png, b.webp differ by case only; rename all but one"
    assert sidecar == "c.txt and the picture C.png differ by case; rename one of them"


def test_accents_may_be_composed_in_one_name_and_not_in_the_other(tmp_path):
    root = folder(tmp_path, **{"cafe\u0301__png": "", "caf\u00e9__txt": "a café", "e\u0300__png": ""})
    folder(root, metadata__jsonl=[{"file_name": "\u00e8.png", "text": "from metadata"}])
    assert [picture.text for picture in found(root).pictures] == ["a café", "from metadata"]


def test_masks_go_with_their_pictures_and_are_none_themselves(tmp_path):
    root = folder(tmp_path, **{"a.png": "", "a-mask.png": "", "b.jpg": "", "gas-mask.jpg": ""})
    listed = found(root, masks=True)
    assert {picture.file: picture.mask for picture in listed.pictures} == {
        "a.png": "a-mask.png",
        "b.jpg": None,
        "gas-mask.jpg": None,
    }
    off = found(root, instance_prompt=PROMPT)
    assert [picture.file for picture in off.pictures] == ["a.png", "b.jpg", "gas-mask.jpg"]
    assert reasons(off) == {"a-mask.png": "the mask of a.png, and pictures.masks is off"}
    (fault,) = found(folder(root, **{"c-mask.png": ""}), masks=True).faults
    assert fault.startswith("c-mask.png is the mask of no picture")
    assert "c-mask.png" in [picture.file for picture in found(root).pictures]


def test_a_folder_that_is_not_there_is_named_with_its_setting(tmp_path):
    with pytest.raises(TrainerError, match=r"none does not exist; correct its path in pictures\.folder"):
        found(tmp_path / "none")


def test_a_link_to_nothing_is_a_picture_that_cannot_be_read_not_none(tmp_path):
    root = folder(tmp_path, a__png="")
    (root / "b.png").symlink_to(tmp_path / "gone.png")
    assert [picture.file for picture in found(root).pictures] == ["a.png", "b.png"]


def test_names_that_are_no_text_can_be_told(tmp_path):
    root = folder(tmp_path, a__png="")
    try:
        Path(os.fsdecode(os.fsencode(root) + b"/na\xefve.txt")).write_bytes(b"\x92")
    except OSError:
        pytest.skip("this file system takes only names that are text")
    assert reasons(found(root)) == {"na\\xefve.txt": "the caption of no picture"}


def test_the_digest_of_a_folder_changes_with_every_file_that_captions_come_from(tmp_path):
    root = folder(tmp_path, a__png="")
    seen = {captions.folder_digest(str(root), "pictures.folder")}
    for name in ("a.txt", "a.caption", "metadata.jsonl", "b.HEIC", "a-mask.png"):
        (root / name).write_bytes(b"x")
        seen.add(captions.folder_digest(str(root), "pictures.folder"))
    assert len(seen) == 6


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_whatever_is_in_the_files_every_picture_has_its_row_and_messages_can_be_written(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("any")
    names = ["a.png", "b.jpg", "C.webp", "c.bmp"]
    values = st.one_of(
        st.none(), st.integers(), st.text(max_size=8), st.sampled_from([*names, "./a.png", "x/b.jpg", "a dog"])
    )
    row = st.dictionaries(st.sampled_from(["file_name", "image", "file", "text"]), values)
    lines = st.lists(st.one_of(row.map(json.dumps), st.text(max_size=12)), max_size=6).map("\n".join)
    texts = st.one_of(st.binary(max_size=12), st.text(max_size=12).map(lambda text: text.encode("utf-8", "replace")))
    tables = lines.map(lambda text: text.encode("utf-8", "surrogatepass"))
    files = dict.fromkeys(names, b"")
    files |= data.draw(st.dictionaries(st.sampled_from(["a.txt", "a.caption", "b.TXT", "c.txt", "d.txt"]), texts))
    files |= data.draw(st.dictionaries(st.sampled_from(["metadata.jsonl", "captions.jsonl"]), tables))
    for name, content in files.items():
        (root / name).write_bytes(content)
    listed = found(root, instance_prompt=data.draw(st.sampled_from([None, PROMPT])))
    assert [picture.file for picture in listed.pictures] == sorted(names)
    told = [*listed.faults, *(picture.text or "" for picture in listed.pictures)]
    told += [text for row in listed.skipped + listed.disagreements for text in row.values()]
    assert "".join(told).encode()
    assert all("\n" not in fault for fault in listed.faults)
    assert listed.faults or all(picture.text is None or picture.text.strip() for picture in listed.pictures)
