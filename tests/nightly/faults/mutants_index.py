"""Mutants of rows 34 to 43, and of row 71: Redis and the prefix index."""

from .mutant import mutant

TELLS_NOTHING_AGAIN = (
    "worker:IndexPublisher._register",
    "self._republish()",
    "if not self._num_registrations: self._republish()",
)

MUTANTS = (
    mutant(
        35,
        "a worker does not hear that the index forgot it",
        "redis_outages.py::test_redis_killed_and_back_empty_is_told_everything_anew",
        (
            "worker:IndexPublisher._renew",
            "self._berth = None",
            "",
        ),
        (
            "worker:IndexPublisher._publish",
            "self._berth = None",
            "self._on_its_way = None",
        ),
    ),
    mutant(
        37,
        "a look-up waits for as long as it takes",
        "redis_outages.py::test_a_redis_that_is_cut_off_silently_holds_nobody_up",
        (
            "router:_Shard.ask",
            "patient_timeout(self._config.timeout_seconds)",
            "patient_timeout(60.0)",
        ),
    ),
    mutant(
        38,
        "a new berth is told nothing of what is cached",
        "redis_outages.py::test_after_flushall_everything_is_told_anew",
        TELLS_NOTHING_AGAIN,
    ),
    mutant(
        38,
        "the same, under a steady load",
        "recovery.py::test_a_redis_that_was_flushed_costs_no_hits",
        TELLS_NOTHING_AGAIN,
    ),
    mutant(
        39,
        "a replica's refusal ends the publisher",
        "redis_refusals.py::test_after_a_failover_to_a_stale_replica_what_it_missed_is_made_good",
        (
            "worker:IndexPublisher.run",
            "self._note(error)",
            """
            self._note(error)
            if error.kind is ErrorKind.READ_ONLY: raise
            """,
        ),
    ),
    mutant(
        40,
        "errors are not counted",
        "redis_refusals.py::test_a_redis_that_denies_is_counted_and_served_without[user off]",
        ("worker:IndexPublisher._note", "self._num_errors += 1", ""),
    ),
    mutant(
        40,
        "who is denied once gives up",
        "redis_refusals.py::test_a_redis_that_denies_is_counted_and_served_without[user off]",
        (
            "worker:IndexPublisher.run",
            "self._note(error)",
            """
            self._note(error)
            if error.kind is ErrorKind.DENIED: raise
            """,
        ),
    ),
    mutant(
        43,
        "a batch without an answer is not sent again",
        "redis_lies.py::test_news_lost_and_doubled_on_the_way_leave_no_trace",
        (
            "worker:IndexPublisher.run",
            "self._note(error)",
            """
            self._note(error)
            self._on_its_way = None
            """,
        ),
    ),
    mutant(
        71,
        "who is cut off from one server is cut off from all",
        "redis_shards.py::test_the_death_of_one_of_two_servers_darkens_its_prefixes_alone",
        (
            "router:Placer.look_up",
            "self.index_watch.is_cut_off(self.prefix_lookup.shard_of(names, stride_blocks))",
            "any(self.index_watch.is_cut_off(shard) for shard in range(self.prefix_lookup.num_shards))",
        ),
    ),
)
