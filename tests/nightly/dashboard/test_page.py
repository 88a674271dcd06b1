"""The live page in a real Chromium, with real routers and workers: what an operator sees and clicks."""

import asyncio
import json
import os
import shutil

import pytest
from blockyard.proto.v1 import cluster_pb2
from blockyard.router.client import AsyncClient

from tests.system.processes import MODEL

from .browser import Browser
from .onlooker import (
    PICTURES_VARIABLE,
    SYSTEM_PROMPT,
    busiest,
    click_cell,
    client_of,
    fill,
    keep_picture,
    running,
    screen_of,
    shown,
    told_of_placement,
)
from .stage import SIMULATED, Processes, Stage, announcement_of, processes, staged

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_numbers_on_the_page_are_those_of_get_block_pool(page: Browser, cluster: Processes) -> None:
    async with client_of(cluster) as client:
        await client.generate(SYSTEM_PROMPT, max_tokens=4)
        workers = {worker.worker_id: worker for worker in await client.list_workers()}
        pools = {name: await client.block_pool(name) for name in workers}
    assert sum(pool.cached_blocks for pool in pools.values()) > 10
    for name, pool in pools.items():
        cached = f"document.querySelector('[data-worker={name}] [data-field=cached]')"
        await page.until(f"{cached}.textContent === '{pool.cached_blocks}'")
        fields = await shown(page, name)
        for key, value in {
            "free": pool.free_blocks,
            "used": pool.used_blocks,
            "total": pool.total_blocks,
            "evictions": pool.evictions,
            "preemptions": pool.load.preemptions,
            "incarnation": pool.incarnation,
            "address": workers[name].address,
        }.items():
            assert fields[key] == str(value), key
    assert page.complaints == []


async def test_what_one_points_at_says_what_it_is_and_one_model_has_no_table_of_models(page: Browser) -> None:
    silent = "[...document.querySelectorAll('.tile, .figures div')].filter((e) => !e.title)"
    assert await page.evaluate(f"{silent}.map((e) => e.textContent)") == []
    told = await page.evaluate("document.querySelector('.top a').title")
    assert "`blockyard status` names the file" in told, "the link to Ray's dashboard says where its token is"
    shown = "[...document.querySelectorAll('#models, .card .model')].filter((part) => !part.hidden).length"
    assert await page.evaluate(shown) == 0


async def test_in_a_card_of_any_width_no_figures_name_runs_into_the_next(page: Browser) -> None:
    run_over = """[...document.querySelectorAll('.figures dt')].filter((name) => name.scrollWidth > name.clientWidth
      || name.parentElement.getBoundingClientRect().right > name.closest('.card').getBoundingClientRect().right)
      .map((name) => name.textContent)"""
    for width in range(240, 700, 20):
        await page.evaluate(f"document.querySelector('.workers').style.width = '{width}px'")
        assert await page.evaluate(run_over) == [], f"{width} px"


RUNS_OVER = """[...document.querySelectorAll('body *')]
  .filter((part) => !part.closest('.scroll table') && part.getBoundingClientRect().right > innerWidth + 0.5)
  .map((part) => `${part.tagName} ${part.id || part.className}`)"""


WITH_A_LONG_WORD = """((part) => {
  const [told, hidden] = [part.textContent, part.hidden];
  [part.textContent, part.hidden] = ["x".repeat(150), false];
  const width = document.documentElement.scrollWidth;
  [part.textContent, part.hidden] = [told, hidden];
  return width;
})(document.querySelector(%s))"""


