"""Options that several commands share, and the meaning of a model's name.

Does not own the options of `up` (up_options.py) and of a request (request_options.py).
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import click
from blockyard.deploy.machine.state import checked_name
from blockyard.deploy.ray.head import address_of_this_machine, host_and_port
from blockyard.deploy.settings.setting import Command as Command
from blockyard.deploy.settings.setting import checked_by, is_template, setting
from blockyard.proto.naming.model_files import OTHER_FORMATS, model_names
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS, MAX_GRACE_SECONDS
from blockyard.router.config import ServedModel

DEMO_MODEL = "demo"
RAY_ADDRESS_VARIABLE = "RAY_ADDRESS"
MAX_TEMPLATE_BYTES = 2**20
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


def model_path(model: str) -> str:
    """Return a model's folder as an absolute path, because Ray's actors start in another folder. Keep a hub name.

    `demo` is the model in this package. Raise ValueError for a text that is neither a folder nor a hub name.
    """
    if model == DEMO_MODEL:
        return str(Path(__file__).parents[1].resolve() / "demo_model" / "checkpoint")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if folder.is_file() and folder.suffix in OTHER_FORMATS:
        raise ValueError(
            f"{folder} is a file, and a model is a folder: it holds {OTHER_FORMATS[folder.suffix]}"
        )
    if not _HUB_NAME.fullmatch(model):
        raise ValueError(f"model {model!r} is no folder here, and no hub name")
    return model


def at_revision(model: str, revision: str | None) -> str:
    """Return `NAME@REVISION`, or the model unchanged if `revision` is None.

    Raise ValueError for a folder, which has no revisions, and for a name that contains a revision already.
    """
    if revision is None:
        return model
    if Path(model).is_dir():
        raise ValueError("a revision is of a model on the hub, and this model is a folder")
    if "@" in model:
        raise ValueError(f"the model {model!r} names its revision already")
    return model_path(f"{model}@{revision}")


def ray_address(address: str) -> str | None:
    """Return an address of Ray as host:port, or None for `local`, a Ray that `up` starts. As `ray.init` does, take
    `auto` for the address in RAY_ADDRESS or, if that is not set, of the Ray on this machine.

    Raise ValueError for any other text.
    """
    if address == "auto":
        address = os.environ.get(RAY_ADDRESS_VARIABLE, "auto")
    if address == "auto":
        address = address_of_this_machine()
    if address == "local":
        return None
    host_and_port(address)
    return address


def found_address(address: str) -> str:
    """Return the address of a Ray that runs, as `ray_address` does. Raise ValueError for `local` too."""
    found = ray_address(address)
    if found is None:
        raise ValueError("`local` is for `up` alone, which starts a Ray")
    return found


def found_option(command: Command) -> Command:
    """Add `--address`, by which a command finds a cluster that this machine does not remember."""
    add = click.option(
        "--address",
        metavar="HOST:PORT",
        callback=checked_by(found_address),
        help="Find the cluster on the Ray cluster at this address, also if this machine does not remember it. `auto` "
        "is RAY_ADDRESS or, if that is not set, the Ray on this machine.",
    )
    return add(command)


def served_names(model: str) -> tuple[str, ...]:
    """Return the name under which clients find the demo model, whose folder is called `checkpoint`.

    Return () for another model: its folder's or hub name is its name.
    """
    return (DEMO_MODEL,) if model == DEMO_MODEL else ()


def kept_model(model: str) -> str:
    """Return a model as `model_path` does, but `demo` unchanged: its name is not its folder's."""
    return model if model == DEMO_MODEL else model_path(model)


def text_of(file: str) -> str:
    """Return the text of a chat template's file, or the text itself, which `blockyard export` writes.

    Raise ValueError if it is too long or cannot be read.
    """
    try:
        content = file.encode() if is_template(file) else Path(file).read_bytes()
        if len(content) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"is longer than {MAX_TEMPLATE_BYTES:,} bytes: {file[:99]}")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read ({type(error).__name__}): {file}") from None


def further_model(
    model: str, *, names: Sequence[str] = (), tokenizer: str | None = None, chat_template: str | None = None
) -> ServedModel:
    """Return a model that is served beside the first one of its cluster. Its index has its id as name.

    Raise ValueError as `model_path` does.
    """
    path = model_path(model)
    names = tuple(names) or served_names(model) or model_names(path)
    return ServedModel(
        model=path, names=names, tokenizer=tokenizer, chat_template=chat_template, index=names[0]
    )


def cluster_option(command: Command) -> Command:
    add = setting(
        "cluster",
        "--cluster",
        key="name",
        default="default",
        show_default=True,
        envvar="BLOCKYARD_CLUSTER",
        callback=checked_by(checked_name),
        help="Name of the cluster.",
    )
    return add(command)


def router_option(command: Command) -> Command:
    add = setting(
        "client",
        "--router",
        "routers",
        multiple=True,
        envvar="BLOCKYARD_ROUTER",
        help="Address host:port of a router, instead of the cluster that `up` remembers on this machine.",
    )
    return add(command)


def grace_option(command: Command) -> Command:
    add = click.option(
        "--grace-seconds",
        type=click.FloatRange(0, MAX_GRACE_SECONDS),
        default=DEFAULT_GRACE_SECONDS,
        show_default=True,
    )
    return add(command)


def output_option(command: Command) -> Command:
    add = click.option(
        "-o",
        "--output",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="`json` is for programs.",
    )
    return add(command)


waits_option = click.option(
    "--wait-for-nodes",
    "waits_for_nodes",
    is_flag=True,
    help="If there is no room, wait up to ten minutes for a person or an autoscaler to add nodes.",
)
