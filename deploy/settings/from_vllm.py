"""vLLM's names of our settings, so that the options of a `vllm serve` line do the same here.

Owns the names with the same meaning, the switches for what always holds here, and the reasons why others are
refused. Pure, except for the command that reads them. docs/cli.md has the same table.
"""

from collections.abc import Iterator, Mapping, Sequence

import click
from blockyard.deploy.settings.setting import GroupedCommand, wrong_values_are_usage

ALIASES: Mapping[str, str] = {
    "--port": "--http-port",
    "--served-model-name": "--model-name",
    "--data-parallel-size": "--workers",
    "-dp": "--workers",
    "-tp": "--tensor-parallel-size",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--swap-space": "--swap-space-gib",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
}
"""Our options, by vLLM's names."""
VALUES: Mapping[tuple[str, str], str] = {
    ("--dtype", "half"): "float16",
    ("--dtype", "float"): "float32",
    ("--kv-cache-dtype", "fp8_e4m3"): "fp8",
    ("--generation-config", "vllm"): "none",
}
"""Our values, by an option and vLLM's value of it."""
HOLD_ALWAYS = frozenset(
    (
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        "--disable-log-requests",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    )
)
"""Switches for what always holds here; they are ignored."""
_NO_PIPELINE = "layers are not split over GPUs; --tensor-parallel-size splits each layer over several"
ONLY_ONE = {"--pipeline-parallel-size": _NO_PIPELINE, "-pp": _NO_PIPELINE}
"""Options that are refused with any value but 1, with the reason."""
_OWN_SCHEME = (
    "a checkpoint says itself how it is quantised; --cpu-linears int8 and --kv-cache-dtype quantise here"
)
REFUSED = {
    "--api-key": "every user of a machine can read arguments: use `blockyard token new --auth-file FILE`, then "
    "--auth-file FILE",
    "--trust-remote-code": "no code of a model's folder is ever run",
    "--quantization": _OWN_SCHEME,
    "-q": _OWN_SCHEME,
    "--enable-lora": "--max-loras with --adapter-dir serves adapters; `blockyard lora add` names them",
    "--no-enable-prefix-caching": "the prefix cache is always on; `cache_salt` keeps a request's prefixes apart",
}
"""Options that are refused, with the reason."""
_TRANSLATED = frozenset((*ALIASES, *ONLY_ONE, *(option for option, _ in VALUES)))


class VllmCommand(GroupedCommand):
    """A command that accepts vLLM's names as well. Its help shows only ours."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        with wrong_values_are_usage():
            arguments = with_further_models(ours(arguments))
        return super().parse_args(context, arguments)


def ours(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with our names and values in place of vLLM's, without options that change nothing here.

    Raise ValueError for an option that is refused.
    """
    return list(_ours(list(arguments)))


def with_further_models(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --further-model in place of each --model but the first."""
    found, num_models = [], 0
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option == "--model":
            num_models += 1
            if num_models > 1:
                argument = "--further-model" + equals + value
        found.append(argument)
    return found


def _ours(left: list[str]) -> Iterator[str]:
    while left:
        argument = left.pop(0)
        if argument == "--":
            yield from (argument, *left)
            return
        option, equals, value = argument.partition("=")
        if option.startswith("--"):
            option = option.replace("_", "-")
        if option in REFUSED:
            raise ValueError(f"{option} is not taken: {REFUSED[option]}")
        if option in HOLD_ALWAYS:
            continue
        if option not in _TRANSLATED:
            yield option + equals + value
            continue
        values = [value] if equals else _values_of(option, left)
        if option in ONLY_ONE:
            if values != ["1"]:
                raise ValueError(f"{' '.join([option, *values])} is not taken: {ONLY_ONE[option]}")
            continue
        known = ALIASES.get(option, option)
        yield from (f"{known}={VALUES.get((known, value), value)}" for value in values)
        if not values:
            yield known


def _values_of(option: str, left: list[str]) -> list[str]:
    """Remove an option's values from `left`, the arguments after it, and return them.

    --served-model-name takes all values up to the next option, any other option at most one.
    """
    most = len(left) if option == "--served-model-name" else 1
    values: list[str] = []
    while left and len(values) < most and not left[0].startswith("-"):
        values.append(left.pop(0))
    return values
