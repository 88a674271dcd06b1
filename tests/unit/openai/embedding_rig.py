"""A folder with an embedding model's files, as a router reads them, and its gateway."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from .rig import MODEL, Gateway, running_gateway

EMBEDDINGS = "/v1/embeddings"
SIZE = 64


def embedding_folder(folder: Path, *, normalizes: bool = True) -> Path:
    """Fill a folder with the demo model's tokenizer and the files that make a model embed. Without weights."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in zip(kinds, paths, strict=False)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


@asynccontextmanager
async def running_embedder(folder: Path, **settings: Any) -> AsyncIterator[Gateway]:
    async with running_gateway(model=str(embedding_folder(folder)), **settings) as gateway:
        yield gateway
