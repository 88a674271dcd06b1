"""The demo's requests: four groups of chats, each under one system prompt, all in flight at once; and afterwards one
chat alone, with and without its prompt in the cache.

Owns who asks what and when, and what came back. Does not own the cluster or how anything looks. Within a
group the first request leads: the others follow when its first token is there, which is when its prompt's
blocks can be found.
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
"""Seconds for a worker to publish its new blocks."""


@dataclass(slots=True, kw_only=True)
class Chat:
    """One request under way or done."""

    name: str
    group: str
    number: int
    """Within its group, from 1."""
    system_prompt: str
    question: str
    text: str = ""
    time_to_first_token_seconds: float | None = None
    """As the client saw it."""
    finish: Finish | None = None
    unread_from: int = 0
    """How much of `text` has been shown."""

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
    """`on_text` hears of every piece and of every end. Raises an ExceptionGroup of BlockyardErrors."""
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
        # The groups take turns: in the order of arrival no worker is busier than another for long.
        for chat in sorted(chats, key=lambda chat: chat.number):
            if chat.number > 1:
                requests.create_task(_run_chat(client, chat, on_text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Medians of requests that had the cluster to themselves, in seconds to the first token."""

    new_seconds: float
    """Median if nothing of the prompt is cached."""
    cached_seconds: float
    prompt_tokens: int
    cached_tokens: int


async def time_alone(routers: Sequence[str], question: Chat) -> Alone | None:
    """Ask one question in several rounds, twice in each, under a new cache salt.

    At first nothing of its prompt is cached, then all full blocks are. Return None if they were never found.
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
    return Alone(
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
