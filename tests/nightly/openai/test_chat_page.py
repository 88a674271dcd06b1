"""The chat page, in a real Chromium: a chat with reasoning, a call of a tool and its result, and what goes wrong."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.nightly.dashboard.browser import Browser, open_browser
from tests.unit.openai.rig import (
    ARGUMENTS,
    CALL,
    TEMPLATE,
    TOOLS,
    FakeWorker,
    Gateway,
    Tokens,
    prompt_of,
    running_gateway,
    says,
    served_by,
    worker_of_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESULT = "12 <b>degrees</b>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """A gateway whose chat template begins the reasoning."""
    async with running_gateway(chat_template=TEMPLATE) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as opened:
        yield opened


async def say(browser: Browser, text: str) -> None:
    await browser.type_into("#say", text)
    await browser.press("Enter")


async def ended(browser: Browser, answers: int) -> str:
    """Wait for this many whole answers, and return the facts of the last one."""
    await browser.until(f"document.querySelectorAll('.facts').length === {answers}")
    return str(await browser.evaluate("[...document.querySelectorAll('.facts')].at(-1).textContent"))


async def test_a_person_chats_sees_the_reasoning_and_stands_in_for_a_tool(
    gateway: Gateway, worker: FakeWorker, browser: Browser
) -> None:
    await browser.open(f"http://{gateway.address}/")
    assert await browser.until("!['…', undefined].includes(document.querySelector('#model')?.textContent)")
    assert await browser.text("#model") == "demo"
    says(worker, f"I <i>look</i>.</think>Let me see.\n{CALL}")
    await browser.click("#settings summary")
    await browser.type_into("#tools", json.dumps(TOOLS))
    await say(browser, "Is it <b>warm</b>?")
    facts = await ended(browser, 1)
    assert "tool_calls · worker a · " in facts
    assert ", 32 cached" in facts
    assert await browser.text(".user .text") == "Is it <b>warm</b>?"
    assert await browser.text(".thought") == "I <i>look</i>."
    assert await browser.text(".assistant .text") == "Let me see."
    assert [await browser.text(".call .name"), await browser.text(".call .arguments")] == [
        "get_weather",
        ARGUMENTS,
    ]
    says(worker, "So.</think>It is mild.")
    await browser.type_into(".result", RESULT)
    await browser.click(".give")
    assert "stop · worker a" in await ended(browser, 2)
    shown = await browser.evaluate("[...document.querySelectorAll('.assistant .text')].at(-1).textContent")
    assert shown == "It is mild."
    prompt = prompt_of(worker)
    assert f"<|im_start|>tool get_weather\n{RESULT}<|im_end|>" in prompt
    assert "<think>I <i>look</i>.</think>Let me see." in prompt
    assert browser.complaints == []
    assert browser.hosts == {gateway.address}


async def test_what_goes_wrong_is_said(gateway: Gateway, worker: FakeWorker, browser: Browser) -> None:
    await browser.open(f"http://{gateway.address}/")
    await browser.click("#settings summary")
    await browser.type_into("#tools", '[{"type": "function"}]')
    await say(browser, "hello")
    assert "tools[0].function" in await browser.text(".error")
    assert await browser.evaluate("document.getElementById('say').value") == "hello", "it may be sent again"


async def test_the_page_needs_no_token_but_its_calls_do(tokens: Tokens, browser: Browser) -> None:
    async with running_gateway(auth_file=str(tokens.path)) as closed:
        answer = await closed.get("/")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
        await browser.open(f"http://{closed.address}/")
        await browser.until("document.querySelector('#model')?.textContent === 'an API token is needed'")
        await browser.evaluate(f"document.querySelector('#token').value = {json.dumps(tokens.of['ann'])}")
        await browser.evaluate("document.querySelector('#token').dispatchEvent(new Event('change'))")
        await browser.until("document.querySelector('#model')?.textContent === 'demo'")
        async with served_by(closed, worker_of_model("a")) as worker:
            says(worker, "Hello.")
            await say(browser, "hello")
            await ended(browser, 1)
            assert await browser.text(".assistant .text") == "Hello."
