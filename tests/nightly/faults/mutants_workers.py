"""Mutants of rows 15 to 33: workers that die, fall silent, are slow, or are harmed by a request."""

from .mutant import mutant

SILENT_FOR_EVER = (
    "router:EngineLink._watch",
    "self._last_heard + self._lost_seconds",
    "self._last_heard + 1000 * self._lost_seconds",
)

MUTANTS = (
    mutant(
        15,
        "one death is enough to be a poison",
        "worker_death.py::test_a_worker_killed_before_its_first_token_costs_latency_alone",
        ("router:DEADLY", "2", "1"),
    ),
    mutant(
        16,
        "nobody strikes out what the dead had in the index",
        "recovery.py::test_a_worker_that_was_killed_and_started_again_costs_nothing_for_long",
        ("worker:IndexPublisher._do_what_is_most_urgent", "now >= self._purge_at", "False"),
    ),
    mutant(
        17,
        "the budget is one too low",
        "worker_death.py::test_a_used_budget_ends_a_stream_with_worker_lost_and_what_it_had",
        ("router:Losses.add", "self.num > self.max_migrations", "self.num >= self.max_migrations"),
    ),
    mutant(
        17,
        "the budget never ends",
        "worker_death.py::test_a_used_budget_ends_a_stream_with_worker_lost_and_what_it_had",
        ("router:Losses.add", "self.num > self.max_migrations", "False"),
    ),
    mutant(
        18,
        "a replay takes what was generated for a part of the prompt",
        "replay.py::test_a_replay_goes_on_where_grammar_draws_and_penalties_were",
        (
            "router:Relay._submit",
            "generation.prompt_tokens",
            "generation.prompt_tokens + len(outputs.resumed()) // 4",
        ),
    ),
    mutant(
        18,
        "the other outputs of a request are drawn as its first",
        "replay.py::test_a_replay_goes_on_where_grammar_draws_and_penalties_were",
        (
            "worker:Engine._sequences",
            "self._next_sequence += 1",
            "sequence.index = 0; self._next_sequence += 1",
        ),
    ),
    mutant(
        20,
        "silence is fine",
        "worker_silence.py::test_a_frozen_worker_loses_its_streams_and_changes_nothing_when_it_wakes",
        SILENT_FOR_EVER,
    ),
    mutant(
        20,
        "the suspect get new requests",
        "worker_silence.py::test_a_frozen_worker_loses_its_streams_and_changes_nothing_when_it_wakes",
        ("router:KnownWorkers._is_ready", "now - worker.last_heard < self._suspect_seconds", "True"),
    ),
    mutant(
        22,
        "silence is fine",
        "worker_silence.py::test_a_link_that_loses_one_way_brings_each_token_once[downstream]",
        SILENT_FOR_EVER,
    ),
    mutant(
        22,
        "a lost worker is called again without a pause",
        "worker_silence.py::test_a_flapping_link_brings_each_token_once_without_a_storm",
        (
            "router:EngineLink.run",
            "asyncio.sleep(backoff_seconds * self._rng.uniform(0.5, 1.0))",
            "asyncio.sleep(0.001)",
        ),
    ),
    mutant(
        23,
        "a worker that is late with a token is lost",
        "worker_silence.py::test_a_slow_link_is_slower_and_nobody_is_taken_for_dead",
        (
            "router:EngineLink._watch",
            "self._last_heard + self._lost_seconds",
            "self._last_heard + (0.1 if self._open else 1.0)",
        ),
        (
            "router:EngineLink._watch",
            "asyncio.sleep(max(left_seconds, LEAST_SLEEP_SECONDS))",
            "asyncio.sleep(0.01)",
        ),
    ),
    mutant(
        24,
        "placement does not know how fast a worker is",
        "worker_silence.py::test_a_straggler_gets_less_and_is_not_taken_for_dead",
        ("router:candidate_of", "worker.speed.slowness", "1.0"),
    ),
    mutant(
        26,
        "three deaths make a poison",
        "worker_death.py::test_a_request_that_kills_workers_is_tried_on_no_third",
        ("router:DEADLY", "2", "3"),
    ),
    mutant(
        26,
        "nobody is quarantined",
        "worker_death.py::test_a_request_that_kills_workers_is_tried_on_no_third",
        ("router:Quarantine.check", "sha256(prompt).digest() in self._until", "False"),
    ),
    mutant(
        27,
        "what failed is cached",
        "poison.py::test_a_request_whose_logits_are_no_numbers_ends_alone_and_leaves_no_prefix",
        (
            "worker:StepCommit.commit",
            "token in (FAILED_TOKEN, NO_CHOICE)",
            "token in (FAILED_TOKEN, NO_CHOICE) and (self._tables.confirm(sequence, row.start) or True)",
        ),
    ),
    mutant(
        27,
        "nobody looks whether logits are finite",
        "poison.py::test_a_request_whose_logits_are_no_numbers_ends_alone_and_leaves_no_prefix",
        (
            "worker:Sampler.start",
            "tokens_SN.masked_fill_(~usable_S[:, None], NO_CHOICE).masked_fill_(~finite_S[:, None], FAILED_TOKEN)",
            "None",
        ),
    ),
)
