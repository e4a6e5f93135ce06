"""The order of training samples, and batches made of them ahead of time.

The stream of samples is a function of (seed, position): sample number n is always the same one, whatever was stopped
and resumed in between. An epoch shuffles the chunks of all shards and takes a window of them at a time, whose samples
are shuffled together. A window is read once, as a whole and in the order of the files, while the one before it is
trained on: the corpus mixes, and yet every byte is read once an epoch and in large pieces.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from trainer.batches import Batch
from trainer.samples import Samples
from trainer.shards import Shard

_Batch = TypeVar("_Batch")


@dataclass(frozen=True)
class Chunk:
    """A chunk of a shard: which, how many samples it has, and the bytes of their rows in memory."""

    shard: int
    number: int
    samples: int
    bytes: int


@dataclass(frozen=True)
class Window:
    """Chunks that are in memory together, in the order of the files, and in which order their samples come."""

    chunks: tuple[Chunk, ...]
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)


def chunks_of(shards: Sequence[Shard]) -> list[Chunk]:
    """The chunks of some shards."""
    return [
        Chunk(index, number, end - first, shard.chunk_bytes(number))
        for index, shard in enumerate(shards)
        for number, (first, end) in enumerate(pairwise(shard.chunks))
    ]


class Order:
    """Which sample comes at which position of the stream."""

    def __init__(self, chunks: Sequence[Chunk], seed: int, window: int) -> None:
        """`window` is how many bytes of rows are shuffled together, about."""
        self.chunks, self.seed, self.window = chunks, seed, window
        self.total = sum(chunk.samples for chunk in chunks)
        self._epoch: tuple[int, list[Window]] = (-1, [])

    def epoch(self, number: int) -> list[Window]:
        """The windows of an epoch."""
        if self._epoch[0] != number:
            random = np.random.default_rng([self.seed, number])
            windows, held, size = [], [], 0
            shuffled = random.permutation(len(self.chunks)).tolist()
            for place, index in enumerate(shuffled, 1):
                held.append(index)
                size += self.chunks[index].bytes
                if size >= self.window or place == len(shuffled):
                    chunks = tuple(self.chunks[index] for index in sorted(held))
                    windows.append(Window(chunks, random.permutation(sum(chunk.samples for chunk in chunks))))
                    held, size = [], 0
            self._epoch = (number, windows)
        return self._epoch[1]

    def after(self, position: int) -> Iterator[tuple[Window, int]]:
        """The window that a position lies in and where in it, then all that follow, each from its start."""
        number, start = divmod(position, self.total)
        while True:
            for window in self.epoch(number):
                if start < len(window):
                    yield window, start
                start = max(0, start - len(window))
            number += 1


class Ahead(Generic[_Batch]):
    """Batches that a thread makes ahead of training.

    waited: seconds that training has waited for batches.
    """

    def __init__(self, batches: Iterator[tuple[_Batch, int]], pin: bool) -> None:
        """`batches` are those to make, without an end; their tensors go to pinned memory if asked for."""
        self.waited = 0.0
        self._made, self._pin = batches, pin
        self._queue: queue.Queue[tuple[_Batch, int] | BaseException] = queue.Queue(maxsize=2)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __next__(self) -> tuple[_Batch, int]:
        """This process's share of the next batch, and how much the whole batch counts.

        Raises:
            TrainerError: a shard is damaged (it was set aside).
        """
        start = time.monotonic()
        item = self._queue.get()
        self.waited += time.monotonic() - start
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        while self._thread.is_alive():
            with self._queue.mutex:
                self._queue.queue.clear()
                self._queue.not_full.notify()
            self._thread.join(0.05)

    def _run(self) -> None:
        try:
            for batch, count in self._made:
                self._queue.put((batch.pin() if self._pin else batch, count))
                if self._closed.is_set():
                    return
        except Exception as error:
            self._queue.put(error)


class Loader(Ahead[Batch]):
    """Batches of the stream from a position on; what they count is their target rows.

    Where several processes train together, each reads everything and has its share of every batch.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        queries: int | None,
        *,
        seed: int,
        window: int,
        position: int,
        size: int,
        pin: bool,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.shards = shards
        self.order = Order(chunks_of(self.shards), seed, window)
        self._size, self._queries, self._rank, self._processes = size, queries, rank, processes
        self._reader = ThreadPoolExecutor(1, "reader")
        super().__init__(self._batches(position), pin)

    @property
    def bytes_read(self) -> int:
        """Bytes of rows read from the files."""
        return sum(shard.bytes_read for shard in self.shards)

    def close(self) -> None:
        """Stop the threads."""
        super().close()
        self._reader.shutdown(cancel_futures=True)

    def _batches(self, position: int) -> Iterator[tuple[Batch, int]]:
        pieces: list[tuple[Samples, np.ndarray]] = []
        missing = self._size
        for samples, order in self._windows(position):
            while len(order) >= missing:
                batch = self._share([*pieces, (samples, order[:missing])])
                # Before training has taken the batch, so that the window before this one is not held until then.
                pieces, order, missing = [], order[missing:], self._size
                yield batch
            if len(order):
                pieces.append((samples, order))
                missing -= len(order)

    def _windows(self, position: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """The samples of each window and which are wanted, in their order; the next window is read meanwhile."""
        following = self.order.after(position)
        window, start = next(following)
        coming = self._read(window)
        while True:
            held, wanted = coming.result(), window.order[start:]
            next_window, start = next(following)
            # A corpus that is all one window stays in memory.
            if next_window.chunks != window.chunks:
                coming = self._read(next_window)
            window = next_window
            yield held, wanted
            del held

    def _read(self, window: Window) -> Future[Samples]:
        return self._reader.submit(Samples.read, [(self.shards[it.shard], it.number) for it in window.chunks])

    def _share(self, pieces: list[tuple[Samples, np.ndarray]]) -> tuple[Batch, int]:
        """This process's share of a batch; samples of like length stand together: its parts are padded little."""
        lengths = np.concatenate([samples.counts["student"][wanted] for samples, wanted in pieces])
        rows = sum(int(samples.counts["target"][wanted].sum()) for samples, wanted in pieces)
        mine = np.argsort(lengths, kind="stable")[self._rank :: self._processes]
        ends = np.cumsum([len(wanted) for _, wanted in pieces])
        taken = []
        for (samples, wanted), end in zip(pieces, ends, strict=True):
            here = mine[(mine < end) & (mine >= end - len(wanted))]
            if len(here):
                taken.append(samples.take(wanted[here - (end - len(wanted))]))
        return Samples.joined(taken).batch(self._queries), rows
