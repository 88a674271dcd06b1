"""Mutants of rows 60 to 82: safeguards of pulls and moves between workers that are missing."""

from .mutant import mutant

STORM = (
    "worker/test_storm.py::test_ten_thousand_actions_break_no_invariant_and_change_no_token"
    "[prefixes that come back from host memory]"
)
OUTLIVE = "transfer_memory.py::test_lent_blocks_outlive_eviction_and_a_flush"
HARM = "worker/test_transfer.py::test_whatever_happens_to_the_bytes_tokens_are_right_and_nothing_waits"
NONSENSE = "transfer_memory.py::test_a_source_that_answers_nonsense_is_found_out_and_avoided"

MUTANTS = (
    mutant(
        60,
        "a pull that was cut counts as whole",
        "transfers.py::test_a_source_killed_at_any_byte_costs_only_what_it_had_not_sent",
        (
            "worker:take_pull",
            "engine.end_pull(pull, result.num_blocks)",
            "engine.end_pull(pull, len(pull.slots))",
        ),
    ),
    mutant(
        61,
        "a read knows no deadline",
        "transfers.py::test_a_source_frozen_at_any_byte_costs_no_more_than_the_estimate",
        (
            "worker:Connection._seconds_left",
            "left = self.deadline - time.monotonic()",
            "left = 3600.0",
        ),
    ),
    mutant(
        62,
        "no checksum is compared",
        f"{HARM}[flip_at]",
        ("worker:Connection.receive_block", "crc32(into) != checksum", "False"),
    ),
    mutant(
        62,
        "no index is compared",
        NONSENSE,
        ("worker:Connection._checksum_of", "found != index", "False"),
    ),
    mutant(
        62,
        "more blocks are accepted than were asked for",
        NONSENSE,
        ("worker:Receiver._exchange", "reply.num_blocks > wanted.num_blocks", "False"),
    ),
    mutant(
        62,
        "a source that sent nonsense is asked again at once",
        NONSENSE,
        ("worker:Avoided.note", "end in AVOIDED_SECONDS", "False"),
    ),
    mutant(
        63,
        "a loan keeps no block of the pool",
        f"{OUTLIVE}[pool]",
        ("worker:BlockTables.lend", "self.pool.share(blocks)", ""),
        ("worker:BlockTables.end_loan", "self.pool.release(loan.blocks)", ""),
    ),
    mutant(
        63,
        "what is read in host memory is free after a flush",
        f"{OUTLIVE}[host]",
        ("worker:HostCache._free_slot", "name in self._reading", "False"),
    ),
    mutant(
        63,
        "blocks are lent before they are computed",
        "transfer_memory.py::test_only_computed_blocks_are_lent",
        (
            "worker:BlockTables.lend",
            "self.cache.is_unconfirmed(block) or self.num_lent + len(blocks) >= most_blocks",
            "self.num_lent + len(blocks) >= most_blocks",
        ),
    ),
    mutant(
        63,
        "host memory is sent with a checksum of what it has become",
        "transfer_memory.py::test_a_bit_that_flips_in_the_sources_host_memory_reaches_nobody[True]",
        ("worker:content_of", "memory.checksum(slot)", "None"),
    ),
    mutant(
        64,
        "no incarnation is compared",
        "transfers.py::test_a_source_restarted_on_its_port_has_nothing_of_what_it_had",
        ("worker:refusal_of", "request.incarnation != facts.incarnation", "False"),
    ),
    mutant(
        65,
        "slots are free while their receiver still writes",
        STORM,
        (
            "worker:Pulls.leave",
            "pull.is_cancelled = not (self._waiting[pull] or pull.is_ordered)",
            """
            pull.is_cancelled = not (self._waiting[pull] or pull.is_ordered)
            if pull.is_cancelled:
                self._tables.host_cache.release(pull.slots)
                pull.deadline = -1.0
            """,
        ),
        (
            "worker:Pulls.end",
            "not self._tables.has(pull.prefix[:first])",
            "pull.deadline < 0 or not self._tables.has(pull.prefix[:first])",
        ),
        (
            "worker:Pulls.end",
            "host_cache.release(pull.slots[num_received:])",
            "host_cache.release(pull.slots[num_received:] if pull.deadline >= 0 else ())",
        ),
    ),
    mutant(
        65,
        "blocks are kept whose prefix has gone meanwhile",
        "transfer_memory.py::test_blocks_whose_prefix_was_flushed_in_the_pull_are_not_kept",
        ("worker:Pulls.end", "not self._tables.has(pull.prefix[:first])", "False"),
    ),
    mutant(
        65,
        "a request waits for its pull for ever",
        "transfer_memory.py::test_a_request_goes_on_without_a_pull_that_does_not_end",
        ("worker:Pulls.release_late", "now >= pull.deadline + LATE_SECONDS", "False"),
    ),
    mutant(
        65,
        "nobody tells the receiver that its request has ended",
        "transfer_memory.py::test_a_request_that_expires_ends_its_pull_and_frees_its_slots",
        ("worker:Connection._fill", "self.is_wanted is not None and not self.is_wanted()", "False"),
    ),
    mutant(
        66,
        "a loan ends only with its transfer",
        "transfers.py::test_the_loans_of_a_killed_destination_end_at_once",
        ("worker:Lender._loan", "self._end_loan(loan)", "request.first_block or loan"),
    ),
    mutant(
        67,
        "no layout is compared",
        "transfer_memory.py::test_a_worker_of_another_layout_or_model_lends_nothing",
        ("worker:refusal_of", "request.layout != facts.layout", "False"),
    ),
    mutant(
        68,
        "a source serves all who come",
        "transfer_memory.py::test_a_source_serves_so_many_pulls_at_once_and_refuses_the_others",
        (
            "worker:Lender.__init__",
            "threading.BoundedSemaphore(MAX_LOANS)",
            "threading.BoundedSemaphore(1000)",
        ),
    ),
    mutant(
        68,
        "a connection with TLS counts twice",
        "transfer_memory.py::test_forty_workers_stay_connected_to_one_source",
        ("worker:Lender._secured", "self._connections.remove(accepted)", ""),
    ),
    mutant(
        69,
        "each request pulls for itself",
        "worker/test_transfer.py::test_two_requests_for_one_prefix_wait_for_one_pull",
        ("worker:Pulls.begin", "self._under_way.get(following[0]) if following else None", "None"),
        ("worker:Pulls._reserve", "name in self._under_way", "False"),
    ),
    mutant(
        70,
        "pulled blocks are on the account of who pulled them",
        "transfer_memory.py::test_pulled_blocks_are_on_the_account_of_the_tenant_whose_prefix_it_is",
        (
            "worker:Pulls.end",
            "self._tables.owner_of(pull.prefix[0], otherwise=pull.tenant)",
            "pull.tenant",
        ),
    ),
    mutant(
        76,
        "the engine never hears of a pull that reached nobody",
        "splits.py::test_a_prefill_worker_killed_before_the_pull_costs_only_its_computing",
        (
            "worker:take_pull",
            "engine.end_pull(pull, result.num_blocks)",
            "result.num_blocks and engine.end_pull(pull, result.num_blocks)",
        ),
        ("worker:Pulls.release_late", "now >= pull.deadline + LATE_SECONDS", "False"),
    ),
    mutant(
        77,
        "a pull from a frozen worker has no deadline",
        "splits.py::test_a_prefill_worker_frozen_before_the_pull_costs_no_more_than_the_estimate",
        (
            "worker:Connection._seconds_left",
            "left = self.deadline - time.monotonic()",
            "left = 3600.0",
        ),
        ("worker:Pulls.release_late", "now >= pull.deadline + LATE_SECONDS", "False"),
    ),
    mutant(
        78,
        "the engine never hears of a refused pull",
        "splits.py::test_a_prefill_worker_restarted_before_the_pull_has_nothing_to_lend",
        (
            "worker:take_pull",
            "engine.end_pull(pull, result.num_blocks)",
            "result.num_blocks and engine.end_pull(pull, result.num_blocks)",
        ),
        ("worker:Pulls.release_late", "now >= pull.deadline + LATE_SECONDS", "False"),
    ),
    mutant(
        79,
        "a prefill worker serves nobody alone",
        "splits.py::test_the_prefill_worker_goes_on_alone_where_the_decode_worker_dies",
        ("router:place", "may_serve or everyone", "may_serve"),
    ),
    mutant(
        80,
        "a move counts as a failure of the worker",
        "router/test_moves.py::test_a_source_that_dies_before_its_blocks_are_fetched_costs_only_the_computing",
        (
            "router:Attempt._refused",
            "self.was_preempted, self.was_handed_over = True, self.brought_tokens",
            "self.has_failed = True",
        ),
    ),
    mutant(
        81,
        "no request may move",
        "router/test_moves.py::test_a_destination_that_dies_loses_no_token_of_what_moved_there",
        ("worker:Engine._sequences", "request.preemptions is not None", "False"),
    ),
    mutant(
        82,
        "nobody counts how often a request has moved",
        "router/test_relay.py::test_a_request_that_all_workers_preempt_moves_four_times_and_then_stays",
        ("router:Relay._submitted", "progress.num_preemptions < MAX_PREEMPTIONS", "True"),
    ),
)