@pytest.mark.parametrize("width", [320, 400, 679, 901])
async def test_a_narrow_screen_needs_no_scrolling_to_the_side_whatever_was_asked(
    page: Browser, cluster: Processes, width: int
) -> None:
    async def fits(state: str) -> None:
        assert await page.evaluate(RUNS_OVER) == [], state
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, state

    async with screen_of(page, width), running(cluster, 3):
        await page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        await page.until("document.querySelector('#prefixes-table td') !== null")
        await page.until("document.querySelector('#requests-table td') !== null")
        await fits("all unfolded")
        heights = "[...document.querySelectorAll('#requests-table td')].map((cell) => cell.clientHeight)"
        assert max(await page.evaluate(heights)) < 60, "an id is a line, not a column of letters"
        for long in ("#facts", ".card h2", ".card > p", "#trouble", ".tile b"):
            assert await page.evaluate(WITH_A_LONG_WORD % json.dumps(long)) <= width, long
        await page.type_into("#prompt", SYSTEM_PROMPT)
        for question, answer in (("prefix", "prefix"), ("placement", "chosen")):
            await page.click(f"#ask button[value={question}]")
            await page.until(f"document.querySelector('#answer [data-field={answer}]') !== null")
            await fits(question)
        await page.type_into("#prompt", "x" * 130_000)
        await page.click("#ask button[value=prefix]")
        await page.until("document.querySelector('#answer .trouble') !== null")
        await fits("a refused question")
        await page.click("[data-worker=worker-0] [data-action=sequences]")
        await page.until("document.querySelector('#details-body p, #details-body table') !== null")
        await fits("sequences")
        for button in ("[data-key^=sequence-]", "[data-key^=table-]"):
            await page.click(f"#details-body {button}")
            await page.until("document.querySelector('#details-body dl') !== null")
            await fits(button)


async def test_running_sequences_and_shared_blocks_show_each_second(
    page: Browser, cluster: Processes
) -> None:
    async with running(cluster, 7) as client:
        if PICTURES_VARIABLE in os.environ:
            await fill(client)
        fields = "[...document.querySelectorAll('.card [data-field=running]')]"
        total = f"{fields}.reduce((sum, field) => sum + Number(field.textContent), 0)"
        await page.until(f"{total} === 7")
        rates = (
            "[...document.querySelectorAll('[data-field=generated_tokens_rate]')].map((e) => e.textContent)"
        )
        await page.until(f"{rates}.some((text) => /^ [\\d,.]+\\/min$/.test(text) && text !== ' 0/min')")
        await keep_picture(page, "light")
        await page.dark(True)
        await keep_picture(page, "dark")
        await page.dark(False)
    await page.until(f"{total} === 0")


async def test_charts_show_what_the_last_minutes_brought_and_say_it_where_one_points(
    page: Browser, cluster: Processes
) -> None:
    async with running(cluster, 3):
        for key in ("tokens", "first_token", "inter_token", "hit_rate", "waiting"):
            chart = f"document.querySelector('[data-chart={key}]')"
            await page.until(f"{chart}.querySelector('path').getAttribute('d').includes('L')")
        axis = await page.evaluate(
            "[...document.querySelectorAll('[data-chart=tokens] text')].map((e) => e.textContent)"
        )
        assert {"0", "-15", "now", "minutes", "tokens/s"} <= set(axis)
        await page.until(
            "/p50 [\\d.,]+ ms, p99 [\\d.,]+ ms/.test(document.querySelector('[data-chart=inter_token] svg').ariaLabel)"
        )
        await page.click("[data-chart=tokens] svg")
        assert await page.text("[data-chart=tokens] .pointed") == "nothing was measured then"
        x, y = await page.evaluate(
            "(b => [b.right - b.width * 0.03, b.y + b.height / 2])"
            "(document.querySelector('[data-chart=tokens] svg').getBoundingClientRect())"
        )
        await page.click_at(x, y)
        tip = "document.querySelector('[data-chart=tokens] .pointed').textContent"
        await page.until(f"/^\\d+ s ago: all workers [\\d.,]+ tokens\\/s$/.test({tip})")
    assert page.complaints == []


