"""The sets of captioned pictures that can be downloaded, as materials."""

from trainer.packs.base import Material

# Repository, commit, files, GB. A branch is pinned to its commit by the first run.
_PICTURE_SETS = {
    "flickr30k": (
        "nlphuji/flickr30k",
        "2b239befc81b6e3f035ce6bd52f5f4d60f5625f7",
        ("flickr30k-images.zip", "flickr_annotations_30k.csv"),
        4.4,
    ),
    "coco_captions": ("Multimodal-Fatima/COCO_captions_train", "main", ("data/*.parquet",), 17.0),
}


def picture_material(preset: str) -> Material:
    """The material of a picture preset."""
    repository, revision, patterns, gigabytes = _PICTURE_SETS[preset]
    return Material(
        id=f"images-{preset}",
        kind="hub",
        title=f"{preset} pictures",
        role="images",
        repository=repository,
        revision=revision,
        patterns=patterns,
        gigabytes=gigabytes,
    )
