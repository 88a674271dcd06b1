"""A real Chromium without a window, driven through the DevTools protocol: pages, clicks, keys, pictures.

Owns one browser and one tab. It only does what a person would do, and reads the content of the page.
"""

import asyncio
import base64
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.programs import first_of

START_SECONDS = 60.0
CALL_SECONDS = 60.0
LISTENS = re.compile(rb"DevTools listening on ws://([^/]+)/")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
    "--window-size=1400,1000",
)


class Browser:
    """`async with open_browser() as browser`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next_id = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []
        """Complaints in the page's console: errors, and what the content policy has refused."""
        self.hosts: set[str] = set()
        """Hosts to which the page has sent requests."""

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                answer = self._answers.pop(event["id"])
                if not answer.done():
                    answer.set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.complaints.append(event["params"]["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.hosts.add(event["params"]["request"]["url"].split("/")[2])

    async def call(self, method: str, **parameters: Any) -> Any:
        self._next_id += 1
        answer = self._answers[self._next_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next_id, "method": method, "params": parameters})
        async with asyncio.timeout(CALL_SECONDS):
            event = await answer
        assert "error" not in event, event["error"]
        return event["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def set_cookie(self, url: str, name: str, value: str) -> None:
        await self.call("Network.setCookie", url=url, name=name, value=value)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, *, seconds: float = 50.0) -> Any:
        """Wait until the expression is true and return its value."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not (value := await self.evaluate(expression)):
            if asyncio.get_running_loop().time() > deadline:
                shown = await self.evaluate("document.body.innerText")
                raise AssertionError(f"{expression} did not come to hold; the page says:\n{shown}")
            await asyncio.sleep(0.1)
        return value

    async def text(self, selector: str) -> str:
        found = await self.until(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")
        return str(found)

    async def click(self, selector: str) -> None:
        """Where it is on the screen, as a mouse would: what is covered or hidden cannot be clicked."""
        place = await self.until(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element?.scrollIntoView({{block: "center"}});
              const box = element?.getBoundingClientRect();
              return box?.width ? [box.x + box.width / 2, box.y + box.height / 2] : null;
            }})()"""
        )
        await self.click_at(*place)

    async def click_at(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str) -> None:
        codes = {"Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}
        text = {"Enter": {"text": "\r"}}.get(key, {})
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **text,
            )

    async def type_into(self, selector: str, text: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).value = ''")
        await self.call("Input.insertText", text=text)

    async def dark(self, is_dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    program = first_of(
        *("chromium", "chromium-browser", "google-chrome"),
        why="the live page is looked at with one (Debian: apt install chromium)",
    )
    profile = Path(tempfile.mkdtemp(prefix="by-chromium-"))
    process = await asyncio.create_subprocess_exec(
        *(program, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        host = await _devtools(process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{host}/json/list") as listed:
                tabs = await listed.json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                browser = Browser(socket)
                listening = asyncio.create_task(browser.listen())
                try:
                    yield browser
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
    finally:
        process.kill()
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


async def _devtools(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        async for line in process.stderr:
            if found := LISTENS.search(line):
                return found[1].decode()
    raise AssertionError("Chromium ended at its start")
