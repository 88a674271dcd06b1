"""Mutants of rows 1 to 14: what clients do, and more work than fits."""

from .mutant import mutant

NO_ROUTER_SHEDS = (
    "router/placer.py",
    "if worker is None or worker.load.prefill_tokens_per_second <= 0:",
    "if True:",
)

MUTANTS = (
    mutant(
        2,
        "who leaves the queue keeps its charge",
        "clients.py::test_a_request_cancelled_in_the_queue_is_never_scheduled",
        (
            "router/admission.py",
            "        finally:\n            self._requests.end(outputs)\n",
            "        except BaseException:\n"
            "            raise\n"
            "        else:\n"
            "            self._requests.end(outputs)\n",
        ),
    ),
    mutant(
        4,
        "what is cancelled keeps its blocks",
        "clients.py::test_cancelling_at_the_very_end_ends_each_request_once",
        (
            "worker/queues.py",
            "if not sequence.num_in_flight and self._leaving",
            "if sequence.state is not SequenceState.CANCELLED and self._leaving",
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
        (
            "worker/engine.py",
            "for sequence in self.scheduler.waiting if rate else ():",
            "for sequence in ():",
        ),
    ),
    mutant(
        9,
        "nobody is cut off",
        "slow_readers.py::test_a_client_that_stops_reading_is_cut_off_and_holds_nobody_up",
        (
            "router/output.py",
            "if since is not None and time.monotonic() - since",
            "if 0 > time.monotonic() - 0",
        ),
    ),
    mutant(
        9,
        "one write at a time, for all clients together",
        "slow_readers.py::test_a_client_that_stops_reading_is_cut_off_and_holds_nobody_up",
        (
            "router/service.py",
            "                await context.write(stream_response(request_id, delta))\n",
            "                async with self._writing:\n"
            "                    await context.write(stream_response(request_id, delta))\n",
        ),
        (
            "router/service.py",
            "        self._calls = calls\n",
            "        self._calls = calls\n        import asyncio\n        self._writing = asyncio.Lock()\n",
        ),
    ),
    mutant(
        10,
        "the limit on requests is one too low",
        "limits.py::test_of_a_burst_exactly_the_limit_is_let_in",
        ("router/admission.py", "if of_all.held + amount > room:", "if of_all.held + amount >= room:"),
    ),
    mutant(
        10,
        "the refused do not hear when to come back",
        "limits.py::test_of_a_burst_exactly_the_limit_is_let_in",
        ("router/admission.py", "retry_after_seconds=delay_seconds,", "retry_after_seconds=0.0,"),
    ),
    mutant(
        11,
        "prompt tokens have no limit",
        "limits.py::test_long_prompts_meet_the_limit_on_tokens_and_short_ones_go_on",
        (
            "router/admission.py",
            "        self._check(tenant, account, tokens, account.tokens, self._tokens, self._max_tokens, TOKENS)\n",
            "",
        ),
    ),
    mutant(
        12,
        "tenants have no share",
        "limits.py::test_a_tenant_that_floods_does_not_hold_up_another",
        ("router/admission.py", "if account.requests and of_tenant + amount > share:", "if False:"),
    ),
    mutant(
        13,
        "nobody gives way",
        "limits.py::test_an_exhausted_pool_preempts_and_every_token_is_the_references",
        ("worker/scheduler.py", "            if victim is None:\n", "            if True:\n"),
    ),
    mutant(
        14,
        "what can never fit is queued",
        "limits.py::test_what_can_never_fit_is_told_at_once_and_holds_nobody_up",
        ("worker/scheduler.py", "if most_blocks(sequence, self.tables) > self.pool.num_blocks:", "if False:"),
    ),
)
