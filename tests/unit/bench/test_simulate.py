"""`python -m bench.placement.simulate`: bad input is named in one sentence, and tables say their units."""

import json
from pathlib import Path

import pytest

from bench.placement.simulate import main

QUICK = ("--workload", "one-group", "--rate", "2", "--seconds", "2", "--workers", "1")


def complaint(*arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return str(ended.value)


def test_a_wrong_value_is_named_with_its_option_also_where_it_is_not_used(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    for option, value, told in (
        ("--speed", "0", "--speed must be above 0 and at most 1e+06, not 0"),
        ("--speed", "nan", "--speed must be above 0 and at most 1e+06, not nan"),
        ("--seconds", "nan", "--seconds must be above 0 and at most 1e+06, not nan"),
        ("--trace-block-tokens", "0", "--trace-block-tokens must be at least 1, not 0"),
        ("--routers", "0", "--routers must be at least 1, not 0"),
        ("--set", "near_equal_ms", "placement: 'near_equal_ms' is not NAME=VALUE"),
    ):
        for source in (("--trace", str(trace)), QUICK[:2]):
            assert complaint(*source, option, value).startswith(f"error: {told}")


@pytest.mark.parametrize("option", ["--trace", "--profile"])
def test_a_file_that_is_missing_or_unreadable_is_named(option: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    assert complaint(option, str(path)) == f"error: {path}: No such file or directory"
    path.write_text("{")
    assert "given.json" in complaint(option, str(path))
    assert "not JSON" in complaint(option, str(path))
    path.write_bytes(b"\xff\xfe")
    assert "given.json" in complaint(option, str(path))


def test_a_request_longer_than_the_context_is_named_by_its_line(tmp_path: Path) -> None:
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "profile.json"
    entry = {"timestamp": 0, "input_length": 4000, "output_length": 100, "hash_ids": [1]}
    trace.write_text(json.dumps(entry))
    profile.write_text('{"max_model_len": 4096}')
    told = complaint("--trace", str(trace), "--profile", str(profile))
    assert told == (
        "error: trace.jsonl, line 1: input_length 4000 and output_length 100 are more than 4096 tokens together"
    )


def test_the_table_counts_in_words_and_says_its_units(capsys: pytest.CaptureFixture[str]) -> None:
    main(list(QUICK))
    about, heading, row = capsys.readouterr().out.splitlines()
    assert "; 1 worker, 1 router, " in about
    assert "ttft_mean [s]" in heading
    assert "latency_p50 [s]" in heading
    assert row.startswith("prefix ")
    main([*QUICK[:-1], "2", "--routers", "2"])
    assert "; 2 workers, 2 routers, " in capsys.readouterr().out
