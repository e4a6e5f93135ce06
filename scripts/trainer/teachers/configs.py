"""Reading the config.json of a model that this repository builds itself: its values, or a refusal in words."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.errors import TrainerError


class ModelConfig(BaseModel):
    """The values of a config.json that decide what the model computes; further keys are passed over.

    A field is named as its key. A value that the code has no other way for is a `Literal`.
    """

    model_config = ConfigDict(frozen=True)


AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)


def read(path: Path, kind: type[AnyConfig]) -> AnyConfig:
    """The values of the config.json `path`.

    Raises:
        TrainerError: the file is missing or damaged, lacks a value, or has one that is not supported.
    """
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"{path} cannot be read ({error}); get the teacher again") from error
    except ValidationError as errors:
        raise TrainerError(f"{path} {_complaint(errors)}; get the teacher again or use another one") from None


def _complaint(errors: ValidationError) -> str:
    error = errors.errors()[0]
    key = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"has no value {key}"
    if not key:
        return f"is not usable: {message[0].lower()}{message[1:]}"
    return f"has {key} = {error['input']!r}, which is not supported: {message[0].lower()}{message[1:]}"
