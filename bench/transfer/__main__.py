"""Blocks that travel between two worker processes on this machine: what a pull saves, disturbs, and survives.

    python -m bench.transfer

Five parts. A prefix of 4,096 tokens is computed, pulled, and found in local host memory, in turns. Decodes run at both
ends while pulls follow one another. Transfers are cut and corrupted at random. Links between two network namespaces
have known rates, and pulls report what they measured. On such links the rate from which on a pull pays is estimated as
routers do, and measured.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

from bench.engine.shapes import model_folder
from bench.reporting import Floor, write_report
from bench.router.processes import machine_seconds
from bench.transfer.harm import wrong_tokens
from bench.transfer.links import ISOLATED
from bench.transfer.speed import BLOCKS, DECODES, PREFIX_TOKENS, beside_decodes, first_tokens

MODEL = "llama-166m"
BREAK_EVEN_MODEL = "llama-thin"
PARTS = ("first", "decodes", "harm", "links", "break-even")
RATES_MBITS = (10, 100, 1000)
BREAK_EVEN_MBITS = (5, 7, 10, 14, 20, 28, 40, 56, 80, 160)
TRIALS = 10_000
NEVER = 99.0
"""Error of an estimate where the times of pulling and computing do not cross."""


def isolated(module: str, model: str, repeats: int, rates: Sequence[int]) -> list[dict[str, Any]]:
    """Run a module of links in a network namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="blockyard-transfer-") as temporary:
        folder = model_folder(model, "float32", Path(temporary), with_weights=False)
        command = [
            *ISOLATED,
            sys.executable,
            "-m",
            f"bench.transfer.{module}",
            model,
            str(folder),
            str(repeats),
        ]
        done = subprocess.run([*command, *map(str, rates)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the links were not measured:\n{done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="blockyard-transfer-") as temporary:
        folder = model_folder(arguments.model, arguments.dtype, Path(temporary), with_weights=False)
        secret = "" if arguments.plaintext else token_hex(32)
        settings = {
            "secret": secret,
            "repeats": arguments.repeats,
            "dtype": arguments.dtype,
            "device": arguments.device,
        }
        for part in arguments.parts:
            began, busy = time.monotonic(), machine_seconds()
            match part:
                case "first":
                    figures[part] = asyncio.run(first_tokens(arguments.model, folder, **settings))
                case "decodes":
                    figures[part] = asyncio.run(beside_decodes(arguments.model, folder, **settings))
                case "harm":
                    figures[part] = asyncio.run(
                        wrong_tokens(folder, trials=arguments.trials, seed=arguments.seed)
                    )
                case "links":
                    figures[part] = {"rates": isolated("links", MODEL, arguments.repeats, RATES_MBITS)}
                case "break-even":
                    figures[part] = {
                        "prefixes": isolated(
                            "break_even", BREAK_EVEN_MODEL, arguments.repeats, BREAK_EVEN_MBITS
                        )
                    }
            seconds = time.monotonic() - began
            own = sum(os.times()[:4]) - figures.get("own_seconds", 0.0)
            figures["own_seconds"] = sum(os.times()[:4])
            figures[part]["foreign_cores"] = round(max(machine_seconds() - busy - own, 0.0) / seconds, 2)
            print(part, json.dumps(figures[part]), file=sys.stderr, flush=True)
    del figures["own_seconds"]
    return figures


def floors_of(figures: Mapping[str, Any]) -> list[Floor]:
    floors = []
    if first := figures.get("first"):
        floors += [
            _at_most("time to the first token, pulled / recomputed", first["pulled_to_recomputed"], 0.03),
            _at_most("time to the first token, pulled / local host hit", first["pulled_to_host_hit"], 1.2),
        ]
    if harm := figures.get("harm"):
        floors += [
            Floor(name="cut or corrupted transfers", value=harm["tried"], floor=TRIALS, better="higher"),
            _at_most("answers of those with a wrong token", harm["wrong_tokens"], 0),
            _at_most("harmed blocks that were used", harm["harmed_blocks_used"], 0),
        ]
    if decodes := figures.get("decodes"):
        floors += [
            _at_most(f"p99 gap of decodes at the {end}, with / without pulls", decodes[end]["p99_ratio"], 1.1)
            for end in ("source", "destination")
        ]
    for link in figures.get("links", {}).get("rates", ()):
        off = round(abs(link["ratio"] - 1), 3)
        floors.append(_at_most(f"reported rate of {link['configured_mbits']} Mbit/s, off by", off, 0.2))
    for known in figures.get("break-even", {}).get("prefixes", ()):
        name = f"estimated break-even of {known['prefix_tokens']:,} tokens, off by"
        floors.append(_at_most(name, NEVER if known["off_by"] is None else known["off_by"], 0.2))
    return floors


def _at_most(name: str, value: float, floor: float) -> Floor:
    return Floor(name=name, value=value, floor=floor, better="lower")


def text_of(figures: Mapping[str, Any], arguments: argparse.Namespace) -> str:
    assert __doc__ is not None
    where = "one GPU" if arguments.device == "cuda" else "the CPU with one thread each"
    way = "plaintext" if arguments.plaintext else "TLS"
    parts = [__doc__.rpartition("\n\n")[2].strip()]
    parts.append(
        f"{arguments.model} with random weights in {arguments.dtype}, both workers on {where}, {way}, "
        f"{arguments.repeats} repeats."
    )
    if arguments.beside:
        parts.append(f"What else ran on the machine: {arguments.beside}.")
    if first := figures.get("first"):
        seconds = first["seconds"]
        rows = "\n".join(f"| {name} | {1000 * value:.0f} |" for name, value in seconds.items())
        parts.append(
            f"Time to the first token of a prompt whose first {PREFIX_TOKENS:,} tokens ({BLOCKS} blocks, "
            f"{first['megabytes']:.0f} MB) are computed, pulled or in host memory. `set-up` and `transfer` are parts "
            f"of `pulled`. Answers with other tokens than the computed ones: {first['other_tokens']}. Other programs "
            f"used {first['foreign_cores']} cores.\n\n| way | ms, median |\n|---|---|\n{rows}"
        )
    if decodes := figures.get("decodes"):
        rows = "\n".join(
            f"| {end} | {kind} pulls | {known['p50_ms']} | {known['p99_ms']} | {known['gaps']} |"
            for end in ("source", "destination")
            for kind, known in ((kind, decodes[end][kind]) for kind in ("without", "with"))
        )
        parts.append(
            f"Gaps between tokens of {DECODES} decodes at each end. {decodes['pulls']} pulls of the prefix came in a "
            f"row; the destination also reads each prefix and computes a first token. Other programs used "
            f"{decodes['foreign_cores']} cores.\n\n"
            f"| end | | p50 ms | p99 ms | gaps |\n|---|---|---|---|---|\n{rows}"
        )
    if harm := figures.get("harm"):
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in harm["kinds"].items())
        ends = ", ".join(f"{count:,} {end}" for end, count in harm["ends"].items())
        parts.append(
            f"Harmed transfers of the demo model, in plaintext and deterministic: {kinds}. They ended as: {ends}. "
            f"{harm['blocks_used']:,} intact blocks were used."
        )
    if "links" in figures:
        rows = "\n".join(
            f"| {link['configured_mbits']} | {link['megabytes']} | {link['mbits']} | {link['setup_ms'][0]} "
            f"| {min(link['setup_ms'][1:], default=0)} |"
            for link in figures["links"]["rates"]
        )
        parts.append(
            "Links limited by tbf, with TLS. The rate is that of the pulls' reports: the blocks' bytes alone.\n\n"
            "| Mbit/s | MB | reported Mbit/s | set-up ms, first pull | least of the later ones |\n"
            f"|---|---|---|---|---|\n{rows}"
        )
    if "break-even" in figures:
        prefixes = figures["break-even"]["prefixes"]
        rows = "\n".join(
            f"| {known['prefix_tokens']:,} | {known['estimated_mbits']} | {known['measured_mbits']} |"
            for known in prefixes
        )
        savings = "\n".join(
            f"| {known['prefix_tokens']:,} | {mbits} | {estimated} | {measured} |"
            for known in prefixes
            for mbits, estimated, measured in zip(
                known["mbits"], known["estimated_saved_ms"], known["measured_saved_ms"], strict=True
            )
        )
        parts.append(
            f"Rate of a link from which on a prefix of {BREAK_EVEN_MODEL} comes earlier by a pull than by computing. "
            f"Other programs used {figures['break-even']['foreign_cores']} cores.\n\n"
            f"| tokens | estimated Mbit/s | measured Mbit/s |\n|---|---|---|\n{rows}\n\n"
            "Median time that a pull saves.\n\n"
            f"| tokens | Mbit/s | estimated ms | measured ms |\n|---|---|---|---|\n{savings}"
        )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="A shape of bench.engine. Links and harm keep theirs.")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--name", default="transfer", help="The report's name begins with it.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trials", type=int, default=TRIALS, help="Transfers to harm.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the harm.")
    parser.add_argument("--plaintext", action="store_true", help="No cluster secret, so no TLS.")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--beside", default="", help="What else runs on this machine, for the report.")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    figures = measure(arguments)
    parts = () if arguments.parts == list(PARTS) else arguments.parts
    path = write_report(
        "-".join((arguments.name, *parts)),
        title="Blocks that travel between two workers",
        text=text_of(figures, arguments),
        figures=figures,
        floors=floors_of(figures),
        versions={"torch": version("torch")},
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
