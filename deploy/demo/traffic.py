"""Requests of the demo: four groups of chats, all in flight at once, and afterwards one chat alone.

Owns the order of requests and their results. Does not own the cluster or any output. The chats of a group share one
system prompt. The first one leads: the others follow once its first token has arrived, because then its prompt's blocks
can be found. The chat alone runs with and without its prompt in the cache.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from blockyard.deploy.demo.prompts import DemoGroup
from blockyard.router.client import AsyncClient, Finish

MAX_TOKENS = 64
TEMPERATURE = 0.7
ALONE_ROUNDS = 5
INDEX_SECONDS = 0.2
"""Time that a worker gets to publish its new blocks."""


@dataclass(slots=True, kw_only=True)
class Chat:
    """One request of the demo, in flight or finished."""

    name: str
    group: str
    number: int
    """Position in its group, from 1."""
    system_prompt: str
    question: str
    text: str = ""
    time_to_first_token_seconds: float | None = None
    """Measured at the client."""
    finish: Finish | None = None
    unread_from: int = 0
    """Characters of `text` that have been shown."""

    @property
    def tokens_per_second(self) -> float:
        if self.finish is None or self.time_to_first_token_seconds is None:
            return 0.0
        decoding_seconds = self.finish.total_seconds - self.finish.time_to_first_token_seconds
        return (self.finish.completion_tokens - 1) / decoding_seconds if decoding_seconds > 0 else 0.0


def chats_of(group: DemoGroup) -> list[Chat]:
    return [
        Chat(
            name=f"{group.name}-{number}",
            group=group.name,
            number=number,
            system_prompt=group.system_prompt,
            question=question,
        )
        for number, question in enumerate(group.questions, start=1)
    ]


async def run_chats(routers: Sequence[str], chats: Sequence[Chat], on_text: Callable[[Chat], None]) -> None:
    """Run all chats, in each group the first one ahead of the others. Call `on_text` for each text and each end.

    Raise an ExceptionGroup of BlockyardErrors.
    """
    leaders = [chat for chat in chats if chat.number == 1]
    leading = {chat.name for chat in leaders}
    prompts_are_cached = asyncio.Event()

    def lead(chat: Chat) -> None:
        leading.discard(chat.name)
        if not leading:
            prompts_are_cached.set()
        on_text(chat)

    async with AsyncClient(routers) as client, asyncio.TaskGroup() as requests:
        for chat in leaders:
            requests.create_task(_run_chat(client, chat, lead))
        await prompts_are_cached.wait()
        # Interleave the groups, so that no worker is busier than another for long.
        for chat in sorted(chats, key=lambda chat: chat.number):
            if chat.number > 1:
                requests.create_task(_run_chat(client, chat, on_text))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyAlone:
    """Median times to the first token of requests that ran alone on the cluster, in seconds."""

    new_seconds: float
    """Median with nothing of the prompt cached."""
    cached_seconds: float
    prompt_tokens: int
    cached_tokens: int


async def time_alone(routers: Sequence[str], question: Chat) -> LatencyAlone | None:
    """Send one question in several rounds, twice in each, with a new cache salt for each round.

    The first time nothing of its prompt is cached, the second time all full blocks are. Return None if cached blocks
    were never found.
    """
    pairs: list[tuple[Chat, Chat]] = []
    async with AsyncClient(routers) as client:
        for _ in range(ALONE_ROUNDS):
            salt = f"demo-{secrets.token_hex(8)}"
            new, again = (
                Chat(
                    name=question.name,
                    group=question.group,
                    number=question.number,
                    system_prompt=question.system_prompt,
                    question=question.question,
                )
                for _ in range(2)
            )
            await _run_chat(client, new, lambda chat: None, cache_salt=salt, max_tokens=1)
            await asyncio.sleep(INDEX_SECONDS)
            await _run_chat(client, again, lambda chat: None, cache_salt=salt, max_tokens=1)
            if again.finish is not None and again.finish.cached_tokens:
                pairs.append((new, again))
    if not pairs:
        return None
    finish = pairs[0][1].finish
    assert finish is not None
    return LatencyAlone(
        new_seconds=median(new.time_to_first_token_seconds or 0.0 for new, _ in pairs),
        cached_seconds=median(again.time_to_first_token_seconds or 0.0 for _, again in pairs),
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
    )


async def _run_chat(
    client: AsyncClient,
    chat: Chat,
    on_text: Callable[[Chat], None],
    *,
    cache_salt: str | None = None,
    max_tokens: int = MAX_TOKENS,
) -> None:
    messages = [
        {"role": "system", "content": chat.system_prompt},
        {"role": "user", "content": chat.question},
    ]
    asked_at = time.monotonic()
    async for delta in client.stream(
        messages=messages, max_tokens=max_tokens, temperature=TEMPERATURE, cache_salt=cache_salt
    ):
        if chat.time_to_first_token_seconds is None and delta.token_ids:
            chat.time_to_first_token_seconds = time.monotonic() - asked_at
        chat.text += delta.text
        chat.finish = delta.finish
        on_text(chat)