async def test_the_table_of_requests_has_those_of_every_router_and_no_text(
    page: Browser, cluster: Processes
) -> None:
    other = cluster.routers["router-1"].address
    async with running(cluster, 2), AsyncClient(other, timeout_seconds=20.0) as client:
        stream = client.stream(SYSTEM_PROMPT, max_tokens=600, ignore_eos=True, request_id="of-router-1")
        await anext(stream)
        await page.click("#requests summary")
        await page.until("document.querySelectorAll('[data-request]').length === 3")
        row = "[data-request=of-router-1]"
        cells = await page.evaluate(
            f"Object.fromEntries([...document.querySelectorAll('{row} td')]"
            ".map((cell) => [cell.dataset.column, cell.textContent]))"
        )
        (held,) = await client.list_requests()
        assert held.cached_tokens > 0
        assert (cells["worker"], cells["state"], cells["tenant"]) == (held.worker_id, "streaming", "-")
        assert cells["prompt tokens"] == f"{held.prompt_tokens:,}"
        assert cells["cached tokens"] == f"{held.cached_tokens:,}"
        assert "short Python functions" not in await page.text("#requests")
        await keep_picture(page, "requests")
        await stream.aclose()
        await page.until("document.querySelectorAll('[data-request]').length === 2")
    await page.click("#requests summary")


async def test_a_click_on_a_block_says_its_name_parent_references_and_age(
    page: Browser, cluster: Processes
) -> None:
    async with running(cluster, 4) as client:
        worker = await busiest(client)
        blocks = await client.list_blocks(worker)
        child = next(block for block in blocks if block.parent and block.references >= 2)
        parent = next(block for block in blocks if block.name == child.parent)
        await click_cell(page, worker, child.block_id)
        assert await page.text("#details [data-field=id]") == str(child.block_id)
        assert await page.text("#details [data-field=name]") == child.name.hex()
        assert await page.text("#details [data-field=references]") == str(child.references)
        assert float((await page.text("#details [data-field=age]")).split()[0]) >= 0
        assert await page.evaluate("document.querySelectorAll('#details li').length") == child.references
        await keep_picture(page, "block")
        await page.click("#details [data-key=parent]")
        await page.until(
            f"document.querySelector('#details [data-field=name]')?.textContent === '{parent.name.hex()}'"
        )


async def test_an_answer_that_comes_after_its_panel_was_closed_marks_nothing(page: Browser) -> None:
    card = "document.querySelector('[data-worker=worker-0]')"
    marked = f"{card}.querySelector('canvas').dataset.marked"
    show = f"{card}.querySelector('.goto').value = 1; {card}.querySelector('form').requestSubmit();"
    close = "document.querySelector('#close').click();"
    await page.evaluate(show)
    await page.until(f"{marked} === '1'")
    await page.evaluate(close)
    await page.until(f"{marked} === '0'")
    await page.evaluate(show + close)
    await asyncio.sleep(2.0)
    assert await page.evaluate(marked) == "0"


async def test_a_click_on_a_sequence_shows_its_block_table(page: Browser, cluster: Processes) -> None:
    async with running(cluster, 1, request_id="watched-one") as client:
        worker = await busiest(client)
        await page.click(f'[data-worker="{worker}"] [data-action=sequences]')
        await page.click("#details [data-key^=sequence-]")
        assert await page.text("#details [data-field=request_id]") == "watched-one"
        (sequence,) = await client.list_sequences(worker)
        known = await client.sequence(worker, sequence.sequence_id)
        assert known is not None
        table = "[...document.querySelectorAll('#details .blocks button')].map((e) => Number(e.textContent))"
        shown_table = await page.until(table)
        assert shown_table == list(known.block_table)[: len(shown_table)]
        assert len(shown_table) >= len(SYSTEM_PROMPT) // 100
        await keep_picture(page, "sequence")
    await page.until("document.querySelector('#details-body').textContent.includes('has ended')")


