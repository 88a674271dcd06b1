"""Finds a model's files, and refuses folders that must not be read.

Owns the names of models: a folder, or a repository on the hub with a revision after `@`. Does not own what the files
say.

A folder must hold regular files only: a FIFO, a socket or a device would block the start for ever. Files but the
weights have a largest size, because their readers hold the interpreter lock, and a router that adds a model serves
others meanwhile. No file may ask for code of its own. `auto_map` names Python code in the checkpoint. That code is
never run, and without it the model may behave differently.
"""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

CODE_KEY = "auto_map"
_OUTER = ("eos_token_id", "bos_token_id")
TEXT_CONFIG = "text_config"
"""Key of a config.json with the fields of the text part, of a model that also reads images."""
NAMES_CODE = ("config.json", "tokenizer_config.json")
FILE_SUFFIXES = (".json", ".safetensors", ".model", ".jinja", ".txt")
"""Suffixes of a model's files. A folder with such a suffix is refused."""
MAX_FILES = 10_000
MAX_VOCABULARY_BYTES = 64 * 2**20
"""Limit of any file of FILE_SUFFIXES but weights. The largest tokenizer.json known has 35 MB."""
MAX_CONFIG_BYTES = 8 * 2**20
"""Limit of files that say how to use a model. tokenizer_config.json has 1 MB where it lists thousands of tokens."""
_CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "modules.json"),
)
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder within a model's, of which transformers reads each template."""
_INSTEAD = "name a folder, or a repository on the hub, with config.json and safetensors files"
OTHER_FORMATS = {
    ".gguf": f"GGUF weights only, a format that is not read: {_INSTEAD}, such as the model that they were made from",
    **dict.fromkeys(
        (".bin", ".pt", ".pth"),
        f"pickled weights only, which could run any code and are never loaded: {_INSTEAD}, or convert them "
        "(save_pretrained of transformers writes safetensors)",
    ),
}
"""Why weights are refused, by the suffix of their files."""
TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer*", "vocab.*", "merges.txt", "*.model")
"""The files that a router reads of a hub model: everything but the weights."""
HUB_TIMEOUT_SECONDS = 10.0
CACHE_VARIABLE = "HF_HUB_CACHE"
"""The hub's own variable for the folder where downloads go."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of the model's text part.

    A model that also reads images has it in `text_config`. There it wins over the top level, but for the architecture,
    special tokens, and a head that the top level says is not tied.
    """
    text = config.get(TEXT_CONFIG)
    if not isinstance(text, dict):
        return dict(config)
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    if config.get("tie_word_embeddings") is False:
        outer["tie_word_embeddings"] = False
    return {**config, **text, "architectures": config.get("architectures"), **outer}


def name_and_revision(model: str) -> tuple[str, str | None]:
    """Split `NAME@REVISION`. The revision is a branch, a tag or a commit of a hub repository, or None."""
    name, _, revision = model.partition("@")
    return name, revision or None


