"""What other trainers call settings: their names are understood in the user's own files. Light to import."""

from typing import Any

from trainer.errors import TrainerError

_NAMES = {
    "lora.base": ("base_model", "model_name", "model_name_or_path", "pretrained_model_name_or_path"),
    "lora.rank": ("lora_rank", "lora_r", "r", "rank", "network_dim"),
    "lora.alpha": ("lora_alpha", "alpha", "network_alpha"),
    "lora.dropout": ("lora_dropout",),
    "lora.targets": ("target_modules", "lora_target_modules"),
    "lora.checkpointing": ("gradient_checkpointing", "use_gradient_checkpointing"),
    "lora.text_dropout": ("cfg_dropout", "caption_dropout"),
    "lora.optimizer": ("optim", "optimizer_type"),
    "pictures.folder": ("data_dir", "train_data_dir", "instance_data_dir"),
    "pictures.resolution": ("resolution",),
    "pictures.flip": ("random_flip",),
    "train.steps": ("steps", "max_steps", "train_steps", "max_train_steps"),
    "train.batch_size": ("batch_size", "train_batch_size", "per_device_train_batch_size"),
    "train.lr": ("lr", "learning_rate"),
    "train.warmup": ("warmup_steps", "lr_warmup_steps"),
    "train.grad_clip": ("max_grad_norm",),
    "train.seed": ("seed", "random_seed"),
}
ALIASES = {alias: name for name, aliases in _NAMES.items() for alias in aliases}
# Names without a setting of their own, and what there is instead.
INSTEAD = {
    "epochs": "set train.steps: pictures / train.batch_size of them are an epoch",
    "num_train_epochs": "set train.steps: pictures / train.batch_size of them are an epoch",
    "gradient_accumulation_steps": "set train.batch_size to all pictures of a step: they are computed in parts",
    "lr_scheduler": "set train.warmup and train.decay_fraction",
    "lr_scheduler_type": "set train.warmup and train.decay_fraction",
    "mixed_precision": "set lora.base_precision",
    "token": "set HF_TOKEN in the environment, and nowhere else",
    "hf_token": "set HF_TOKEN in the environment, and nowhere else",
}
_GROUPS = ("lora", "train", "pictures")
_OWN = "pictures.seed"  # which is none of train.seed


def understood(given: Any) -> tuple[dict[str, Any], list[str]]:
    """Settings of one file under their own names, and in words what became of others.

    Where a file has a setting under both names, its own counts. Aliases stand at the top or in the groups lora, train
    and pictures.

    Raises:
        TrainerError: two aliases of one setting.
    """
    if not isinstance(given, dict):
        return {}, []
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
    found: dict[str, tuple[str, Any]] = {}
    for place, values in (("", settings), *((f"{name}.", settings.get(name)) for name in _GROUPS)):
        for key in list(values) if isinstance(values, dict) else ():
            name = ALIASES.get(key)
            if not name or f"{place}{key}" in (name, _OWN):
                continue
            if name in found:
                raise TrainerError(f"`{found[name][0]}` and `{place}{key}` both mean the setting `{name}`; keep one")
            found[name] = f"{place}{key}", values.pop(key)
    words = []
    for name, (alias, value) in found.items():
        group, _, key = name.partition(".")
        values = settings.setdefault(group, {})
        if not isinstance(values, dict):
            raise TrainerError(f"setting `{group}` is {values!r}: a group of settings is wanted")
        words.append(f"`{alias}` is left aside for `{name}`" if key in values else f"`{alias}` is taken as `{name}`")
        values.setdefault(key, value)
    return settings, words
