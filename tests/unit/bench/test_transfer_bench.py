"""The benchmark of transfers: harm is what it says, floors follow from figures, and the text holds all parts."""

import argparse
from math import inf

import pytest

from bench.transfer.__main__ import floors_of, text_of
from bench.transfer.harm import FRAME_BYTES, KINDS, REPLY_BYTES, Harm

ANSWER = bytes(range(256)) * ((REPLY_BYTES + 3 * FRAME_BYTES) // 256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, REPLY_BYTES + FRAME_BYTES, REPLY_BYTES + 2 * FRAME_BYTES + 77])
@pytest.mark.parametrize("chunk", [1000, len(ANSWER)])
def test_harm_changes_the_stream_from_its_position_on(kind: str, position: int, chunk: int) -> None:
    harm = Harm(kind, position, bit=3)
    passed = b""
    for offset in range(0, len(ANSWER), chunk):
        data, goes_on = harm.pass_on(ANSWER[offset : offset + chunk], offset)
        passed += data
        if not goes_on:
            break
    assert harm.first_wrong is not None
    assert position <= harm.first_wrong <= position + 1
    assert passed[: harm.first_wrong] == ANSWER[: harm.first_wrong]
    assert passed[: harm.first_wrong + 1] != ANSWER[: harm.first_wrong + 1]
    assert harm.num_intact == max(harm.first_wrong - REPLY_BYTES, 0) // FRAME_BYTES
    assert goes_on is (kind != "cut")


def test_harm_that_changes_nothing_leaves_all_blocks_intact() -> None:
    assert Harm("reversed", 3, bit=0).pass_on(b"abca", 0) == (b"abca", True)
    assert Harm("reversed", 3, bit=0).num_intact == inf


def test_floors_and_text_follow_from_the_figures() -> None:
    gaps = {"p50_ms": 80.0, "p99_ms": 100.0, "gaps": 300}
    end = {"without": gaps, "with": gaps, "p99_ratio": 1.05, "p50_ratio": 1.0}
    figures = {
        "first": {
            "seconds": {"recomputed": 10.0, "pulled": 0.2},
            "megabytes": 100.0,
            "other_tokens": 0,
            "pulled_to_recomputed": 0.02,
            "pulled_to_host_hit": 1.5,
            "foreign_cores": 0.1,
        },
        "decodes": {"pulls": 7, "source": end, "destination": end, "foreign_cores": 0.1},
        "harm": {
            "tried": 10_000,
            "kinds": {"cut": 10_000},
            "ends": {"cut": 10_000},
            "wrong_tokens": 0,
            "blocks_used": 5,
            "harmed_blocks_used": 0,
        },
        "links": {
            "rates": [
                {"configured_mbits": 10, "megabytes": 5.0, "mbits": 7.0, "ratio": 0.7, "setup_ms": [3.0, 1.0]}
            ]
        },
    }
    missed = [floor.name for floor in floors_of(figures) if not floor.holds]
    assert missed == [
        "time to the first token, pulled / local host hit",
        "reported rate of 10 Mbit/s, off by",
    ]
    text = text_of(
        figures,
        argparse.Namespace(
            plaintext=False, repeats=3, beside="nothing", model="llama-166m", dtype="float32", device="cpu"
        ),
    )
    assert "| pulled | 200 |" in text
    assert "10,000 cut" in text
    assert "| 10 | 5.0 | 7.0 | 3.0 | 1.0 |" in text
    assert floors_of({}) == []
