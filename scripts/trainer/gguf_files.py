"""GGUF files as they are given to us: opened once, with errors a person can act on."""

from functools import lru_cache
from pathlib import Path

from gguf import GGUFReader

from trainer.errors import TrainerError


def open_gguf(path: Path | str) -> GGUFReader:
    """Open a GGUF for reading; its tensors are memory-mapped.

    Raises:
        TrainerError: it is missing, truncated, or not a GGUF.
    """
    try:
        stat = Path(path).stat()
        return _open(str(path), stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise TrainerError(f"{path} cannot be read ({error.strerror}); give the path of a GGUF file") from None
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        with open(path, "rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise TrainerError(f"{path} is not a GGUF file (it begins with {magic!r}); give one that is") from None
        raise TrainerError(f"{path} is truncated or damaged ({error}); get it again") from None


# A header that holds a tokenizer takes seconds to read, and the model and its tokenizer are read one after the other.
@lru_cache(maxsize=2)
def _open(path: str, modified: int, size: int) -> GGUFReader:
    return GGUFReader(path)
