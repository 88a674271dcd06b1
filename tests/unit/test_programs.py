"""Where CI has installed the programs that tests need, a test without its program fails and is not skipped."""

import pytest

from tests.programs import REQUIRE_VARIABLE, first_of


@pytest.mark.parametrize(
    ("required", "outcome"),
    [("", pytest.skip.Exception), ("0", pytest.skip.Exception), ("1", pytest.fail.Exception)],
)
def test_a_missing_program_skips_a_test_unless_it_is_required(
    required: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUIRE_VARIABLE, required)
    with pytest.raises(outcome, match="no such-a-browser on the PATH: a page is looked at"):
        first_of("such-a-browser", why="a page is looked at")
    assert first_of("such-a-browser", "sh", why="") == first_of("sh", why="")
