"""Training an adapter: rows of the shards' teacher from states of the shards' student."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer import adapters, checkpoints, devices, packs, recipe, scoring
from trainer.batches import Batch
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.files import digest, read_json
from trainer.job import log
from trainer.loading import Loader
from trainer.shard_index import listed, trained_on
from trainer.shards import Shard
from trainer.task import Task
from trainer.vocabulary import Vocabulary


@dataclass
class Inputs:
    """What training reads: shards.json, the shards it lists, and files of weights that it does not start at random."""

    run: Path
    index: dict[str, Any]
    train: list[Path]
    val: list[Path]
    given: dict[str, Path]

    @classmethod
    def read(cls, settings: Settings) -> "Inputs":
        """The inputs of a run."""
        run, shape = Path(settings.folder), settings.adapter
        index = read_json(run / "shards.json")
        train, val = (listed(run, index, split) for split in ("train", "val"))
        wanted = {"seed_table": shape.vocabulary, "vision_proj": shape.vision_dim}
        given = {name: run / "shards" / f"{name}.safetensors" for name, size in wanted.items() if size}
        return cls(run, index, train, val, given)


class AdapterTask(Task):
    """An adapter with its standardization, and the samples of a run's shards."""

    unit = "prompts"
    columns = ("loss", "mse", "cos")
    higher_is_better = True

    def __init__(self, settings: Settings, device: torch.device) -> None:
        """A fresh adapter.

        Raises:
            TrainerError: the shards hold no samples.
        """
        super().__init__(settings, device)
        self.inputs = inputs = Inputs.read(settings)
        self.autocast = devices.multiplies_bf16(device)
        self.queries = settings.adapter.queries
        self.metric = packs.get(settings.pack).metric
        self.val_columns = {"val_cos": self.metric, "val_rel_mse": "rel_mse"}
        self.batch_tokens = self.options.batch_tokens or sys.maxsize
        self.made_from = {
            # The width of pictures' rows is told by the shards.
            "adapter": settings.adapter.fingerprint(("adapters",)),
            "train": settings.train.fingerprint(("adapters",)),
            "shards": trained_on(inputs.index),
        }
        self.made_from |= {name: digest(checkpoints.read_meta(path)) for name, path in inputs.given.items()}
        if not inputs.index["train"]["samples"] or not inputs.index["val"]["samples"]:
            raise TrainerError(f"the shards of {inputs.run} hold no samples; see corpus.json and the logs")
        self.train, self.val = ([Shard(path) for path in files] for files in (inputs.train, inputs.val))
        self.module = self._fresh().to(device)
        self.scale = recipe.standardization(self.train, self.options, self.metric).to(device)
        self.optimizer = recipe.optimizer(self.module, self.options)

    def _fresh(self) -> adapters.Adapter:
        torch.manual_seed(self.options.seed)
        shape, given = self.settings.adapter, {name: load_file(path) for name, path in self.inputs.given.items()}
        self.vocabulary = None
        if shape.vocabulary:
            self.vocabulary = Vocabulary(
                recipe.seeds(given["seed_table"]["table"], self.options), self.train + self.val
            )
            shape = shape.model_copy(update={"vocabulary": len(self.vocabulary)})
        adapter = adapters.fresh(shape)
        if self.vocabulary:
            adapter.t5_embed.weight.data = self.vocabulary.start
        if shape.vision_dim:
            adapter.vision_proj.weight.copy_(given["vision_proj"]["weight"])
        return adapter

    @property
    def compiled(self) -> bool:
        """Whether torch makes kernels for the blocks."""
        return self.module.compiled

    @compiled.setter
    def compiled(self, value: bool) -> None:
        self.module.compiled = value

    # -- a step --------------------------------------------------------------------------------------------------------

    def loader(self, position: int, rank: int = 0, processes: int = 1) -> Loader:
        """Batches; their sums are divided by their target rows."""
        return Loader(
            *(self.train, self.queries),
            seed=self.options.seed,
            window=int(self.options.shuffle_mb * 1e6),
            position=position,
            size=self.options.batch_size,
            pin=self.device.type == "cuda",
            rank=rank,
            processes=processes,
        )

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Parts of `batch_tokens` rows at most."""
        if self.vocabulary:
            batch = self.vocabulary.numbered(batch)
        for part in batch.split(self.batch_tokens):
            yield part.to(self.device)

    def loss(self, part: Batch) -> tuple[Tensor, Tensor]:
        """Sums over rows: the loss, and [3]: the loss, squared error and cosine."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            sums = scoring.loss(self.module, self.scale, part, self.options.cos_weight, self.metric)
        return sums.objective, torch.stack([sums.objective.detach(), sums.squared, sums.cosine])

    def use_less_memory(self, batch: Batch) -> None:
        """Smaller parts, then blocks computed again in the backward pass."""
        sizes = [student + target for student, target in zip(batch.lengths, batch.counts, strict=True)]
        if self.batch_tokens > min(sizes):
            self.batch_tokens = min(self.batch_tokens, sum(sizes)) // 2
            log.info("out of memory: going on with %d rows a forward pass", self.batch_tokens)
        elif not self.module.recompute:
            self.module.recompute = True
            log.info("out of memory with one prompt at a time: going on with blocks computed twice")
        else:
            raise TrainerError(
                f"out of memory on {self.device} with one prompt at a time: lower adapter.width or depth"
            ) from None

    # -- validation and checkpoints ------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Scores of the current weights on the val split, in f32."""
        self.module.eval()
        val = scoring.batches(self.val, self.options.batch_size, self.queries)
        if self.vocabulary:
            val = ((ids, self.vocabulary.numbered(batch)) for ids, batch in val)
        predict = scoring.predictor(self.module, self.scale)
        metrics = scoring.score(predict, val, self.scale.mean, self.metric).metrics()
        self.module.train()
        return metrics

    def weights(self) -> checkpoints.Tensors:
        """The weights, all rows of the seed table included, and the standardization."""
        weights = dict(self.module.state_dict())
        if self.vocabulary:
            weights["t5_embed.weight"] = self.vocabulary.widen(weights["t5_embed.weight"])
        return checkpoints.pack(weights, self.scale)

    def restore(self, tensors: checkpoints.Tensors) -> None:
        """Go on from weights and standardization."""
        weights, scale = checkpoints.unpack(tensors)
        if self.vocabulary:
            weights["t5_embed.weight"] = self.vocabulary.narrow(weights["t5_embed.weight"])
        self.module.load_state_dict(weights)
        self.scale = scale.to(self.device)

    def kept(self, tensors: checkpoints.Tensors) -> checkpoints.Tensors:
        """The tensors of the file, and the mean teacher row."""
        weights, scale = checkpoints.unpack(tensors)
        return checkpoints.exported(weights, scale) | {"mean_row": scale.mean}
