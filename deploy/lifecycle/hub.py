"""Hugging Face hub: finds the size of a model and downloads it with a count of bytes.

Owns the download by a command before anything starts. Does not own names, files and refusals (worker/model/config.py).
The hub's own variables apply: HF_TOKEN for gated models, HF_HOME for the cache, HF_HUB_OFFLINE=1 to use only the cache.
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
    """Bytes that are not in the cache yet."""
    blobs: Path
    """Folder of the cache that holds the files."""


def is_on_hub(model: str) -> bool:
    return not Path(model).expanduser().is_dir()


def use_download_dir(folder: str | None) -> None:
    """Make this process and its children keep the hub's files in this folder."""
    if folder is not None:
        os.environ[CACHE_VARIABLE] = folder


def hub_files(model: str, patterns: Sequence[str] = HUB_PATTERNS) -> HubFiles | None:
    """Ask the hub for the sizes of a model's files. Return None if the hub does not answer or does not tell them."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # They count files, not bytes.
    try:
        found = hub_snapshot(model, patterns=patterns, ignored=HUB_IGNORED_PATTERNS, dry_run=True)
    except (OSError, ValueError):
        return None
    return _hub_files_of(found)


def _hub_files_of(found: Sequence[Any]) -> HubFiles | None:
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
    """Download a model, and a separate tokenizer, before any process starts that would wait for them.

    Do nothing for a folder or a cached model. Raise ValueError for a model that is neither here nor on the hub.
    """
    download(model, report)
    if tokenizer is not None:
        download(tokenizer, report, patterns=TOKENIZER_FILES)


def download(model: str, report: Report, *, patterns: Sequence[str] = HUB_PATTERNS) -> None:
    """Download the files of one hub repository that match `patterns`. Do nothing, or raise, as `download_all` does."""
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

    # A daemon thread, because nothing can interrupt the hub's client. An interrupted command leaves it behind.
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
    """Return the bytes in the cache's folder, including unfinished files. 0 without a folder."""
    if files is None or not files.blobs.is_dir():
        return 0
    sizes = 0
    for file in files.blobs.iterdir():
        try:
            sizes += file.stat().st_size
        except FileNotFoundError:
            continue  # It was complete and has been renamed.
    return sizes
