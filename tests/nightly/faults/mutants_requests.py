"""Mutants of rows 1 to 14: what clients do, and more work than fits."""

from .mutant import mutant

NO_ROUTER_SHEDS = (
    "router:Placer._refuse_hopeless",
    "not self._fleet.view.speeds.costs.is_measured",
    "True",
)

MUTANTS = (
    mutant(
        2,
        "who leaves the queue keeps its charge",
        "clients.py::test_a_request_cancelled_in_the_queue_is_never_scheduled",
        (
            "router:AdmissionLedger.charge",
            """
            self._requests.end(outputs)
            self._tokens.end(charge.tokens)
            account.requests -= outputs
            account.tokens -= charge.tokens
            """,
            """
            import sys
            if sys.exception() is None:
                self._requests.end(outputs)
                self._tokens.end(charge.tokens)
                account.requests -= outputs
                account.tokens -= charge.tokens
            """,
        ),
    ),
    mutant(
        4,
        "what is cancelled keeps its blocks",
        "clients.py::test_cancelling_at_the_very_end_ends_each_request_once",
        (
            "worker:Queues.release_if_idle",
            "not sequence.num_in_flight",
            "sequence.state is not SequenceState.CANCELLED",
        ),
    ),
    mutant(
        8,
        "the router sheds nobody",
        "clients.py::test_a_hopeless_deadline_costs_no_prefill",
        NO_ROUTER_SHEDS,
    ),
    mutant(
        8,
        "neither router nor worker sheds",
        "clients.py::test_a_hopeless_deadline_costs_no_prefill",
        NO_ROUTER_SHEDS,
        ("worker:Engine._expire", "self.scheduler.waiting if rates.prefill_tokens_per_second else ()", "()"),
    ),
    mutant(
        9,
        "nobody is cut off",
        "slow_readers.py::test_a_client_that_stops_reading_is_cut_off_and_holds_nobody_up",
        (
            "router:_Pace._look",
            "self.since is not None and self._loop.time() - self.since >= self._limit_seconds",
            "False",
        ),
    ),
    mutant(
        9,
        "one write at a time, for all clients together",
        "slow_readers.py::test_a_client_that_stops_reading_is_cut_off_and_holds_nobody_up",
        (
            "router:InferenceService.GenerateStream.write_delta",
            "await write(context, stream_response(request_id, delta))",
            """
            async with self._writing:
                await write(context, stream_response(request_id, delta))
            """,
        ),
        (
            "router:InferenceService.__init__",
            "self._calls = calls",
            "import asyncio; self._calls, self._writing = calls, asyncio.Lock()",
        ),
    ),
    mutant(
        10,
        "the limit on requests is one too low",
        "limits.py::test_of_a_burst_exactly_the_limit_is_let_in",
        ("router:AdmissionLedger._check", "of_all.held + amount > room", "of_all.held + amount >= room"),
    ),
    mutant(
        10,
        "the refused do not hear when to come back",
        "limits.py::test_of_a_burst_exactly_the_limit_is_let_in",
        (
            "router:AdmissionLedger._refuse",
            'Overloaded(f"{reason}: come back in {delay_seconds:.1f} s", retry_after_seconds=delay_seconds)',
            "Overloaded(reason)",
        ),
    ),
    mutant(
        11,
        "prompt tokens have no limit",
        "limits.py::test_long_prompts_meet_the_limit_on_tokens_and_short_ones_go_on",
        (
            "router:AdmissionLedger.charge",
            "self._check(tenant, account, tokens, account.tokens, self._tokens, self._max_tokens, TOKENS)",
            "None",
        ),
    ),
    mutant(
        12,
        "tenants have no share",
        "limits.py::test_a_tenant_that_floods_does_not_hold_up_another",
        ("router:AdmissionLedger._check", "account.requests and of_tenant + amount > share", "False"),
    ),
    mutant(
        13,
        "nobody gives way",
        "limits.py::test_an_exhausted_pool_preempts_and_every_token_is_the_references",
        ("worker:Scheduler._schedule_running", "victim is None", "True"),
    ),
    mutant(
        14,
        "what can never fit is queued",
        "limits.py::test_what_can_never_fit_is_told_at_once_and_holds_nobody_up",
        ("worker:Scheduler.submit", "most_blocks(sequence, self.tables) > self.pool.num_blocks", "False"),
    ),
)
