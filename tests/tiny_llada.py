"""A tiny LLaDA-Image-Turbo on disk: folders, names and dtypes as the real one, random weights from a seed."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|endoftext|>", "<role>", "</role>", "<IMAGE1>"]
MERGES = ["Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r", "a t", "Ġ f", "o x", "Ġf ox", "in g", "a g", "ag e"]


def llada_snapshot(
    folder: Path,
    *,
    hidden: int = 32,
    layers: int = 3,
    dense: int = 1,
    experts: int = 16,
    chosen: int = 3,
    groups: int = 4,
    kept_groups: int = 2,
    expert_width: int = 16,
    shared: int = 1,
    queries: int = 5,
    blocks: int = 1,
    projection_layers: int = 2,
    projection_dim: int = 24,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write the snapshot: text_encoder in two shards with an index, queryformer, text_projection, tokenizer."""
    vocabulary = _tokenizer(folder / "tokenizer")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "LLaDAImagePipeline"}))
    text_encoder = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": vocabulary + 12,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "use_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 600000,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "num_experts": experts,
        "num_shared_experts": shared,
        "num_experts_per_tok": chosen,
        "n_group": groups,
        "topk_group": kept_groups,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": expert_width,
        "first_k_dense_replace": dense,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
    }
    queryformer = {
        "_class_name": "QueryFormer",
        "num_queries": queries,
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "intermediate_size": 2 * hidden,
        "norm_eps": 1e-6,
    }
    text_projection = {
        "_class_name": "TextProjection",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": projection_layers,
        "num_attention_heads": 4,
        "projection_dim": projection_dim,
        "norm_eps": 1e-6,
    }
    draw = _Draw(seed, dtype)
    backbone = _backbone(draw, text_encoder)
    _write_sharded(folder / "text_encoder", text_encoder, backbone)
    _write(folder / "queryformer", queryformer, _queryformer(draw, queryformer))
    _write(folder / "text_projection", text_projection, _text_projection(draw, text_projection))
    return folder


class _Draw:
    """Random tensors, one after another."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def matrix(self, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) / shape[-1] ** 0.5).to(self.dtype)

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=self.generator)).to(self.dtype)

    def bias(self, size: int) -> torch.Tensor:
        return (0.1 * torch.randn(size, generator=self.generator)).to(self.dtype)

    def linear(self, name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": self.matrix(rows, columns), f"{name}.bias": self.bias(rows)}


def _backbone(draw: _Draw, config: dict) -> dict[str, torch.Tensor]:
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {"model.word_embeddings.weight": draw.matrix(config["vocab_size"], hidden)}

    def mlp(name: str, width: int) -> None:
        tensors[f"{name}.gate_proj.weight"] = draw.matrix(width, hidden)
        tensors[f"{name}.up_proj.weight"] = draw.matrix(width, hidden)
        tensors[f"{name}.down_proj.weight"] = draw.matrix(hidden, width)

    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        tensors[f"{layer}.input_layernorm.weight"] = draw.norm(hidden)
        tensors[f"{layer}.attention.query_key_value.weight"] = draw.matrix((heads + 2 * shared) * head, hidden)
        tensors[f"{layer}.attention.query_layernorm.weight"] = draw.norm(head)
        tensors[f"{layer}.attention.key_layernorm.weight"] = draw.norm(head)
        tensors[f"{layer}.attention.dense.weight"] = draw.matrix(hidden, heads * head)
        tensors[f"{layer}.post_attention_layernorm.weight"] = draw.norm(hidden)
        if n < config["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        tensors[f"{layer}.mlp.gate.weight"] = draw.matrix(config["num_experts"], hidden)
        # Stored in f32 beside the bf16 of the rest, and no bf16 value.
        tensors[f"{layer}.mlp.gate.expert_bias"] = 3 * draw.bias(config["num_experts"]).float() + 1e-4
        for expert in range(config["num_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", config["moe_intermediate_size"] * config["num_shared_experts"])
    tensors["model.norm.weight"] = draw.norm(hidden)
    tensors["lm_head.weight"] = draw.matrix(config["vocab_size"], hidden)
    return tensors


def _queryformer(draw: _Draw, config: dict) -> dict[str, torch.Tensor]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    tensors = {"meta_queries": draw.matrix(config["num_queries"], hidden)}
    for n in range(config["num_hidden_layers"]):
        block = f"query_blocks.{n}"
        tensors[f"{block}.cross_attn.in_proj_weight"] = draw.matrix(3 * hidden, hidden)
        tensors[f"{block}.cross_attn.in_proj_bias"] = draw.bias(3 * hidden)
        tensors |= draw.linear(f"{block}.cross_attn.out_proj", hidden, hidden)
        tensors |= draw.linear(f"{block}.mlp.fc1", width, hidden) | draw.linear(f"{block}.mlp.fc2", hidden, width)
    return tensors


def _text_projection(draw: _Draw, config: dict) -> dict[str, torch.Tensor]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    tensors = {}
    for n in range(config["num_hidden_layers"]):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= draw.linear(f"layers.{n}.self_attn.{name}", hidden, hidden)
        tensors |= draw.linear(f"layers.{n}.mlp.fc1", width, hidden) | draw.linear(f"layers.{n}.mlp.fc2", hidden, width)
    return tensors | draw.linear("projector", config["projection_dim"], hidden)


def _write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})


def _write_sharded(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Two shards, the layers' tensors spread over both."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(tensors)
    files = {name: f"model-{1 + n % 2:05d}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _tokenizer(folder: Path) -> int:
    """Byte-level BPE with a few merges and the template's markers, which asks for padding; its number of ids."""
    folder.mkdir(parents=True)
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|endoftext|>"}))
    return tokenizer.get_vocab_size()
