"""Which model folders may be read at all: regular files only, and none that ask for code of their own.

A FIFO, a socket or a device would hold the start for ever. `auto_map` names Python code in the checkpoint: it is never
run, and without it nobody can say that this is the same model. Does not own what the files say.
"""

import json
import stat
from pathlib import Path

CODE_KEY = "auto_map"
NAMES_CODE = ("config.json", "tokenizer_config.json")
FILE_SUFFIXES = (".json", ".safetensors", ".model", ".jinja", ".txt")
"""What is called so is no folder."""


def check_model_files(folder: Path) -> Path:
    """The folder. Raises ValueError that names the file which cannot be read, or asks for code."""
    for file in sorted(folder.iterdir()):
        _check_kind(file)
    for name in NAMES_CODE:
        _check_runs_no_code(folder / name)
    return folder


def _check_kind(file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except OSError:
        return  # a link to nothing: whoever needs the file says that it is missing
    is_fine = stat.S_ISDIR(mode) and file.suffix not in FILE_SUFFIXES
    if not (is_fine or stat.S_ISREG(mode)):
        raise ValueError(f"{file} is no regular file: a model folder holds files and folders only")


def _check_runs_no_code(file: Path) -> None:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # missing or broken: whoever reads it for good says so
    if isinstance(content, dict) and content.get(CODE_KEY):
        raise ValueError(
            f"{file} names code of its own ({CODE_KEY}), which is never run: take {CODE_KEY} out if the model is what "
            "its architectures say without that code"
        )