async def test_a_prefix_shows_who_caches_it_and_the_explainer_every_candidates_terms(
    page: Browser, cluster: Processes
) -> None:
    async with client_of(cluster) as client:
        await client.generate(SYSTEM_PROMPT, max_tokens=2)
        while not (found := await client.lookup_prefix(SYSTEM_PROMPT)).holders:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # the index hears of it in the background
        explained = await client.explain_placement(SYSTEM_PROMPT)
        token_ids = await client.tokenize(SYSTEM_PROMPT)
    holder = found.holders[0]
    assert holder.cached_blocks > 5
    await page.type_into("#prompt", SYSTEM_PROMPT)
    await page.click("#ask button[value=prefix]")
    cell = f'#answer [data-holder="{holder.worker_id}"] [data-field=blocks]'
    assert await page.text(cell) == str(holder.cached_blocks)
    await page.click("#ask button[value=placement]")
    await page.until("document.querySelectorAll('#answer [data-candidate]').length === 2")
    terms = await page.evaluate("document.querySelectorAll('#answer [data-candidate] [data-term]').length")
    assert terms == 2 * 10  # one for each term of a candidate
    chosen = await page.text("#answer [data-field=chosen]")
    # Which of two that cost the same is chance, each time that it is asked.
    least = min(candidate.cost for candidate in explained.candidates)
    assert any(c.worker_id in chosen for c in explained.candidates if c.cost <= least + 1.0), chosen
    assert "It costs least." in chosen or "too close to tell" in chosen
    await keep_picture(page, "placement")
    await page.click("#ask input[value=token_ids]")
    await page.type_into("#prompt", " ".join(map(str, token_ids)))
    await page.click("#ask button[value=prefix]")
    assert await page.text(cell) == str(holder.cached_blocks)
    await page.type_into("#prompt", "one two")
    await page.click("#ask button[value=prefix]")
    assert "is not a token id" in await page.text("#answer .trouble")


@pytest.mark.parametrize(
    ("policy", "costs", "chosen", "told"),
    [
        (
            "prefix",
            (10.0, 10.4),
            "worker-1",
            "worker-0 costs 0.4 less, which is too close to tell: "
            "the session's last worker wins, or else a hash of the prefix decides.",
        ),
        ("prefix", (10.0, 50.0), "worker-0", "It costs least."),
        (
            "two_choices",
            (10.0, 50.0),
            "worker-1",
            "worker-0 costs 40.0 less, but the policy compares only two workers, drawn at random.",
        ),
    ],
)
async def test_the_explainer_says_that_costs_are_too_close_to_tell_only_where_a_dearer_worker_was_chosen(
    page: Browser,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    costs: tuple[float, float],
    chosen: str,
    told: str,
) -> None:
    candidates = [
        cluster_pb2.PlacementCandidate(worker_id=f"worker-{number}", cost=cost, total_ms=cost)
        for number, cost in enumerate(costs)
    ]
    said = await told_of_placement(
        page, monkeypatch, policy=policy, chosen_worker_id=chosen, candidates=candidates
    )
    assert said == f"Policy {policy}: it would run on {chosen}. {told}"


async def test_the_tree_of_prefixes_shows_what_is_shared_and_where_it_lies(
    page: Browser, cluster: Processes
) -> None:
    async with client_of(cluster) as client:
        whole = await client.generate(
            f"{SYSTEM_PROMPT} First question, long enough for a block.", max_tokens=2
        )
        await client.generate(
            f"{SYSTEM_PROMPT} Another one, which is as long as the first was.", max_tokens=2
        )
        blocks = await client.list_blocks(whole.finish.worker_id)
        assert len(await client.list_blocks(whole.finish.worker_id, limit=3)) == 3
    await page.click("#prefixes summary")
    await page.until("document.querySelectorAll('#prefixes [data-level=\"1\"]').length >= 2")
    named = {block.name.hex() for block in blocks if block.name}
    shown = await page.evaluate(
        "[...document.querySelectorAll('#prefixes [data-prefix]')].map((e) => e.dataset.prefix)"
    )
    assert named & set(shown)
    assert "named blocks, " in await page.text("#prefixes-told")
    await keep_picture(page, "prefixes")
    await page.click("#prefixes [data-level='0'] button")
    assert await page.text("#details [data-field=name]") in shown


