"""Models on the Hugging Face hub: how large they are, and their download with a count of bytes.

Owns what a command does before anything starts. Names, files and refusals are worker/model/config.py's. The hub's own
variables hold: HF_TOKEN for gated models, HF_HOME for the cache, HF_HUB_OFFLINE=1 to take the cache alone.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.deploy.lifecycle.serving import Progress, Report
from blockyard.deploy.machine.interruption import raise_if_asked
from blockyard.deploy.views.quantities import format_bytes
from blockyard.proto.naming.model_files import CACHE_VARIABLE, TOKENIZER_FILES, hub_snapshot
from blockyard.worker.model.config import (
    HUB_IGNORED_PATTERNS,
    HUB_PATTERNS,
    resolve_model,
)

LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """The files of a repository that a worker needs."""

    num_files: int
    num_bytes: int
    missing_bytes: int
    """This part of them is not in the cache yet."""
    blobs: Path
    """The folder of the cache that they come to."""


def is_on_hub(model: str) -> bool:
    return not Path(model).expanduser().is_dir()


def use_download_dir(folder: str | None) -> None:
    """Make this process, and those that it starts, keep the hub's files in this folder."""
    if folder is not None:
        os.environ[CACHE_VARIABLE] = folder


def hub_files(model: str, patterns: Sequence[str] = HUB_PATTERNS) -> HubFiles | None:
    """Ask the hub. None where it does not say: offline, or without the sizes."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they count files, not bytes
    try:
        found = hub_snapshot(model, patterns=patterns, ignored=HUB_IGNORED_PATTERNS, dry_run=True)
    except (OSError, ValueError):
        return None
    return _told(found)


def _told(found: Sequence[Any]) -> HubFiles | None:
    sizes = [file.file_size for file in found]
    if not found or None in sizes:
        return None
    snapshots = next(folder for folder in Path(found[0].local_path).parents if folder.name == "snapshots")
    return HubFiles(
        num_files=len(found),
        num_bytes=sum(sizes),
        missing_bytes=sum(file.file_size for file in found if file.will_download),
        blobs=snapshots.parent / "blobs",
    )


def download_all(model: str, tokenizer: str | None, report: Report) -> None:
    """Download a model, and the tokenizer where it is another's, before any process starts that would wait for them.

    Does nothing for a folder, nor for what is cached. Raises ValueError for what is neither here nor on the hub.
    """
    download(model, report)
    if tokenizer is not None:
        download(tokenizer, report, patterns=TOKENIZER_FILES)


def download(model: str, report: Report, *, patterns: Sequence[str] = HUB_PATTERNS) -> None:
    """Download the files of one hub repository that match. Otherwise as `download_all`."""
    if not is_on_hub(model):
        return
    stage = f"looking for {model} on the hub"
    report(Progress(stage=stage))
    files = hub_files(model, patterns)
    if files is not None and files.missing_bytes:
        stage = f"downloading {model}: {format_bytes(files.missing_bytes)}"
    downloaded: Future[Path] = Future()
    before_bytes = _size(files)

    def run() -> None:
        try:
            downloaded.set_result(resolve_model(model, patterns=patterns))
        except BaseException as error:
            downloaded.set_exception(error)

    # A daemon, since nothing can interrupt the hub's client: whoever gives up leaves it behind.
    threading.Thread(target=run, daemon=True).start()
    while not downloaded.done():
        raise_if_asked()
        if files is None or not files.missing_bytes:
            report(Progress(stage=stage))
        else:
            done_bytes = min(_size(files) - before_bytes, files.missing_bytes)
            detail = f"{format_bytes(done_bytes)} of {format_bytes(files.missing_bytes)}"
            report(Progress(stage=stage, done=done_bytes, total=files.missing_bytes, detail=detail))
        time.sleep(LOOK_SECONDS)
    downloaded.result()


def _size(files: HubFiles | None) -> int:
    """Bytes of the cache's folder, unfinished files included."""
    if files is None or not files.blobs.is_dir():
        return 0
    sizes = 0
    for file in files.blobs.iterdir():
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue  # was renamed when it was whole
    return sizes
