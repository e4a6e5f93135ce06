"""The teacher of LLaDA-Image-Turbo: QueryFormer, LLaDA2-MoE backbone and text projection."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from trainer import teachers
from trainer.errors import TrainerError
from trainer.streaming import Part
from trainer.teachers import configs, llada2_moe, llada_connector
from trainer.weights import Weights

_LONGEST = 2048  # ids; the pipeline cuts there, the end of the template included


class Llada:
    """Rows are what the queries became: as many for every prompt, whatever its length."""

    vocabulary = None

    def __init__(self, tokenizer: Tokenizer, weights: Weights, parts: list[Part], rows: int, dim: int) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(_LONGEST)
        self.weights = weights
        self.parts = parts
        self.rows = rows
        self.dim = dim

    def tokenize(self, prompts: list[str], queries: int) -> list[list[int]]:
        """Ids of each prompt; `queries` limits nothing here."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(prompts, add_special_tokens=True)]


def load(path: Path, dtype: torch.dtype) -> Llada:
    """Describe the teacher of a snapshot; its weights stay in their files.

    Raises:
        TrainerError: the snapshot is incomplete, its parts do not fit together, or the dtype is f16.
    """
    if dtype == torch.float16:
        raise TrainerError(
            "a LLaDA teacher was trained in bf16 and may overflow in f16; set precompute.teacher_dtype to auto, bf16 "
            "or f32"
        )
    main = path / "text_encoder" / "config.json"
    backbone = configs.read(main, llada2_moe.Config)
    former = configs.read(path / "queryformer" / "config.json", llada_connector.QueryFormerConfig)
    projection = configs.read(path / "text_projection" / "config.json", llada_connector.ProjectionConfig)
    sizes = [config.hidden_size for config in (backbone, former, projection)]
    if len(set(sizes)) > 1:
        raise TrainerError(
            f"text_encoder, queryformer and text_projection in {path} have the hidden sizes {sizes}, which have to be "
            "the same; get the teacher again"
        )
    llada2_moe.check_rope(llada2_moe.rope_table(backbone.rope_theta, backbone.rotary_dim), main)
    tokenizer = _tokenizer(path / "tokenizer" / "tokenizer.json")
    teachers.check_vocabulary(path, tokenizer.get_vocab_size(), backbone.vocab_size)
    weights = Weights(path, ("text_encoder", "queryformer", "text_projection"))
    parts = _parts(backbone, former, projection, dtype)
    return Llada(tokenizer, weights, parts, former.num_queries, projection.projection_dim)


def _parts(
    backbone: llada2_moe.Config,
    former: llada_connector.QueryFormerConfig,
    projection: llada_connector.ProjectionConfig,
    dtype: torch.dtype,
) -> list[Part]:
    queries = former.num_queries
    with torch.device("meta"):
        embedding = llada2_moe.Embedding(backbone, dtype)
        query_former = llada_connector.QueryFormer(former, dtype)
        layers = [llada2_moe.Layer(backbone, n, queries, dtype) for n in range(backbone.num_hidden_layers)]
        norm = llada2_moe.RMSNorm(backbone.hidden_size, backbone.rms_norm_eps, dtype)
        text_projection = llada_connector.TextProjection(projection, norm, queries, dtype)
    return [
        Part("embed", embedding, teachers.sources(embedding, "text_encoder/model.")),
        Part("queries", query_former, teachers.sources(query_former, "queryformer/")),
        *(
            Part(f"layer {n}", layer, layer.sources(f"text_encoder/model.layers.{n}."))
            for n, layer in enumerate(layers)
        ),
        # All of the projection together is smaller than one layer of experts.
        Part(
            "projection",
            text_projection,
            teachers.sources(text_projection, "text_projection/")
            | {"norm.weight": ("text_encoder/model.norm.weight",)},
        ),
    ]


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other class
        raise TrainerError(f"{path} cannot be loaded ({error}); get the teacher again") from error
