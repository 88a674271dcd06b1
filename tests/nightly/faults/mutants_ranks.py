"""Mutants of rows 72 to 75: the ranks of a worker."""

from .mutant import mutant

KILLED = "ranks.py::test_a_killed_rank_ends_its_worker_at_once_and_its_streams_go_on_elsewhere[decode]"
FROZEN = "ranks.py::test_a_frozen_rank_ends_its_worker_and_its_streams_go_on_elsewhere"

MUTANTS = (
    mutant(
        72,
        "the loss of a rank is noticed and ends nothing",
        KILLED,
        ("worker:RankLeader._lose", "self._end_ranks()", "None"),
        ("worker:RankLeader._lose", "self.on_lost(reason)", "None"),
    ),
    mutant(
        72,
        "a step without all ranks is the fault of its requests",
        "worker/test_bisect.py::test_the_loss_of_a_rank_ends_the_engine_and_no_request_is_told_that_it_failed",
        ("worker:in_halves", "isinstance(failure, RanksLost)", "False"),
        ("worker:_Halves._run", "RanksLost", "KeyboardInterrupt"),
    ),
    mutant(
        73,
        "a silent rank is waited for",
        FROZEN,
        ("worker:Watch._look_at", "self._silent_seconds[index] > self._longest_silence(index)", "False"),
    ),
    mutant(
        73,
        "a frozen rank is told to end, and not killed",
        FROZEN,
        ("worker:RankProcesses.kill", "child.kill()", "child.terminate()"),
    ),
    mutant(
        74,
        "a rank that ends before it comes is waited for",
        "ranks.py::test_a_rank_killed_before_its_worker_serves_fails_that_start_in_words[load]",
        ("worker:RankProcesses.check_all_run", "child.poll()", "None"),
    ),
    mutant(
        75,
        "a rank outlives rank 0",
        "ranks.py::test_the_end_of_rank_0_ends_the_others",
        ("worker:_Rank._lose", "not self._has_stopped", "False"),
    ),
)
