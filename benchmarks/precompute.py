"""How fast a teacher runs when it is larger than the memory it is given.

    python benchmarks/precompute.py                                # on a CPU: minutes
    python benchmarks/precompute.py --teacher t5-xxl --device cuda --memory 6 --prompts 4096

A randomly initialised T5 encoder of the real class is written to disk and encodes the same prompts in several ways,
each in a process of its own, one after another, for some rounds:

    resident       all weights in memory, batches by token budget
    streamed       part by part under the memory budget; the files are in the system's page cache
    from disk      the same; the files are dropped from the page cache before
    cpu_offload    accelerate's, batches of 24: weights in RAM, brought to the device for every batch
    disk_offload   accelerate's, batches of 24: weights on disk, read for every batch

Prompts are sorted by length for all of them. The table gives the median of the rounds.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import psutil
import torch
from tokenizers import Tokenizer, models
from trainer import teachers
from trainer.devices import GIB, Budget
from trainer.streaming import Activations, Executor
from transformers import T5Config, T5EncoderModel

OURS = ("resident", "streamed", "from disk")
USUAL = ("cpu_offload", "disk_offload")
SHAPES = {
    "small": {"d_model": 1024, "d_ff": 2816, "num_heads": 16, "d_kv": 64, "num_layers": 6},
    "2.5gb": {"d_model": 2048, "d_ff": 5120, "num_heads": 32, "d_kv": 64, "num_layers": 27},
    "t5-xxl": {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "d_kv": 64, "num_layers": 24},
}
OFFLOAD_BATCH = 24


def make_teacher(folder: Path, shape: str) -> None:
    """A random T5 encoder in bf16, in files of at most 2 GB, with a tokenizer that knows no words."""
    config = T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **SHAPES[shape])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    T5EncoderModel(config).save_pretrained(folder, max_shard_size="2GB")
    torch.set_default_dtype(torch.float32)
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    Tokenizer(models.Unigram(vocabulary, unk_id=2)).save(str(folder / "tokenizer.json"))


def make_prompts(count: int, tokens: int) -> list[list[int]]:
    """Token ids of prompts, `tokens` long on average, sorted by length."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(tokens // 2, tokens + tokens // 2 + 1, (count,), generator=random).sort().values
    return [torch.randint(2, 32000, (length,), generator=random).tolist() for length in lengths.tolist()]


def state(ids: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch as a teacher's first part reads it."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    return {"ids": padded, "lengths": torch.tensor([len(row) for row in ids])}


def by_tokens(prompts: list[list[int]], budget: int) -> list[dict[str, torch.Tensor]]:
    """Batches whose padded size stays within a budget."""
    batches, batch = [], []
    for ids in prompts:
        if batch and len(ids) * (len(batch) + 1) > budget:
            batches.append(state(batch))
            batch = []
        batch.append(ids)
    return [*batches, state(batch)]


class Peak:
    """The largest resident set and GPU memory since it was made, above what there was then."""

    def __init__(self, device: torch.device) -> None:
        self._process, self._device = psutil.Process(), device
        self._base = self._peak = self._process.memory_info().rss
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, self._process.memory_info().rss)
            time.sleep(0.005)

    def gib(self) -> dict[str, float]:
        """Both, in GiB."""
        gpu = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return {"ram": (self._peak - self._base) / GIB, "gpu": gpu / GIB}