def model_names(name_or_path: str, chosen: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names under which a model is served: the chosen ones, if any. Else a folder has the last part of its
    path, and a hub model its full and its short name."""
    if chosen:
        return tuple(dict.fromkeys(chosen))
    path = Path(name_or_path)
    if path.is_absolute() or path.is_dir():
        return (path.resolve().name,)
    name, _ = name_and_revision(name_or_path)
    return tuple(dict.fromkeys((name, Path(name).name)))


def resolve_model(model: str | Path, *, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    """Return the local folder of a model. Files of a hub model that are not in the local cache are downloaded.

    Of a hub repository, only files that match `patterns` and not `ignored` are taken. Raises ValueError if the model is
    neither a folder nor on the hub, or holds what must not be read.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return check_model_files(folder)
    try:
        snapshot = hub_snapshot(str(model), patterns=patterns, ignored=ignored)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {str(model)!r} is no folder here, and {_why_not(error)}") from error
    return check_model_files(Path(snapshot))


def _why_not(error: Exception) -> str:
    """Say why the hub did not provide a model, from the error of its client."""
    from huggingface_hub import constants, errors

    match error:
        case errors.GatedRepoError():
            return "it is gated on the hub: its owner must grant you access (HF_TOKEN)"
        case errors.RepositoryNotFoundError():
            return "the hub has no model of this name, unless it is private (HF_TOKEN)"
        case errors.RevisionNotFoundError():
            return "the hub does not have this revision of it"
        case errors.HFValidationError():
            return "no model on the hub can have this name"
    if constants.HF_HUB_OFFLINE:
        return "the hub's cache here does not have it, and HF_HUB_OFFLINE does not allow a download"
    for cause in (error, error.__cause__):
        if (answer := getattr(cause, "response", None)) is not None:
            return f"the hub refuses it with HTTP status {answer.status_code}"
    return "the hub's cache here does not have it, and the hub cannot be reached"


def hub_snapshot(
    model: str, *, patterns: Sequence[str], ignored: Sequence[str], dry_run: bool = False
) -> Any:
    """Return the result of the hub's snapshot_download for `NAME` or `NAME@REVISION`. Raises OSError or ValueError."""
    # Imported here: a worker that serves a local folder needs no hub client.
    from huggingface_hub import snapshot_download

    name, revision = name_and_revision(model)
    return snapshot_download(
        name,
        revision=revision,
        cache_dir=os.environ.get(CACHE_VARIABLE),
        allow_patterns=list(patterns),
        ignore_patterns=list(ignored),
        etag_timeout=HUB_TIMEOUT_SECONDS,
        dry_run=dry_run,
    )


def resolve_tokenizer(tokenizer: str | None, model_folder: Path) -> Path:
    """Return the folder of the tokenizer: the model's own unless another is named. Raises ValueError as `resolve_model`
    does."""
    return model_folder if tokenizer is None else resolve_model(tokenizer, patterns=TOKENIZER_FILES)


def refuse_other_formats(folder: Path) -> None:
    """Raise ValueError for a folder with weights, but none in safetensors. The error names the format and what to serve
    instead."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if any(file.suffix == ".safetensors" for file in files):
        return
    for file in files:
        if (reason := OTHER_FORMATS.get(file.suffix)) is not None:
            raise ValueError(f"{folder} holds {reason}; the first is {file.name}")


def check_model_files(folder: Path) -> Path:
    """Return the folder if its files are safe to read. Raises ValueError that names a file which is no regular file, is
    too large, or names code of its own."""
    for place in (folder, folder / TEMPLATES_FOLDER):
        for file in _files(place) if place.is_dir() else ():
            _check_file(file)
    for name in NAMES_CODE:
        _check_runs_no_code(folder / name)
    return folder


def _files(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, MAX_FILES + 1)]
    if len(names) > MAX_FILES:
        raise ValueError(f"{folder} holds more than {MAX_FILES} files, so it is no model folder")
    return [folder / name for name in sorted(names)]


def _check_file(file: Path) -> None:
    try:
        status = file.stat()
    except OSError:
        return  # a link to nothing: the code that needs the file reports it
    mode = status.st_mode
    is_fine = stat.S_ISDIR(mode) and file.suffix not in FILE_SUFFIXES
    if not (is_fine or stat.S_ISREG(mode)):
        raise ValueError(f"{file} is no regular file: a model folder holds files and folders only")
    most_bytes = _most_bytes(file)
    if most_bytes is not None and status.st_size > most_bytes:
        raise ValueError(f"{file} has {status.st_size} bytes, and may have {most_bytes}")


def _most_bytes(file: Path) -> int | None:
    """Return the largest size of a file, or None for weights and files that are not read."""
    if file.name in _CONFIGS or file.suffix == ".jinja":
        return MAX_CONFIG_BYTES
    is_read = file.suffix in FILE_SUFFIXES or file.name.startswith(("tokenizer", "vocab."))
    return MAX_VOCABULARY_BYTES if is_read and file.suffix != ".safetensors" else None


def _check_runs_no_code(file: Path) -> None:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # missing or broken: the code that reads it reports it
    if isinstance(content, dict) and content.get(CODE_KEY):
        raise ValueError(
            f"{file} names code of its own ({CODE_KEY}), which is never run: take {CODE_KEY} out if the model is what "
            "its architectures say without that code"
        )
