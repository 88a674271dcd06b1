"""Tally: the tokens of one call so far, for its usage."""

from collections.abc import Sequence
from typing import Any

from blockyard.router.generation.client_buffer import Delta, Emit, Run
from blockyard.router.parsing.formats import NO_END


class Tally:
    """Counts the tokens of one call so far, and keeps the prompts' tokens for a client that wants them."""

    def __init__(self, outputs_a_prompt: int) -> None:
        self._outputs_a_prompt = outputs_a_prompt
        self._counts: dict[int, tuple[int, int]] = {}
        """Number of tokens and of cached tokens of each prompt, by its index in the call."""
        self.completion_tokens = 0
        self.prompt_end = NO_END
        """Last text of a chat's prompt, for the parser of its answer."""
        self.prompts: dict[int, Sequence[int]] = {}
        """Token ids of the prompt, by index of its output. Empty unless the client wants them."""

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts. Each prompt counts once, whatever its number of outputs."""
        return sum(tokens for tokens, _ in self._counts.values())

    @property
    def cached_tokens(self) -> int:
        """Return how many of the prompts' tokens were reused."""
        return sum(cached for _, cached in self._counts.values())

    def add(self, delta: Delta) -> None:
        self._counts[delta.index // self._outputs_a_prompt] = delta.prompt_tokens, delta.cached_tokens
        self.completion_tokens += len(delta.token_ids)
        self.prompt_end = self.prompt_end or delta.prompt_end
        if delta.prompt_token_ids:
            self.prompts[delta.index] = delta.prompt_token_ids

    def of(self, run: Run) -> Run:
        """Return `run` with each of its deltas added here."""

        async def counted(emit: Emit) -> None:
            def add(delta: Delta) -> None:
                self.add(delta)
                emit(delta)

            await run(add)

        return counted

    def usage(self) -> dict[str, Any]:
        """Return the usage so far in the form of OpenAI's chats and completions."""
        prompt_tokens = self.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