async def test_all_of_it_works_by_keys_and_says_itself_to_a_screen_reader(
    page: Browser, cluster: Processes
) -> None:
    canvas = "document.querySelector('[data-worker=worker-0] canvas')"
    await page.evaluate(f"{canvas}.focus()")
    for key in ("ArrowRight", "ArrowRight"):
        await page.press(key)
    assert "block 1:" in await page.text("[data-worker=worker-0] .pointed")
    await page.press("Enter")
    assert await page.text("#details [data-field=id]") == "1"
    assert await page.evaluate("document.activeElement.id") == "details-title"
    await page.press("Escape")
    assert await page.evaluate("document.querySelector('#details').hidden")
    assert "blocks used" in await page.evaluate(f"{canvas}.getAttribute('aria-label')")
    controls = "[...document.querySelectorAll('button, input, select, textarea')]"
    is_nameless = "(e) => !e.textContent.trim() && !e.ariaLabel && !e.labels?.length"
    assert await page.evaluate(f"{controls}.filter({is_nameless}).length") == 0


async def test_the_page_asks_no_other_host_and_breaks_no_rule_of_its_own_policy(
    page: Browser, stage: Stage
) -> None:
    assert page.hosts == {stage.url.split("/")[2]}
    assert page.complaints == []


async def test_a_pool_of_a_hundred_thousand_blocks_is_drawn_each_second_and_every_block_can_be_reached(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    large = ("--engine", "simulated", "--device", "cpu", "--kv-cache-memory", str(100_000 * 49_152))
    with processes(tmp_path_factory.mktemp("large")) as cluster:
        worker = cluster.add_worker("vast", *large)
        router = cluster.add_router("router-0", workers=[worker.address])
        await asyncio.to_thread(cluster.start, worker, router)
        async with staged(announcement_of(cluster)) as stage, running(cluster, 2):
            await browser.open(stage.url)
            card = "document.querySelector('[data-worker=vast]')"
            await browser.until(f"{card}?.querySelector('[data-field=total]').textContent === '100,000'")
            await browser.until("document.querySelector('#pulse').textContent === 'live'")
            assert "a cell is 98 blocks" in await browser.text("[data-worker=vast] [data-field=size]")
            await click_cell(browser, "vast", 1020)
            assert await browser.text("#details-title") == "vast: blocks 99960 to 99999"
            await browser.click("#details [data-key=block-99999]")
            assert await browser.text("#details [data-field=id]") == "99999"
            assert await browser.text("#details [data-field=state]") == "free"
            await browser.click("#close")
            await keep_picture(browser, "vast")


async def test_of_several_models_each_card_names_its_own_and_the_totals_are_by_model(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("models") / "second"
    shutil.copytree(MODEL, folder)
    with processes(tmp_path_factory.mktemp("several"), with_redis=True) as cluster:
        of_second = (*SIMULATED, "--index-model", "second")
        workers = [cluster.add_worker("worker-0", *SIMULATED), cluster.add_worker("worker-1", *SIMULATED)]
        workers.append(cluster.add_worker("second-worker-0", *of_second, model=folder))
        router = cluster.add_router("router-0", "--further-model", str(folder))
        await asyncio.to_thread(cluster.start, *workers, router)
        async with staged(announcement_of(cluster)) as stage, running(cluster, 2, model="second"):
            asked_before = set(browser.hosts)
            await browser.open(stage.url)

            async def until_shown(model: str, **columns: str) -> None:
                for column, text in columns.items():
                    name = column.replace("_", " ")
                    cell = f"document.querySelector('[data-model={model}] [data-column=\"{name}\"]')"
                    await browser.until(f"{cell}?.textContent === {json.dumps(text)}")

            await until_shown("second", workers_ready="1 of 1", running="2", waiting="0")
            await until_shown("demo", workers_ready="2 of 2", running="0", waiting="0")
            models = "[...document.querySelectorAll('.card .model')].map((part) => part.textContent).sort()"
            assert await browser.evaluate(models) == ["demo", "demo", "second"]
            assert (await browser.text("#facts")).startswith("demo, second · ")
            assert await browser.evaluate(RUNS_OVER) == []
            await keep_picture(browser, "models")
            assert browser.hosts - asked_before == {stage.url.split("/")[2]}
