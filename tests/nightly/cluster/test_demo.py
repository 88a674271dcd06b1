"""`make demo` with its output in a pipe, as in CI: all that it prints can be read, line by line."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from blockyard.deploy.demo.__main__ import NUM_WORKERS
from blockyard.deploy.demo.prompts import DEMO_GROUPS
from blockyard.deploy.demo.traffic import chats_of
from blockyard.deploy.machine.state import HOME_VARIABLE

from .rig import processes_of

DEMO_SECONDS = 280.0
CHATS = [chat for group in DEMO_GROUPS for chat in chats_of(group)]
STAGES = (
    "starting Redis",
    "starting Ray and its dashboard",
    "starting the supervisor",
    "starting workers",
    "loading the model",
    "joining routers and workers",
    "saying goodbye to routers and workers",
    "stopping processes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Output of a demo, up to its end."""

    output: str
    errors: str
    left: tuple[int, ...]
    """Processes that it started and that still run."""

    def section(self, title: str) -> str:
        """Return the lines between the rule with this title and the next rule."""
        (found,) = re.findall(rf"^{re.escape(title)} ─+\n(.*?)(?=^\S[^\n]* ─+$|\Z)", self.output, re.M | re.S)
        return str(found)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    home = tmp_path_factory.mktemp("home")
    demo = subprocess.run(
        (sys.executable, "-m", "blockyard.deploy.demo"),
        env={**os.environ, HOME_VARIABLE: str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    return Told(output=demo.stdout, errors=demo.stderr, left=tuple(processes_of(home)))


def test_each_stage_is_told_once_it_begins_and_in_order(told: Told) -> None:
    stages = re.findall(r"^\[ *\d+\.\d s\] ([^:\n]+)$", told.errors, re.MULTILINE)
    assert [stage for stage in stages if stage in STAGES] == list(STAGES)


def test_nothing_in_a_pipe_moves_a_cursor_or_draws_over_a_line(told: Told) -> None:
    assert not re.search(r"[\x1b\r\b]", told.output + told.errors)


def test_the_first_chat_is_shown_whole_and_of_the_others_how_many_are_done(told: Told) -> None:
    shown = told.section(
        f"{len(CHATS)} chats in {len(DEMO_GROUPS)} groups, each group under one system prompt"
    )
    asked, *answered = shown.strip().splitlines()
    assert asked == f"{CHATS[0].name} asks: {CHATS[0].question}"
    counts = [int(line.split()[0]) for line in answered if line.endswith(f"of {len(CHATS)} chats are done")]
    assert (counts == sorted(set(counts)), counts[-1]) == (True, len(CHATS))
    assert any(line.strip() for line in answered[: -len(counts)]), "its answer stands before the counts"
    assert not any(chat.name in shown for chat in CHATS[1:])


def test_the_table_has_a_row_of_every_chat_and_no_number_is_cut_off(told: Told) -> None:
    table = told.section("what each request took")
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    for chat in CHATS:
        name, group, worker, *numbers = rows[chat.name]
        assert (name, group) == (chat.name, chat.group)
        assert re.fullmatch(r"worker-\d", worker)
        assert len(numbers) == 4
        assert all(re.fullmatch(r"[\d,.]+", number) for number in numbers)
    assert "…" not in table


def test_all_views_of_every_pool_agree(told: Told) -> None:
    assert told.section("the workers' block pools").count("show the same blocks") == NUM_WORKERS


def test_the_end_says_what_to_try_next_and_points_at_nothing_that_has_gone(told: Told) -> None:
    end = told.section("done")
    assert "everything has been stopped and nothing is left" in end
    assert "make demo KEEP=1" in end
    assert "blockyard serve" in end
    assert "http://" not in told.output
    assert told.left == ()
