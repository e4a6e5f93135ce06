"""Tiny models of the real classes, written to disk the way the real ones lie there. Weights are random but seeded."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The tokens behind the merges of Qwen2 and Qwen3, in the order of their ids; the engine's tokenizer has 31.
QWEN2_SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", *(f"<|extra_{n}|>" for n in range(5))),
]
_LLAMA_CPP = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}


def shared(name: str) -> Path | None:
    """A file of the shared folder beside the checkout (or beside a folder above it); None without one."""
    found = (parent / "shared" / name for parent in Path(__file__).resolve().parents)
    return next((path for path in found if path.exists()), None)


def qwen3(
    hidden: int = 64,
    layers: int = 2,
    heads: int = 1,
    kv_heads: int = 1,
    intermediate: int = 96,
    vocabulary: int = 2560,
    head_dim: int = 128,
    seed: int = 0,
) -> Qwen3Model:
    """A random Qwen3 as the engine would run it, f32, with norms that are not all ones."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return _randomized(Qwen3Model, config, seed)


def llama(
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    vocabulary: int = 2560,
    seed: int = 0,
) -> LlamaModel:
    """A random Llama, f32."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    return _randomized(LlamaModel, config, seed)


def student_gguf(
    path: Path,
    model: Qwen3Model | LlamaModel | None = None,
    *,
    names: str = "llama.cpp",
    matrices: Type = Type.F16,
    tokenizer: Path | None = None,
    architecture: str | None = None,
    drop: str = "",
    add: dict[str, np.ndarray] | None = None,
    keys: dict[str, int | float | str] | None = None,
) -> Path:
    """Write a student as GGUF: matrices in the type `matrices`, vectors in f32.

    Args:
        model: the weights; by default a `qwen3()`.
        names: the naming scheme: "llama.cpp", "hf", or "hf-bare" (without `model.`).
        tokenizer: a tokenizer folder to embed as keys.
        architecture: general.architecture; by default that of the model.
        drop: leave out tensors whose name (transformers') this pattern matches.
        add: further tensors, in their own type.
        keys: further keys, or keys with other values.
    """
    model = qwen3() if model is None else model
    config = model.config
    architecture = architecture or config.model_type
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": 4096,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{architecture}.vocab_size": config.vocab_size,
        **(keys or {}),
    }
    for key, value in values.items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    if tokenizer:
        _write_tokenizer(writer, tokenizer, config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        part = name.split(".")[-2]
        if names == "llama.cpp" and architecture == "llama" and part in heads:
            # llama.cpp's order of rows: dimensions i and i + head_dim / 2 of a head become neighbours.
            weight = weight.view(heads[part], 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        stored = _stored_name(name, names)
        if drop and re.search(drop, name):
            continue
        kind = matrices if weight.ndim == 2 else Type.F32
        writer.add_tensor(stored, quantize(weight.numpy(), kind), raw_dtype=kind)
    for name, array in (add or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def qwen2_tokenizer(folder: Path, merges: int | None = 2000) -> Path:
    """Write a tokenizer folder like Qwen2's: the byte alphabet, its first `merges` merges (None: all), 31 specials.

    All merges give Qwen2's own ids, specials from 151643. Without the shared merges a few of our own stand in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = shared("tokenizers/qwen2/merges.txt")
    lines = file.read_text(encoding="utf-8").splitlines() if file else _OWN_MERGES
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")][:merges]
    # Qwen's order of bytes: those that print as themselves, then the stand-ins of the others.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN2_SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    _write_json(folder / "tokenizer_config.json", settings)
    return folder


def t5_snapshot(
    folder: Path,
    dim: int = 64,
    layers: int = 2,
    heads: int = 2,
    vocabulary: int = 32128,
    max_shard_size: str = "5GB",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a T5 v1.1 encoder (gated GELU) with the real T5 tokenizer, or a small one where that is not at hand."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=dim,
        d_kv=dim // heads,
        d_ff=2 * dim,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    model = _randomized(T5EncoderModel, config, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    file = shared("tokenizers/t5/tokenizer.json")
    small = vocabulary < 32128 or not file
    (folder / "tokenizer.json").write_text(_small_t5_tokenizer() if small else file.read_text(encoding="utf-8"))
    settings = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write_json(folder / "tokenizer_config.json", settings | {"extra_ids": 0 if small else 100})
    return folder


def bert_snapshot(folder: Path, dim: int = 32, layers: int = 2, heads: int = 2, seed: int = 0) -> Path:
    """Write a BERT with pooler and a WordPiece tokenizer that, as MiniLM's, asks for padding and truncation."""
    words = ["a", "the", "red", "blue", "fox", "cat", "house", "tree", "in", "on", "of", "snow", "##s", "##ing"]
    letters = [prefix + letter for prefix in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz0123456789,.-"]
    tokens = list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *letters]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * dim,
        max_position_embeddings=512,
    )
    _randomized(BertModel, config, seed).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
    return folder


def qwen3_vl_snapshot(
    folder: Path,
    hidden: int = 32,
    vocabulary: int = 300,
    picture_id: int = 299,
    tower: tuple[int, int] = (16, 2),
    max_shard_size: str = "60KB",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Qwen3-VL with four layers and three blocks in its tower, the first two giving features, in several files.

    Theta is small, so that all angles of its few positions count.

    Args:
        hidden: of the text stack, and size of a row of the tower's output.
        tower: the hidden size of the tower, and its heads.
    """
    text = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e3, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 3,
        "hidden_size": tower[0],
        "intermediate_size": 24,
        "num_heads": tower[1],
        "out_hidden_size": hidden,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=picture_id)
    model = _randomized(Qwen3VLForConditionalGeneration, config, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _randomized(kind: type, config: object, seed: int) -> torch.nn.Module:
    """A model whose every weight is drawn from the seed alone, vectors around 1 for norms."""
    model = kind(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        is_norm = weight.ndim == 1 and name.endswith("weight")
        weight.copy_(1 + 0.1 * noise if is_norm else noise / max(weight.shape[-1], 4) ** 0.5)
    return model


def _stored_name(name: str, names: str) -> str:
    if names != "llama.cpp":
        return f"model.{name}" if names == "hf" else name
    parts = name.split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_LLAMA_CPP['.'.join(parts[2:-1])]}.{parts[-1]}"
    return f"{_LLAMA_CPP[parts[0]]}.{parts[-1]}"


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocabulary: int) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {number: token for token, number in data["model"]["vocab"].items()}
    specials = {token["id"]: token["content"] for token in data["added_tokens"]}
    padding = {number: f"[PAD{number}]" for number in range(vocabulary)}
    tokens = padding | tokens | specials
    types = [
        gguf.TokenType.CONTROL
        if n in specials
        else gguf.TokenType.UNUSED
        if n in padding and tokens[n] == padding[n]
        else 1
        for n in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens[n] for n in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    writer.add_pad_token_id(next(n for n, token in specials.items() if token == "<|endoftext|>"))


def _small_t5_tokenizer() -> str:
    words = ["▁a", "▁the", "▁red", "▁blue", "▁fox", "▁cat", "▁house", "▁tree", "▁in", "▁on", "▁of", "▁snow", "s", "ing"]
    pieces = list(dict.fromkeys([*words, "▁", *"abcdefghijklmnopqrstuvwxyz0123456789,.-"]))
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [(piece, -2.0 if len(piece) > 1 else -8.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer.to_str()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


_OWN_MERGES = ["Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ f", "o x", "Ġf ox", "in g"]
