"""Helpers of several modules: the processes of a test, expected tokens, and `serve` in the foreground."""

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blockyard import deploy
from transformers import AutoModelForCausalLM, AutoTokenizer


def processes_of(home: Path) -> list[int]:
    """Return every process that inherited this test's BLOCKYARD_HOME, those of Ray and Redis among them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(home).encode() in environment:
                found.append(int(entry.name))
    return found


CHECKPOINT = Path(deploy.__file__).parent / "demo_model" / "checkpoint"
DOWN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    process: subprocess.Popen[str]
    told: str
    """Output on stdout."""
    errors: list[str] = field(default_factory=list)
    """Output on stderr, once it has ended."""

    def value(self, name: str) -> str:
        """Return the value of a line such as `HTTP       http://...`."""
        (found,) = re.findall(rf"^{name} +(\S+)$", self.told, re.MULTILINE)
        return str(found)


def until_it_serves(process: "subprocess.Popen[str]") -> str:
    """Return what `serve` prints until it serves. The start has deadlines of its own."""
    assert process.stdout is not None
    told = ""
    for line in process.stdout:
        told += line
        if line.startswith("Ctrl-C"):
            return told
    assert process.stderr is not None
    raise AssertionError(f"it ended: {told}{process.stderr.read()}")


SIMULATED = ("--model", "demo", "--engine", "simulated", "--device", "cpu", "--kv-cache-memory", "18MiB")


PROMPT = "".join(f"value_{line} = {line}\n" for line in range(12))


NUM_TOKENS = 24


def expected(checkpoint: Path, count: int = NUM_TOKENS) -> list[int]:
    """Return the greedy tokens of transformers."""
    tokens = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(**tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    found: list[int] = output[0, tokens["input_ids"].shape[1] :].tolist()
    return found
