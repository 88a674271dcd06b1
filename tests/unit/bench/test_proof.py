"""Tests before a benchmark: a red one ends it, or leaves its report unproven."""

from pathlib import Path

import pytest

from bench.proof import Proof, RedTests, end_if_unproven, proof_of, prove


@pytest.mark.slow
def test_no_figure_comes_of_a_red_test(tmp_path: Path) -> None:
    red, green = tmp_path / "test_red.py", tmp_path / "test_green.py"
    red.write_text("def test_it() -> None:\n    assert False\n")
    green.write_text("def test_it() -> None:\n    pass\n")
    assert prove([str(green)]).startswith("1 tests passed")
    with pytest.raises(RedTests, match="no benchmark on a red test"):
        prove([str(red)])
    with pytest.raises(RedTests):  # where nothing ran nothing is proven
        prove([str(tmp_path / "test_missing.py")])
    proof = proof_of([[str(green)], [str(red)]], device="cpu", is_skipped=False)
    assert proof.proven.startswith("1 tests passed")
    assert proof.unproven.startswith("1 failed")
    late = proof_of([[str(green)]], device="cpu", is_skipped=False, seconds=0.01)
    assert (late.proven, late.unproven) == ("nothing", f"not all tests ended within 0 s ({green})")


def test_tests_left_out_prove_nothing_and_only_red_ones_fail_the_command() -> None:
    proof = proof_of([["tests"]], device="cpu", is_skipped=True)
    assert proof.proven == "nothing"
    end_if_unproven(proof, is_skipped=True)
    with pytest.raises(SystemExit, match="UNPROVEN: 1 failed"):
        end_if_unproven(Proof(proven="nothing", unproven="1 failed"), is_skipped=False)
