"""Running a teacher that may be larger than the memory it is given.

A teacher is a list of parts (embedding, layers, head). Where all weights fit, a batch goes through all parts at once.
Where they do not, the loop is turned round: the weights of a part are read once, all batches of the block go through
it, and the next part is read meanwhile. A pass costs the model's size in reads, whatever the number of batches; what
is between two parts is kept on the device, in RAM or on disk, wherever there is room. Both ways call the same modules
with the same batches, so that their results are the same bytes.
"""

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.devices import GIB, Budget
from trainer.errors import StoppedError, TrainerError
from trainer.files import written_whole
from trainer.job import log
from trainer.weights import Weights

# Of the memory that may be used, what weights and waiting batches get; the rest is for the batch in work.
_SHARE = 0.75
_ALIGNMENT = 256
# Batches that are made while one is in work, each by a thread of its own.
_AHEAD = 4

State = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """One step of a teacher.

    name: for the log.
    module: on the meta device; `forward(state) -> state`. A state is a batch between two parts: tensors by name, each
        with the batch as its first dimension.
    sources: for every parameter of the module, the stored tensors that lie one after another in its memory, so that a
        stack of experts [E, 2I, H] is (gate 0, up 0, gate 1, ...). They are converted to the dtype of the parameter.
    """

    name: str
    module: nn.Module
    sources: dict[str, tuple[str, ...]]

    @property
    def bytes(self) -> int:
        """What its weights take."""
        return sum(size for _, _, size in self.layout())

    def layout(self) -> list[tuple[str, Tensor, int]]:
        """(name, meta parameter, bytes with what aligns the next one) of each parameter that is read."""
        parameters = dict(self.module.named_parameters())
        return [
            (name, parameters[name], -(-parameters[name].nbytes // _ALIGNMENT) * _ALIGNMENT) for name in self.sources
        ]


def check(parts: Sequence[Part], weights: Weights) -> None:
    """Refuse a snapshot that lacks a tensor of these parts, or has one of another shape.

    Raises:
        TrainerError: which.
    """
    needed = {name for part in parts for names in part.sources.values() for name in names}
    missing = sorted(needed - weights.tensors.keys())
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TrainerError(
            f"the teacher in {weights.path} lacks the weights {', '.join(missing[:3])}{more}; get it again"
        )
    for part in parts:
        for name, parameter, _ in part.layout():
            if quantized := [source for source in part.sources[name] if not weights.tensors[source].dtype]:
                raise TrainerError(
                    f"the teacher in {weights.path} stores {quantized[0]} in a quantized type, which is not supported; "
                    "get it in bf16, f16 or f32"
                )
            shapes = [weights.tensors[source].shape for source in part.sources[name]]
            whole = shapes == [tuple(parameter.shape)]
            stacked = len(shapes) > 1 and sum(map(math.prod, shapes)) == parameter.numel()
            if not (whole or stacked):
                raise TrainerError(
                    f"the teacher in {weights.path} has {part.sources[name][0]} in the shape {shapes[0]}, which does "
                    "not belong to a model of its config.json; get it again"
                )


def needed(parts: Sequence[Part]) -> int:
    """Bytes of memory to stream these parts with one in work while the next one is read."""
    return int(2 * max(part.bytes for part in parts) / _SHARE)


class Activations:
    """The states of all batches of a block, each with the number of parts it has been through.

    A state is kept on the device, in RAM, or as a file in `folder`, in this order, wherever there is room. The first
    one of a batch is made when it is wanted, those of the next few batches meanwhile: all at once may be too large.
    """

    def __init__(self, make: Callable[[int], State], keys: Sequence[str], folder: Path) -> None:
        """Start from what is made, or from what an earlier job left of the batches with these keys.

        Args:
            make: the state of a batch before the first part, by its number; called in threads.
            keys: what identifies each batch and everything it is computed from.
            folder: for files; what is in it and does not belong to these batches is removed.
        """
        self.folder = folder
        self.levels = [0] * len(keys)
        self._keys = keys
        self._make = make
        self._makers = ThreadPoolExecutor(_AHEAD, "batches")
        self._making: dict[int, Future[State]] = {}
        self._kept: list[State | Path | None] = [None] * len(keys)  # None: to be made
        self._files: list[Path | None] = [None] * len(keys)
        self._sizes = [0] * len(keys)
        self._places = ["ram"] * len(keys)
        self._room = {"device": 0, "ram": 0}
        self._device = torch.device("cpu")
        self._restore()

    def _restore(self) -> None:
        numbers = {key: number for number, key in enumerate(self._keys)}
        for file in self.folder.glob("*"):
            key, _, level = file.name.removesuffix(".safetensors").rpartition("-")
            number = numbers.get(key)
            if number is not None and int(level) > self.levels[number]:
                self.levels[number], self._kept[number], self._places[number] = int(level), file, "disk"
                self._files[number] = file
        for file in self.folder.glob("*"):
            if file not in self._files:
                file.unlink()

    def place(self, device: torch.device, device_room: int, ram_room: int) -> None:
        """Set where states are to be kept: bytes on the device, if it is a GPU, and in RAM."""
        self._device, self._room = device, {"device": device_room, "ram": ram_room}

    @property
    def held(self) -> int:
        """Bytes that are kept in RAM."""
        return sum(size for size, place in zip(self._sizes, self._places, strict=True) if place == "ram")

    def state(self, number: int) -> State:
        """The state of a batch, wherever it is kept."""
        kept = self._kept[number]
        if kept is None:
            return self._made(number)
        return safetensors.torch.load(kept.read_bytes()) if isinstance(kept, Path) else kept

    def sample(self, number: int, index: int, names: Iterable[str]) -> State:
        """These tensors of the state of one sample of a batch, without the batch's dimension."""
        kept = self._kept[number]
        if not isinstance(kept, Path):
            return {name: kept[name][index] for name in names}
        with safetensors.safe_open(kept, "pt") as file:
            return {name: file.get_slice(name)[index : index + 1][0] for name in names}

    def _made(self, number: int) -> State:
        waiting = (n for n in range(number, len(self._kept)) if self._kept[n] is None)
        for ahead in itertools.islice(waiting, 1 + _AHEAD):
            if ahead not in self._making:
                self._making[ahead] = self._makers.submit(self._first, ahead)
        return self._making.pop(number).result()

    def _first(self, number: int) -> State:
        state = self._make(number)
        return state if self._device.type == "cpu" else {name: it.pin_memory() for name, it in state.items()}

    def get(self, number: int) -> State:
        """The state of a batch, on the device."""
        return {name: it.to(self._device, non_blocking=True) for name, it in self.state(number).items()}

    def put(self, number: int, level: int, state: State) -> None:
        """Keep the state of a batch that has been through `level` parts."""
        self.drop(number)
        on_cpu = all(tensor.device.type == "cpu" for tensor in state.values())
        sizes = {"ram": sum(tensor.nbytes if on_cpu else _pinned(tensor.nbytes) for tensor in state.values())}
        if not on_cpu:
            sizes = {"device": sum(tensor.nbytes for tensor in state.values())} | sizes
        place = next((place for place, size in sizes.items() if size <= self._room[place]), "disk")
        if place == "disk":
            self._kept[number] = self._write(number, level, state)
        else:
            self._room[place] -= sizes[place]
            self._sizes[number] = sizes[place]
            self._kept[number] = state if place == "device" else {name: _to_ram(it) for name, it in state.items()}
        self._places[number], self.levels[number] = place, level

    def drop(self, number: int) -> None:
        """Forget the state of a batch. A file of it stays: what became of it may not be written yet."""
        if self._places[number] in self._room:
            self._room[self._places[number]] += self._sizes[number]
        self._kept[number], self._sizes[number] = {}, 0

    def save(self) -> None:
        """Leave all that was computed in `folder`, for the next job."""
        for number, (kept, level) in enumerate(zip(self._kept, self.levels, strict=True)):
            if level and not isinstance(kept, Path) and kept:
                self._kept[number] = self._write(number, level, kept)

    def _write(self, number: int, level: int, state: State) -> Path:
        """The level is part of the name: whenever the job is killed, each file says what it is."""
        file, before = self.folder / f"{self._keys[number]}-{level}.safetensors", self._files[number]
        with written_whole(file) as aside:
            aside.write_bytes(safetensors.torch.save({name: it.cpu().contiguous() for name, it in state.items()}))
        if before and before != file:
            before.unlink()
        self._files[number] = file
        return file


def _pinned(size: int) -> int:
    """Bytes of main memory that torch takes for pinned memory of this size: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _to_ram(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


class Executor:
    """Runs the parts of a teacher over the batches of a block.

    resident: whether all weights are on the device at once.
    waited: seconds that were spent waiting for weights.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        weights: Weights | None,
        device: torch.device,
        budget: Budget,
        keep: int | None = None,
    ) -> None:
        """Decide where weights go; none is read yet.

        Args:
            name: of the model, for the log.
            parts: its steps.
            weights: what they are read from; None where the modules hold their values.
            device: where it runs.
            budget: what may be used.
            keep: bytes of RAM, at most, for states that wait and for results; None: what weights leave.

        Raises:
            TrainerError: the largest part alone does not fit.
        """
        self.parts, self.weights, self.device = parts, weights, device
        sizes = [part.bytes for part in parts]
        largest = max(sizes)
        on_cpu = device.type == "cpu"
        room = int(_SHARE * (budget.ram if on_cpu else budget.device))
        self.resident = sum(sizes) <= room
        # Two: one computes while the other is filled.
        self._rooms = 2 if 2 * largest <= room else 1
        self._largest = largest
        if not self.resident and largest > room:
            raise self._too_large(room, "ram" if on_cpu else "gpu")
        # What a GPU reads goes through pinned memory.
        ram = int(_SHARE * budget.ram)
        self.stagings = 2 if 2 * _pinned(largest) <= ram else 1
        if weights and not on_cpu and _pinned(largest) > ram:
            raise self._too_large(ram, "ram")
        held = sum(sizes) if self.resident else self._rooms * largest
        self._free_device = 0 if on_cpu else room - held
        self._free_ram = max(0, room - held if on_cpu else ram - self.stagings * _pinned(largest))
        if keep is not None:
            self._free_ram = min(self._free_ram, keep)
        self._splits = 1
        self.waited = 0.0
        how = "resident" if self.resident else f"streamed through {held / GIB:.2f} GiB"
        if weights:
            log.info("%s: %.2f GiB in %d parts, %s on %s", name, sum(sizes) / GIB, len(parts), how, device)

    def _too_large(self, room: int, kind: str) -> TrainerError:
        largest = max(self.parts, key=lambda part: part.bytes)
        return TrainerError(
            f"the part {largest.name!r} of the teacher takes {largest.bytes / GIB:.2f} GiB, and {room / GIB:.2f} GiB "
            f"of {'main' if kind == 'ram' else 'GPU'} memory are left for weights: raise precompute.{kind}_gib, or "
            "free some memory"
        )

    @torch.no_grad()
    def run(
        self,
        batches: Activations,
        finish: Callable[[int, State], State],
        stop: Callable[[], bool],
        progress: Callable[[int], None],
    ) -> Iterator[int]:
        """Take every batch through all parts.

        Args:
            batches: what is to be done; it holds the results afterwards.
            finish: makes of the last state of a batch what is kept of it.
            stop: asked before each step; True ends the run with everything computed saved.
            progress: told the number of each batch after each part.

        Yields:
            The number of each batch whose result is there, in order.

        Raises:
            StoppedError: as asked.
            TrainerError: a single sample does not fit in memory.
        """
        batches.place(self.device, self._free_device, self._free_ram)
        last, count = len(self.parts), len(batches.levels)

        def advance(number: int, weights: dict[int, dict[str, Tensor]]) -> None:
            if stop():
                batches.save()
                raise StoppedError("stopped as asked: what was computed is kept; the same command goes on there")
            state, level = batches.get(number), batches.levels[number]
            while level in weights:
                state = self._apply(self.parts[level], weights[level], state)
                level += 1
                progress(number)
            batches.put(number, level, finish(number, state) if level == last else state)

        wanted = [level for level in range(last) if any(done <= level for done in batches.levels)]
        if self.resident:
            loaded = {level: {} for level in range(last)}  # modules that hold their values need no others
            if wanted and self.weights:
                loaded = dict(self._placed(range(last), rooms=last))
            for number in range(count):
                if batches.levels[number] < last:
                    advance(number, loaded)
                yield number
            return
        for level, weights in self._placed(wanted, self._rooms):
            for number in range(count):
                if batches.levels[number] == level:
                    advance(number, {level: weights})
                if level + 1 == last:
                    yield number
        if not wanted:
            yield from range(count)

    def _apply(self, part: Part, weights: dict[str, Tensor], state: State) -> State:
        """The next state of a batch, in pieces where the whole of it did not fit in memory."""
        size = len(next(iter(state.values())))
        while True:
            length = -(-size // self._splits)
            try:
                pieces = [
                    functional_call(part.module, weights, ({k: v[at : at + length] for k, v in state.items()},))
                    for at in range(0, size, length)
                ]
                if len(pieces) == 1:
                    return pieces[0]
                return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
            except torch.OutOfMemoryError:
                if length == 1:
                    raise TrainerError(
                        f"out of memory on {self.device} with a single sample: lower precompute.gpu_gib, which leaves "
                        "less of it to weights, or set precompute.device to another one"
                    ) from None
            pieces = []
            self._splits *= 2
            log.info("out of memory with %d samples at once: trying %d", length, -(-size // self._splits))

    def _placed(self, levels: Sequence[int], rooms: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The weights of these parts on the device, one after another, each read while the one before is in use."""
        stream = _Stream(self, list(levels), rooms)
        try:
            yield from stream
        finally:
            stream.close()
            self.waited += stream.waited


class _Room:
    """Memory for the weights of one part on the device, and when it may be written to and read from."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.filled: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None


class _Stream:
    """A thread that fills rooms with the weights of parts, and the iterator that hands them out.

    For a GPU it reads into pinned memory and copies from there on a stream of its own.
    """

    def __init__(self, executor: Executor, levels: list[int], rooms: int) -> None:
        self.parts = [(level, executor.parts[level]) for level in levels]
        self.weights, self.device = executor.weights, executor.device
        self._empty: queue.Queue[_Room | None] = queue.Queue()
        sizes = [part.bytes for _, part in self.parts] if rooms >= len(levels) else [executor._largest] * rooms
        for size in sizes:
            self._empty.put(_Room(size, self.device))
        self._full: queue.Queue[_Room | BaseException] = queue.Queue()
        self.waited = 0.0
        self._copies = None
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)
            self._copies.wait_stream(torch.cuda.current_stream(self.device))  # the memory may have been another's
            size, count = executor._largest, executor.stagings
            self._staging = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
            self._staged: list[torch.cuda.Event | None] = [None] * count
        self._thread = threading.Thread(target=self._fill_all, daemon=True, name="weights")
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        for level, part in self.parts:
            since = time.monotonic()
            room = self._full.get()
            self.waited += time.monotonic() - since
            if isinstance(room, BaseException):
                raise room
            if room.filled:
                torch.cuda.current_stream(self.device).wait_event(room.filled)
            yield level, _views(part, room.memory)
            if self._copies:
                room.used = torch.cuda.current_stream(self.device).record_event()
            self._empty.put(room)

    def close(self) -> None:
        """End the thread."""
        self._empty.put(None)
        self._thread.join()
        if self._copies:
            torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def _fill_all(self) -> None:
        try:
            for number, (_, part) in enumerate(self.parts):
                room = self._empty.get()
                if room is None:
                    return
                self._fill(number, part, room)
                self._full.put(room)
        except BaseException as error:
            self._full.put(error)

    def _fill(self, number: int, part: Part, room: _Room) -> None:
        if not self._copies:
            self._read(part, room.memory)
            return
        slot = number % len(self._staging)
        staging, before = self._staging[slot], self._staged[slot]
        if before:
            before.synchronize()
        self._read(part, staging)
        with torch.cuda.stream(self._copies):
            if room.used:
                self._copies.wait_event(room.used)
            room.memory[: part.bytes].copy_(staging[: part.bytes], non_blocking=True)
            room.filled = self._staged[slot] = self._copies.record_event()

    def _read(self, part: Part, memory: Tensor) -> None:
        wanted, at = [], 0
        for name, parameter, size in part.layout():
            begin = at
            for source in part.sources[name]:
                length = math.prod(self.weights.tensors[source].shape) * parameter.dtype.itemsize
                wanted.append((source, parameter.dtype, memory[begin : begin + length]))
                begin += length
            at += size
        self.weights.read(wanted)


def _views(part: Part, memory: Tensor) -> dict[str, Tensor]:
    """The parameters of a part in the memory that was filled for it."""
    views, at = {}, 0
    for name, parameter, size in part.layout():
        views[name] = memory[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        at += size
    return views


def put(hidden: Tensor, at: Tensor, rows: Tensor, add: bool = False) -> None:
    """Write rows into hidden states, or add them.

    Args:
        hidden: [B, P, D]; it is changed.
        at: [B, V] int64, the position of each row; -1: it is padding.
        rows: [B, V, D].
        add: whether what is there stays.
    """
    batch, slot = (at >= 0).nonzero(as_tuple=True)
    place = (batch, at[batch, slot])
    wanted = rows[batch, slot].to(hidden.dtype)
    hidden[place] = hidden[place] + wanted if add else wanted
