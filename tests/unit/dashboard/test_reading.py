"""The live page's reading of messages, announcements, headers and commands. No process, no browser."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from blockyard.deploy.dashboard.announcement import AnnouncedReplica, Announcement, decode, encode
from blockyard.deploy.dashboard.cluster_watch import ClusterWatch
from blockyard.deploy.dashboard.connection import CannotReach, client_of
from blockyard.deploy.dashboard.head_module import check_base
from blockyard.deploy.dashboard.last_seen import LastSeen
from blockyard.deploy.dashboard.live_page import MAX_ASKED_AT_ONCE, LivePage
from blockyard.deploy.dashboard.prompt_queries import HEADER, MAX_REQUESTS, prompt_arguments, requests_dict
from blockyard.deploy.dashboard.sign_in import with_link
from blockyard.deploy.dashboard.snapshot import MAX_CELLS, MAX_PULLS, cells, drawn, of_nothing, pulls_dict
from blockyard.deploy.dashboard.start_hook import led_through, start_hook
from blockyard.proto.v1 import cluster_pb2

WORKER = AnnouncedReplica(
    name="worker-0", kind="worker", phase="serving", address="h:1", incarnation="one", num_starts=1
)
ROUTER = replace(WORKER, name="router-0", kind="router", address="h:2", incarnation="")
ANNOUNCEMENT = Announcement(
    cluster="c",
    model="demo",
    uses_tls=False,
    wants_certificate=False,
    wants_token=False,
    replicas=(WORKER, ROUTER),
)
USED, CACHED, FREE = (
    cluster_pb2.BLOCK_STATE_USED,
    cluster_pb2.BLOCK_STATE_CACHED,
    cluster_pb2.BLOCK_STATE_FREE,
)


def pool_of(*runs: tuple[cluster_pb2.BlockState, int, int]) -> cluster_pb2.BlockPool:
    return cluster_pb2.BlockPool(
        total_blocks=sum(length for _, length, _ in runs),
        runs=[cluster_pb2.BlockRun(state=s, length=length, references=held) for s, length, held in runs],
    )


def test_pulls_of_all_routers_are_listed_newest_first_and_a_silent_router_is_named() -> None:
    pull = cluster_pb2.RecentPull
    first = [pull(number=1, elapsed_ms=50.0), pull(number=2, end="cut", ended_seconds=9.0)]
    second = [pull(number=1, elapsed_ms=20.0), pull(number=2, end="whole", ended_seconds=4.0, elapsed_ms=7.0)]
    infos = {"a": cluster_pb2.ClusterInfo(pulls=first), "b": cluster_pb2.ClusterInfo(pulls=second), "c": None}
    listed = pulls_dict(infos)
    assert listed["silent"] == ["c"]
    assert [(told["router"], told["number"], told["end"]) for told in listed["pulls"]] == [
        ("b", 1, ""),
        ("a", 1, ""),
        ("b", 2, "whole"),
        ("a", 2, "cut"),
    ]
    many = cluster_pb2.ClusterInfo(pulls=first * MAX_PULLS)
    assert len(pulls_dict({"a": many})["pulls"]) == MAX_PULLS


def test_each_block_of_a_small_pool_is_a_cell_and_a_large_one_is_drawn_in_cells_of_several() -> None:
    assert cells(pool_of((USED, 1, 1), (USED, 2, 5), (CACHED, 1, 0), (FREE, 1, 0))) == {
        "scale": 1,
        "cell_used": [1, 1, 1, 0, 0],
        "cell_shared": [0, 1, 1, 0, 0],
        "cell_cached": [0, 0, 0, 1, 0],
        "cell_holders": [1, 5, 5, 0, 0],
    }
    large = pool_of(*[run for _ in range(10_000) for run in ((USED, 3, 2), (CACHED, 4, 0), (FREE, 3, 0))])
    found = cells(large)
    assert (found["scale"], len(found["cell_used"])) == (98, -(-100_000 // 98))
    assert len(found["cell_used"]) <= MAX_CELLS
    sums = [sum(found[f"cell_{kind}"]) for kind in ("used", "shared", "cached")]
    assert sums == [30_000, 30_000, 40_000], "no block is lost"


def test_an_announcement_reads_back_and_anything_else_is_refused() -> None:
    assert decode(encode(ANNOUNCEMENT)) == ANNOUNCEMENT
    assert ANNOUNCEMENT.routers == ("h:2",)
    for bad in (b"", b"[]", b"{}", b'{"places": [{}]}', b'{"places": []}', b" " * (1 << 21)):
        with pytest.raises(ValueError):  # noqa: PT011 - any of them will do
            decode(bad)


def page_of(said: list[bytes]) -> LivePage:
    async def announced() -> list[bytes]:
        return said

    return LivePage(announced)


async def test_one_cluster_that_speaks_another_version_hides_no_other() -> None:
    said = [b'{"num_workers": 2}', encode(ANNOUNCEMENT), b'{"cluster": "newer", "places": [], "more": 1}']
    page = page_of(said)
    state = await state_of(page)
    assert (state["clusters"], state["picture"]["cluster"]) == (["c"], "c")
    assert "another version" in state["trouble"]
    said[:] = [encode(ANNOUNCEMENT)]
    assert (await state_of(page))["trouble"] == ""
    await page.close()


async def test_questions_beyond_a_number_are_refused_at_once_and_leave_no_trace() -> None:
    answers = asyncio.Event()

    async def announced() -> list[bytes]:
        await answers.wait()
        return [encode(ANNOUNCEMENT)]

    page = LivePage(announced)
    waiting = [asyncio.create_task(page.answer("api/state", {}, {})) for _ in range(MAX_ASKED_AT_ONCE)]
    await asyncio.sleep(0)
    assert [(await page.answer(path, {}, {})).status for path in ("api/state", "api/prefix")] == [503, 503]
    assert (await page.answer("app.js", {}, {})).status == 200
    answers.set()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * MAX_ASKED_AT_ONCE
    assert (await page.answer("api/state", {}, {})).status == 200
    await page.close()


async def test_a_defect_while_a_picture_is_drawn_is_told_on_the_page_and_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CANARY")

    monkeypatch.setattr("blockyard.deploy.dashboard.cluster_watch.client_of", broken)
    page = page_of([encode(ANNOUNCEMENT)])
    picture = (await state_of(page))["picture"]
    assert "dashboard_BlockyardHead.log says why" in picture["trouble"]
    assert "CANARY" not in str(picture)
    assert [card["name"] for card in picture["workers"]] == ["worker-0"]
    assert "CANARY" in caplog.text
    await page.close()


async def test_browsers_that_ask_for_requests_at_once_share_one_question_to_each_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Client:
        async def list_requests(self) -> list[cluster_pb2.RequestInfo]:
            asked.append(self)
            await asyncio.sleep(0.01)
            return [cluster_pb2.RequestInfo(request_id="r")]

        async def close(self) -> None: ...

    monkeypatch.setattr("blockyard.deploy.dashboard.cluster_watch.client_of", lambda *_: Client())
    watch = ClusterWatch(ANNOUNCEMENT)
    answers = await asyncio.gather(*(watch.requests() for _ in range(MAX_ASKED_AT_ONCE)))
    assert len(asked) == len(ANNOUNCEMENT.routers) == 1
    assert {requests_dict(answer)["total"] for answer in answers} == {1}
    await watch.close()


async def state_of(page: LivePage) -> Any:
    body = (await page.answer("api/state", {}, {})).body
    assert isinstance(body, bytes)
    return json.loads(body)


@pytest.mark.parametrize(
    ("phase", "starts", "seen", "state"),
    [
        ("serving", 1, cluster_pb2.WORKER_STATE_READY, "ready"),
        ("draining", 1, cluster_pb2.WORKER_STATE_DRAINING, "draining"),
        ("serving", 1, cluster_pb2.WORKER_STATE_LOST, "dead"),
        ("serving", 1, cluster_pb2.WORKER_STATE_SUSPECT, "silent"),
        ("serving", 1, None, "connecting"),
        ("starting", 0, None, "starting"),
        ("waiting", 1, cluster_pb2.WORKER_STATE_READY, "dead"),
        ("starting", 2, None, "dead"),
        ("stopped", 1, None, "stopped"),
    ],
)
def test_a_worker_is_shown_by_the_worse_of_what_supervisor_and_router_say(
    phase: str, starts: int, seen: int | None, state: str
) -> None:
    replica = replace(WORKER, phase=phase, num_starts=starts)
    workers = [cluster_pb2.Worker(worker_id="worker-0", state=seen)] if seen is not None else []
    picture = drawn(replace(ANNOUNCEMENT, replicas=(replica,)), cluster_pb2.ClusterInfo(), workers, {})
    assert [(card["name"], card["state"]) for card in picture["workers"]] == [("worker-0", state)]


def test_a_worker_of_several_ranks_is_shown_with_node_and_pid_of_each() -> None:
    ranks = (("a (10.0.0.1)", 7), ("b (10.0.0.2)", 8))
    announcement = replace(ANNOUNCEMENT, replicas=(replace(WORKER, ranks=ranks), ROUTER))
    assert decode(encode(announcement)) == announcement
    (card,) = of_nothing(announcement)["workers"]
    assert card["ranks"] == [{"node": "a (10.0.0.1)", "pid": 7}, {"node": "b (10.0.0.2)", "pid": 8}]


def test_a_worker_that_is_away_keeps_its_last_pool_and_since_when() -> None:
    seen = LastSeen()

    def card_at(now: float, state: str, pool: dict[str, Any] | None) -> dict[str, Any]:
        (card,) = seen.completed([{"name": "w", "state": state, "pool": pool}], now)
        return card

    assert card_at(10.0, "ready", {"total": 7})["last_pool"] is None
    for now in (11.0, 60.0):
        card = card_at(now, "dead", None)
        assert (card["last_pool"], card["since"], card["since_is_exact"]) == ({"total": 7}, 11.0, True)
    # Nobody looked for a while: it came back and died again, or was dead all the time.
    assert card_at(61.0, "ready", {"total": 8})["last_pool"] is None
    card = card_at(500.0, "dead", None)
    assert (card["last_pool"], card["since"], card["since_is_exact"]) == ({"total": 8}, 500.0, False)
    # While no router answers, the supervisor's word is no change of state.
    (card,) = seen.completed([{"name": "w", "state": "connecting", "pool": None}], 500.5, is_router_up=False)
    assert (card["last_pool"], card["since"]) == ({"total": 8}, None)
    assert card_at(501.0, "dead", None)["since"] == 500.0
    seen.completed([], 501.0)
    assert card_at(502.0, "dead", None)["last_pool"] is None


def test_a_worker_that_no_supervisor_names_is_shown_too() -> None:
    stray = cluster_pb2.Worker(worker_id="stray", state=cluster_pb2.WORKER_STATE_READY)
    picture = drawn(ANNOUNCEMENT, cluster_pb2.ClusterInfo(), [stray], {})
    assert [card["name"] for card in picture["workers"]] == ["worker-0", "stray"]
    assert [card["state"] for card in of_nothing(ANNOUNCEMENT)["workers"]] == ["connecting"]


def headers_of(document: Any, size: int = 7000) -> dict[str, str]:
    text = base64.b64encode(json.dumps(document).encode()).decode()
    return {f"{HEADER}{start // size}": text[start : start + size] for start in range(0, len(text), size)}


def test_a_prompt_comes_in_as_many_headers_as_it_needs() -> None:
    long = "grün " * 4000
    assert prompt_arguments(headers_of({"prompt": long, "public": False})) == {"prompt": long}
    asked = {"token_ids": [1, 2], "public": True}
    assert prompt_arguments(headers_of(asked)) == {"prompt_token_ids": [1, 2], "public_prefix": True}


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"prompt": "CANARY"},
        {"prompt": "", "public": False},
        {"prompt": 7, "public": False},
        {"prompt": "CANARY", "token_ids": [1], "public": False},
        {"token_ids": [], "public": False},
        {"token_ids": [-1], "public": False},
        {"token_ids": [True], "public": False},
        {"token_ids": ["CANARY"], "public": False},
        {"token_ids": [1] * 40_000, "public": False},
    ],
)
def test_what_is_no_question_is_refused_without_a_word_of_it(document: Any) -> None:
    with pytest.raises(ValueError, match=r"question cannot be read|give a prompt") as caught:
        prompt_arguments(headers_of(document))
    assert "CANARY" not in str(caught.value)


COMMAND = ["python", "-u", "/x/ray/dashboard/dashboard.py", "--port=8265", "--temp-dir=/t"]


def test_only_the_full_dashboards_command_is_led_through_our_launcher() -> None:
    led = led_through(COMMAND)
    assert led[:2] == COMMAND[:2]
    assert led[2].endswith("deploy/dashboard/launch.py")
    assert led[3:] == COMMAND[2:]
    for other in ([*COMMAND, "--minimal"], [*COMMAND, "--modules-to-load=UsageStatsHead"], ["raylet"], []):
        assert led_through(other) == other


def test_the_hook_never_raises_and_leaves_a_ray_alone_that_starts_its_parts_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private import ray_constants, services

    before = services.start_ray_process
    monkeypatch.delattr(ray_constants, "PROCESS_TYPE_DASHBOARD")
    start_hook(None, True)
    start_hook(None, False)
    assert services.start_ray_process is before
    assert "without /blockyard: module" in capsys.readouterr().err


def test_a_base_class_that_asks_for_more_or_gives_less_than_it_did_is_refused() -> None:
    class Base:
        gcs_client = None

        def run(self) -> None: ...

    check_base(Base)
    with pytest.raises(ImportError, match=r"wants \['close'\]"):
        check_base(type("More", (Base,), {"__abstractmethods__": frozenset({"close"})}))
    with pytest.raises(ImportError, match=r"lacks \['gcs_client', 'run'\]"):
        check_base(object)


def test_a_page_of_rays_that_is_not_as_it_was_gets_no_link() -> None:
    page = '<html><body><div id="root"></div></body></html>'
    assert with_link(page).count('<a href="blockyard"') == 1
    for other in ("", page + page, page.replace("root", "app")):
        with pytest.raises(ValueError, match="not as expected"):
            with_link(other)


@pytest.mark.parametrize(
    ("changes", "environment", "told"),
    [
        ({"wants_token": True}, {}, "ask for a token"),
        ({"wants_token": True}, {"BLOCKYARD_TOKEN_FILE": "/no/such/CANARY"}, "cannot be used"),
        ({"uses_tls": True}, {}, "speak TLS"),
        ({"uses_tls": True}, {"BLOCKYARD_TLS_CA": "/no/such/CANARY"}, "the log"),
        ({"uses_tls": True, "wants_certificate": True}, {"BLOCKYARD_TLS": "1"}, "client's certificate"),
    ],
)
def test_what_the_heads_environment_lacks_is_said_plainly_and_names_no_file(
    changes: dict[str, bool], environment: dict[str, str], told: str
) -> None:
    with pytest.raises(CannotReach, match=told) as caught:
        client_of("127.0.0.1:1", replace(ANNOUNCEMENT, **changes), environment)  # type: ignore[arg-type]
    assert "CANARY" not in str(caught.value)


def test_of_many_requests_the_oldest_are_shown_and_silent_routers_are_named() -> None:
    requests = [cluster_pb2.RequestInfo(request_id=str(age), age_seconds=age) for age in range(300)]
    found = requests_dict({"a": requests[::2], "b": requests[1::2], "c": None})
    assert (found["total"], found["silent"], len(found["requests"])) == (300, ["c"], MAX_REQUESTS)
    assert [request["id"] for request in found["requests"][:3]] == ["299", "298", "297"]
    assert found["requests"][0]["cached_tokens"] is None
