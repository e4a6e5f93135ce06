"""Fills blocks of shards in a process of its own: what one device of several does."""

import json
import sys
from pathlib import Path

import torch
from trainer import config, precompute
from trainer.control import Requests
from trainer.files import write_json
from trainer.materials import Record

if __name__ == "__main__":
    torch.set_num_threads(1)
    run, blocks = Path(sys.argv[1]), int(sys.argv[2])
    given = json.loads((run / "worker.json").read_text())
    settings = config.load(given["settings"])
    records = {id: Record(**record) for id, record in given["records"].items()}
    for number in map(int, sys.argv[3:]):
        output = run / "shards" / f"{number:04d}.json"
        block = precompute.Block(settings, records, Requests(run), 10**9)
        write_json(output, block.fill(output, number, blocks, run / "train.jsonl"))
        print(number, flush=True)
