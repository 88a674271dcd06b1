"""`blockyard size`, `figures` and `doctor`: commands that need no running cluster."""

import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click
from blockyard.deploy.commands.printing import console, show
from blockyard.deploy.figures import figures
from blockyard.deploy.figures import plots as figures_plots
from blockyard.deploy.lifecycle import doctor as doctors
from blockyard.deploy.lifecycle import driver as on_ray
from blockyard.deploy.machine import check_results
from blockyard.deploy.machine.redis_server import REDIS_URL_VARIABLE
from blockyard.deploy.settings import size
from blockyard.deploy.settings.options import found_address, model_path, output_option
from blockyard.deploy.settings.redis_given import checked_redis_url
from blockyard.deploy.settings.setting import checked_by
from blockyard.deploy.views import views
from blockyard.proto.runtime.settings import parse_bytes, setting_field
from blockyard.worker.config import EngineConfig
from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.model.data_type import RequestedDataType


def _models_paths(models: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(model_path, models))


@click.command(name="size")
@click.argument("model", callback=checked_by(model_path))
@click.option(
    "--model",
    "others",
    metavar="MODEL",
    multiple=True,
    callback=checked_by(_models_paths),
    help="Another model of the same cluster. May be given more than once. Workers on a CPU share its memory.",
)
@click.option(
    "--memory",
    callback=checked_by(parse_bytes),
    default="60GB",
    metavar="SIZE",
    show_default=True,
    help="Memory for the KV cache.",
)
@click.option("--block-size", type=click.Choice(["16", "32", "64", "128"]), default="16", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(get_args(RequestedDataType)),
    default="auto",
    show_default=True,
    help=setting_field(EngineConfig, "dtype").description.help,
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(get_args(KVCacheDtype)),
    default="auto",
    show_default=True,
    help="`auto` uses the type of --dtype. int8 and fp8 have a scale for each token and KV head.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Kind of the workers. Decides the data type if --dtype is auto; cpu means a CPU like this machine's.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="As in `up`: compute in float32, with plain numbers where the weights are quantised.",
)
@click.option(
    "--max-loras",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Adapter slots of a worker of each model.",
)
@click.option(
    "--max-lora-rank", type=click.IntRange(1), default=16, show_default=True, help="Room of each slot."
)
@click.option(
    "--draft-model",
    metavar="MODEL",
    callback=checked_by(lambda model: None if model is None else model_path(model)),
    help="Draft model of a worker of MODEL. Its own KV cache comes out of --memory. Further models have none.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    default=setting_field(EngineConfig, "max_num_seqs").default,
    show_default=True,
    help="Sequences that run at once. A draft model has a spare block for each.",
)
@click.option("--max-model-len", type=int, help="Default: what the model's config says.")
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks of a worker. All sizes are then those of one rank, and --memory too.",
)
@click.option(
    "--total-memory",
    callback=checked_by(parse_bytes),
    metavar="SIZE",
    help="Memory of the machine or GPU, to print what is left of it. Default on a CPU: this machine's memory.",
)
@output_option
def size_command(
    model: str,
    others: tuple[str, ...],
    memory: int,
    block_size: str,
    dtype: RequestedDataType,
    kv_cache_dtype: KVCacheDtype,
    device: str,
    deterministic: bool,
    max_loras: int,
    max_lora_rank: int,
    draft_model: str | None,
    max_num_seqs: int,
    max_model_len: int | None,
    tensor_parallel_size: int,
    total_memory: int | None,
    output: str,
) -> None:
    """Compute the KV cache of MODEL for a memory budget.

    Prints how many blocks, tokens and requests fit, and what a worker takes in all. With --model it does so for a
    worker of each, and on a CPU for all of them together."""
    sizes = [
        size.size_model(
            one,
            budget_bytes=memory,
            block_size=int(block_size),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            on_cpu=device == "cpu",
            max_model_len=max_model_len,
            memory_bytes=total_memory,
            tensor_parallel_size=tensor_parallel_size,
            deterministic=deterministic,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            draft_model=None if number else draft_model,
            max_num_seqs=max_num_seqs,
        )
        for number, one in enumerate((model, *others))
    ]
    show(output, size.sizes_document(sizes), views.sizes_view(sizes))


@click.command(name="figures")
@click.option("-o", "--output", type=click.Choice(["text", "json", "png"]), default="text", show_default=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="figures",
    help="Folder in which `--output png` writes one picture per figure.",
)
def figures_command(output: str, folder: Path | None) -> None:
    """Compute the textbook figures of paged attention.

    Runs the real scheduler and block pool for a few seconds."""
    if folder is not None and output != "png":
        raise click.UsageError("--folder needs --output png")
    computed = figures.compute_figures()
    if output == "png":
        for path in figures_plots.draw_figures(computed, folder or Path("figures")):
            click.echo(path)
    else:
        show(output, computed.as_dict(), figures.figures_table(computed))


@click.command()
@click.option("--model", callback=checked_by(model_path), help="Also check this model's folder.")
@click.option(
    "--redis-url",
    envvar=REDIS_URL_VARIABLE,
    callback=checked_redis_url(REDIS_URL_VARIABLE),
    help="Check this Redis, or several with commas between, instead of a private one. A URL with a password is "
    "accepted only in the variable.",
)
@click.option(
    "--address",
    callback=checked_by(found_address),
    help="Also check each node of the Ray cluster at host:port: versions, code, model, Redis, ports.",
)
@output_option
def doctor(model: str | None, redis_url: str | None, address: str | None, output: str) -> None:
    """Find problems that would keep a cluster from serving.

    Checks this machine and, with --address, the nodes of a Ray cluster. Exit code 1 if there is a problem."""
    looks = [doctors.examine(model, redis_url)]
    if address is not None:
        # Check this first: `examine` yields lazily, and examining this machine takes seconds.
        on_ray.check_lets_in(address)
        looks.append(doctors.examine_nodes(address, model, redis_url))
    findings = []
    for finding in itertools.chain.from_iterable(looks):
        findings.append(finding)
        if output == "text":  # Print each finding at once: some take a second.
            console().print(views.finding_line(finding))
    if output == "json":
        show(output, [asdict(finding) for finding in findings], "")
    sys.exit(check_results.exit_code(findings))
