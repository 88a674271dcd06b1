"""Sandbox: compiles grammars for the first time. It may hang, grow or die without harm to the worker.

`python -m blockyard.worker.grammar.sandbox` reads one JSON object a line from its standard input, first the tokenizer,
then grammars. It answers each with a line: null, or the reason of a refusal. It ends when its input does, so it never
outlives its worker. What it compiles is thrown away: the worker compiles the same again, and knows now that this is
cheap.

The stack is smaller here than any thread's of the worker, so that what overflows does so here.
"""

import json
import resource
import sys
import threading
from pathlib import Path

from blockyard.worker.grammar.compiled import CompiledGrammar, TokenizerSource
from blockyard.worker.grammar.grammar import Grammar, GrammarError
from llguidance import LLTokenizer

STACK_BYTES = 2**20
OUT_OF_MEMORY = "the grammar takes too much memory to compile"


def first_line(source: TokenizerSource, memory_bytes: int) -> bytes:
    """Return the first line that the process must read."""
    words = [str(source.file), source.vocab_size, list(source.eos_token_ids), memory_bytes]
    return json.dumps(words).encode() + b"\n"


def grammar_line(grammar: Grammar) -> bytes:
    return json.dumps([grammar.kind, grammar.source]).encode() + b"\n"


def main() -> None:
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    file, vocab_size, eos_token_ids, memory_bytes = json.loads(sys.stdin.readline())
    source = TokenizerSource(file=Path(file), vocab_size=vocab_size, eos_token_ids=tuple(eos_token_ids))
    tokenizer = source.load()
    CompiledGrammar(Grammar(kind="json_object"), tokenizer).try_out()
    _limit_memory(memory_bytes)
    _answer(None)
    for line in sys.stdin:
        kind, text = json.loads(line)
        _answer(_problem(Grammar(kind=kind, source=text), tokenizer))


def _problem(grammar: Grammar, tokenizer: LLTokenizer) -> str | None:
    try:
        CompiledGrammar(grammar, tokenizer).try_out()
    except GrammarError as error:
        return str(error)
    except MemoryError:
        return OUT_OF_MEMORY
    return None


def _answer(problem: str | None) -> None:
    print(json.dumps(problem), flush=True)


def _limit_memory(extra_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    most = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # An abort for lack of memory leaves no core file behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