def ours(mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One pass with this project's executor."""
    device = torch.device(options.device)
    teacher = teachers.load("t5", folder, torch.bfloat16)
    if mode == "from disk":
        for file in folder.glob("*.safetensors"):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    batches = by_tokens(make_prompts(options.prompts, options.tokens), options.batch_tokens)
    peak = Peak(device)
    start = time.monotonic()
    memory = int(1024 * GIB if mode == "resident" else options.memory * GIB)
    budget = Budget(memory, 1024 * GIB if device.type == "cuda" else memory)
    executor = Executor("teacher", teacher.parts, teacher.weights, device, budget)
    checksum = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=options.folder) as spill:
        states = Activations(batches.__getitem__, [str(n) for n in range(len(batches))], Path(spill))
        keep = lambda number, it: {"rows": it["rows"].cpu()}  # noqa: E731
        for number in executor.run(states, keep, lambda: False, lambda number: None):
            lengths = batches[number]["lengths"].tolist()
            for row, length in zip(states.state(number)["rows"], lengths, strict=True):
                checksum.update(row[:length].contiguous().view(torch.uint8).numpy().data)
            states.drop(number)
    return {
        "seconds": time.monotonic() - start,
        "waited": executor.waited,
        "read": teacher.weights.bytes_read,
        "model": sum(part.bytes for part in teacher.parts),
        "checksum": checksum.hexdigest(),
        **peak.gib(),
    }


def usual(mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One pass with accelerate's hooks; the time it takes to set them up does not count."""
    import accelerate

    device = torch.device(options.device)
    prompts = make_prompts(options.prompts, options.tokens)
    peak = Peak(device)
    model = T5EncoderModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    size = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory(dir=options.folder) as spill:
        if mode == "cpu_offload":
            accelerate.cpu_offload(model, execution_device=device)
        else:
            accelerate.disk_offload(model, spill, execution_device=device)
            peak = Peak(device)  # of the pass: the whole model was loaded to be written out
        start = time.monotonic()
        count = 0
        with torch.inference_mode():
            for at in range(0, len(prompts), OFFLOAD_BATCH):
                batch = state(prompts[at : at + OFFLOAD_BATCH])
                mask = (torch.arange(batch["ids"].shape[1]) < batch["lengths"][:, None]).long()
                model(input_ids=batch["ids"].to(device), attention_mask=mask.to(device)).last_hidden_state.cpu()
                count += 1
        seconds = time.monotonic() - start
    return {"seconds": seconds, "read": count * size, "model": size, **peak.gib()}


def print_table(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """A Markdown table; speeds as ratios to the first way."""

    def median(mode: str, figure: str) -> float:
        return statistics.median(run[figure] for run in results[mode])

    first = median(options.modes[0], "seconds")
    print(f"{options.prompts} prompts of {options.tokens} tokens on average, {options.teacher} on {options.device}\n")
    print("| way | prompts/s | ratio | waited for weights | weights read a prompt | times the model | RAM | GPU |")
    print("|---|---|---|---|---|---|---|---|")
    for mode, runs in results.items():
        seconds, read = median(mode, "seconds"), runs[0]["read"]
        print(
            f"| {mode} | {options.prompts / seconds:.2f} | {first / seconds:.2f} | "
            + (f"{median(mode, 'waited'):.2f} s | " if mode in OURS else "| ")
            + f"{read / options.prompts / 1e6:.2f} MB | {read / runs[0]['model']:.3f} | "
            f"{max(run['ram'] for run in runs):.2f} GiB | {max(run['gpu'] for run in runs):.2f} GiB |"
        )
    checksums = {run["checksum"] for mode in OURS for run in results.get(mode, [])}
    print(f"\nThe rows of our ways are {'the same bytes' if len(checksums) == 1 else 'DIFFERENT'}.")


def main() -> None:
    """Run the rounds and print the table, or one way of one round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", choices=SHAPES, default="small")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=20, help="of a prompt, on average")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--memory", type=float, default=1.0, help="GiB for streaming, of the GPU or the RAM")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=OURS + USUAL, default=OURS + USUAL)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the teacher's files")
    parser.add_argument("--one", choices=OURS + USUAL, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder / f"random-{options.teacher}"
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps((ours if options.one in OURS else usual)(options.one, options, folder)))
        return
    if not (folder / "tokenizer.json").exists():
        make_teacher(folder, options.teacher)
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
    for number in range(options.rounds):
        for mode in options.modes:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", mode]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[mode].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number + 1}, {mode}: {results[mode][-1]['seconds']:.1f} s", file=sys.stderr)
    print_table(results, options)


if __name__ == "__main__":
    main()
