"""Pulls between workers on the live page: a real one of real workers, and what the page says of each end."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient

from .browser import Browser
from .onlooker import client_of, keep_picture, rows_of, screen_of, told_of_placement
from .stage import Processes, processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = ("--device", "cpu", "--kv-cache-memory", str(36 * 2**20), "--host-cache-gib", "0.03")
"""The demo model itself: 768 blocks, and as many in host memory. Only a worker that measured its memory pulls."""
ROUNDS = 20
"""Most prompts until one is pulled whole. On a busy machine some pulls are late."""
ARROW = "document.querySelector('#arrows .arrow')"
LABEL = "document.querySelector('#yard > .pull')"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("pulls"), with_redis=True) as cluster:
        workers = [cluster.add_worker(name, *POOL) for name in ("worker-0", "worker-1")]
        router = cluster.add_router("router-0", workers=[worker.address for worker in workers])
        cluster.start(*workers, router)
        yield cluster


@asynccontextmanager
async def busy_source(client: AsyncClient, prefix: str) -> AsyncIterator[None]:
    """One worker has this prefix cached, and so many decodes that another one should take the next request."""
    home = {"policy": "session", "session_id": "one"}
    await client.generate(prefix, max_tokens=2, **home)
    streams = [
        client.stream(f"{prefix} {number}", max_tokens=300, ignore_eos=True, **home) for number in range(24)
    ]
    for stream in streams:
        await anext(stream)
    try:
        while not (await client.lookup_prefix(prefix)).holders:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # the index hears of it in the background
        yield
    finally:
        for stream in streams:
            await stream.aclose()


async def pulled(client: AsyncClient) -> cluster_pb2.RecentPull:
    """Send prompts with prefixes that another worker has, until one of them was pulled whole."""
    while not all(worker.load.pull_bytes_per_second for worker in await client.list_workers()):  # noqa: ASYNC110
        await asyncio.sleep(0.2)  # the router asks the workers to measure
    for number in range(ROUNDS):
        prefix = (
            f"Number {number}. " + "You write short Python functions for people who read them twice. " * 40
        )
        async with busy_source(client, prefix):
            await client.generate(f"{prefix} Why?", max_tokens=2)
            pulls = (await client.cluster_info()).pulls
            if pulls and pulls[0].end == "whole":
                return pulls[0]
    raise AssertionError(f"no pull of {ROUNDS} was whole: {pulls}")


async def test_a_real_pull_is_drawn_from_card_to_card_with_bytes_and_time_saved(
    page: Browser, cluster: Processes
) -> None:
    await page.evaluate("document.getElementById('pulls').open = true")
    async with client_of(cluster) as client:
        pull = await pulled(client)
    assert (pull.num_blocks > 20, pull.saved_ms > 0.0) == (True, True)
    pair = f"{pull.source_id} to {pull.worker_id}"
    await page.until(f"{ARROW}?.dataset.pull === {json.dumps(pair)}")
    await page.until(f"/MiB.* saves? about [\\d.,]+ ms/.test({LABEL}.textContent)")
    await keep_picture(page, "pull")
    cells = (
        f"[...document.querySelectorAll('[data-number$=\" {pull.number}\"] td')].map((e) => e.textContent)"
    )
    to, source, end, blocks, *_ = await page.until(f"(cells => cells.length && cells)({cells})")
    assert (to, source, end, blocks) == (pull.worker_id, pull.source_id, "whole", str(pull.num_blocks))
    for worker, field in ((pull.worker_id, "pulled_blocks"), (pull.source_id, "lent_blocks")):
        shown = f"document.querySelector('[data-worker={worker}] [data-field={field}]')"
        await page.until(f"Number({shown}.textContent.replaceAll(',', '')) >= {pull.num_blocks}")
    await page.until(f"{ARROW} === null && {LABEL} === null")  # it fades
    assert page.complaints == []


def whole(number: int, **changes: object) -> cluster_pb2.RecentPull:
    facts: dict[str, object] = {
        "number": number,
        "worker_id": "worker-1",
        "source_id": "worker-0",
        "end": "whole",
        "planned_bytes": 3 << 20,
        "planned_ms": 20.0,
        "num_blocks": 90,
        "num_bytes": 2 << 20,
        "elapsed_ms": 12.4,
        "saved_ms": 210.0,
        "ended_seconds": 1.0,
    }
    return cluster_pb2.RecentPull(**(facts | changes))  # type: ignore[arg-type]


RUNNING = whole(9, end="", num_blocks=0, num_bytes=0, saved_ms=0.0, ended_seconds=0.0)
CUT = whole(2, end="cut", num_blocks=3, saved_ms=0.0)


@pytest.mark.parametrize(
    ("pulls", "told", "classes"),
    [
        ([whole(1)], "2.0 MiB in 12 ms, saves about 210 ms", {"arrow", "flows"}),
        ([whole(1), whole(2)], "2 pulls, 4.0 MiB, save about 420 ms", {"arrow", "flows"}),
        ([whole(1, ended_seconds=8.0)], "2.0 MiB in 12 ms, saves about 210 ms", {"arrow"}),
        ([RUNNING, whole(1)], "3.0 MiB under way", {"arrow", "flows"}),
        ([CUT], "cut: 3 blocks arrived", {"arrow", "flows", "failed"}),
        ([CUT, CUT], "2 pulls, none whole", {"arrow", "flows", "failed"}),
        ([CUT, whole(1)], "2.0 MiB in 12 ms, saves about 210 ms; 1 not whole", {"arrow", "flows"}),
    ],
)
async def test_an_arrow_says_what_moves_what_it_saves_and_how_it_failed(
    page: Browser,
    monkeypatch: pytest.MonkeyPatch,
    pulls: list[cluster_pb2.RecentPull],
    told: str,
    classes: set[str],
) -> None:
    fix_pulls(monkeypatch, *pulls)
    await page.until(f"{LABEL}?.textContent === {json.dumps(told)}")
    assert set(await page.evaluate(f"[...{ARROW}.classList]")) == classes


def fix_pulls(monkeypatch: pytest.MonkeyPatch, *pulls: cluster_pb2.RecentPull) -> None:
    ask = AsyncClient.cluster_info

    async def with_pulls(client: AsyncClient) -> cluster_pb2.ClusterInfo:
        info = await ask(client)
        del info.pulls[:]
        info.pulls.extend(pulls)
        return info

    monkeypatch.setattr(AsyncClient, "cluster_info", with_pulls)


async def test_pulls_in_both_directions_have_arrows_of_their_own_and_old_or_foreign_ones_have_none(
    page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = whole(2, worker_id="worker-0", source_id="worker-1", ended_seconds=5.0)
    old, foreign = whole(3, ended_seconds=13.0, worker_id="worker-0"), whole(4, source_id="gone")
    fix_pulls(monkeypatch, whole(1), back, old, foreign)
    pairs = "[...document.querySelectorAll('#arrows .arrow')].map((e) => e.dataset.pull)"
    await page.until(f"{pairs}.length === 2")
    assert set(await page.evaluate(pairs)) == {"worker-0 to worker-1", "worker-1 to worker-0"}
    boxes = "[...document.querySelectorAll('#yard > .pull')].map((e) => e.getBoundingClientRect())"
    assert await page.evaluate(f"(([a, b]) => a.bottom <= b.top || b.bottom <= a.top)({boxes})")


async def test_with_reduced_motion_nothing_moves(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_pulls(monkeypatch, whole(1))
    moving = "document.getAnimations().map((e) => e.animationName ?? e.transitionProperty)"
    await page.until(f"{moving}.includes('flow')")
    feature = {"name": "prefers-reduced-motion", "value": "reduce"}
    await page.call("Emulation.setEmulatedMedia", features=[feature])
    try:
        await page.until(f"{moving}.length === 0")
        assert await page.evaluate(f"{ARROW} !== null")
    finally:
        await page.call("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("width", [320, 679, 1400])
async def test_arrows_and_the_table_fit_a_screen_of_any_width(
    page: Browser, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    fix_pulls(monkeypatch, whole(1), CUT, whole(3, worker_id="worker-0", source_id="worker-1"))
    async with screen_of(page, width):
        await page.evaluate("document.getElementById('pulls').open = true")
        await page.until("document.querySelectorAll('#pulls-table tbody tr').length === 3")
        await page.until("document.querySelectorAll('#yard > .pull').length === 2")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = "[...document.querySelectorAll('#yard > .pull')].map((e) => e.getBoundingClientRect())"
        assert await page.evaluate(f"{boxes}.every((box) => box.left >= 0 && box.right <= innerWidth)")
        assert await page.evaluate(f"(([a, b]) => a.bottom <= b.top || b.bottom <= a.top)({boxes})")


async def test_the_explainer_says_of_each_source_whether_it_is_chosen_and_why_not(
    page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def option(source: str, verdict: cluster_pb2.PullVerdict, saved_ms: float) -> cluster_pb2.PullOption:
        return cluster_pb2.PullOption(
            source_id=source, verdict=verdict, pulled_tokens=4096, time_ms=12.25, saved_ms=saved_ms
        )

    sources = [
        option("worker-0", cluster_pb2.PULL_VERDICT_CHOSEN, 800.0),
        option("worker-2", cluster_pb2.PULL_VERDICT_OTHER_SOURCE, 400.0),
    ]
    pulled = {"pulled_tokens": 4096, "pull_ms": 12.25, "pulled_from": "worker-0", "pull_options": sources}
    candidate = cluster_pb2.PlacementCandidate(worker_id="worker-1", **pulled)
    await told_of_placement(page, monkeypatch, chosen_worker_id="worker-1", candidates=[candidate])
    assert await page.text("#answer [data-field=pulled]") == "4,096 from worker-0"
    assert await page.text("#answer [data-term=pull_ms]") == "12.3"
    why_not = "not chosen: the other source saves as much or more"
    assert await rows_of(page, "#answer [data-option]") == [
        ["worker-1", "worker-0", "4,096", "12.3", "800.0", "chosen"],
        ["worker-1", "worker-2", "4,096", "12.3", "400.0", why_not],
    ]


async def test_the_explainer_shows_a_split_whose_first_worker_is_no_candidate(
    page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = cluster_pb2.PlacementCandidate
    split = cluster_pb2.SplitPlacement(
        is_chosen=True,
        prefill=candidate(worker_id="prefill-0", uncached_tokens=4100, total_ms=300.0),
        decode=candidate(worker_id="decode-0", pulled_tokens=4096, total_ms=20.5),
        split_ms=320.5,
        local_ms=900.0,
    )
    one = [candidate(worker_id="decode-0", total_ms=900.0, cost=900.0)]
    chosen = {"policy": "prefix", "chosen_worker_id": "prefill-0"}
    said = await told_of_placement(page, monkeypatch, **chosen, candidates=one, split=split)
    assert said == "Policy prefix: it would run on prefill-0. Then decode-0 would continue."
    assert await rows_of(page, "#answer [data-field=split] tbody tr") == [
        ["prefill-0", "computes 4,100 tokens", "300.0"],
        ["decode-0", "fetches 4,096 tokens and continues", "20.5"],
        ["both", "chosen", "320.5"],
        ["one worker", "serves the whole request", "900.0"],
    ]
