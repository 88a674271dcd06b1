"""Mutants that the tests of a row of the fault matrix must kill: a safeguard of the product that is missing.

A line gives row, place, the code there, and what it becomes. A line without a row belongs to the mutant above it. The
place is a function, method or constant of a package, so that a file may move. The code is an expression or a statement
that the place has once, however it is laid out.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .operators import replaced

_LINE = re.compile(r"(\d*) +(\w+):([\w.]+) \| (.+) => (.+)")


def texts(tree: Path, mutant: str) -> dict[Path, bytes]:
    """Return the changed files. Raises ValueError where the mutant no longer fits the product."""
    changed: dict[Path, bytes] = {}
    for line in mutant.splitlines():
        package, place, right, wrong = _LINE.fullmatch(line).groups()[1:]  # type: ignore[union-attr]
        files = {path: changed.get(path, path.read_bytes()) for path in (tree / package).rglob("*.py")}
        name = place.rpartition(".")[2].encode()
        found = [
            (path, node, source)
            for path, source in files.items()
            if name in source
            for scope in _scopes(ast.parse(source), place.split("."))
            for node in ast.walk(scope)
            # An expression alone in its line is a statement too.
            if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.Expr)
            if ast.unparse(node) == ast.unparse(ast.parse(right))
        ]
        if len(found) != 1:
            raise ValueError(f"{place} has {len(found)} times: {right}")
        path, node, source = found[0]
        changed[path] = replaced(source, node, wrong)
    return changed


def _scopes(node: ast.AST, names: list[str]) -> Iterator[ast.AST]:
    """Yield what these names define, from the outermost one."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if child.name == names[0]:
                    yield from _scopes(child, names[1:]) if names[1:] else [child]
            case ast.Assign(targets=[ast.Name(id=name)]) if [name] == names and isinstance(node, ast.Module):
                yield child
            case ast.stmt():
                yield from _scopes(child, names)


def of_rows(rows: list[int]) -> list[tuple[int, str]]:
    """Return row and text of these rows' mutants, or of all."""
    found = [(int(text.split()[0]), text) for text in re.split(r"\n(?=\d)", ROWS.strip())]
    return [(row, text) for row, text in found if not rows or row in rows]


ROWS = """
2 router:AdmissionLedger.charge | self._requests.end(outputs) \
=> __import__("sys").exception() or self._requests.end(outputs)
4 worker:Queues.release_if_idle | not sequence.num_in_flight => sequence.state is not SequenceState.CANCELLED
8 router:Placer._refuse_hopeless | not self._fleet.view.speeds.costs.is_measured => True
8 router:Placer._refuse_hopeless | not self._fleet.view.speeds.costs.is_measured => True
  worker:Engine._expire | self.scheduler.waiting if rates.prefill_tokens_per_second else () => ()
9 router:_Pace._look | self._loop.time() - self.since >= self._limit_seconds => False
9 router:InferenceService.GenerateStream.write_delta | await write(context, stream_response(request_id, delta)) \
=> async with self._writing: await write(context, stream_response(request_id, delta))
  router:InferenceService.__init__ | self._calls = calls \
=> import asyncio; self._calls, self._writing = calls, asyncio.Lock()
10 router:AdmissionLedger._check | of_all.held + amount > room => of_all.held + amount >= room
10 router:AdmissionLedger._refuse | \
Overloaded(f"{reason}: come back in {delay_seconds:.1f} s", retry_after_seconds=delay_seconds) => Overloaded(reason)
11 router:AdmissionLedger.charge | \
self._check(tenant, account, tokens, account.tokens, self._tokens, self._max_tokens, TOKENS) => None
12 router:AdmissionLedger._check | account.requests and of_tenant + amount > share => False
13 worker:Scheduler._schedule_running | victim is None => True
14 worker:Scheduler.submit | most_blocks(sequence, self.tables) > self.pool.num_blocks => False
15 router:DEADLY | 2 => 1
16 worker:IndexPublisher._do_what_is_most_urgent | now >= self._purge_at => False
17 router:Losses.add | self.num > self.max_migrations => self.num >= self.max_migrations
17 router:Losses.add | self.num > self.max_migrations => False
18 router:Relay._submit | generation.prompt_tokens => generation.prompt_tokens + len(outputs.resumed()) // 4
18 worker:Engine._sequences | self._next_sequence += 1 => sequence.index = 0; self._next_sequence += 1
20 router:EngineLink._watch | self._last_heard + self._lost_seconds => self._last_heard + 1000 * self._lost_seconds
20 router:KnownWorkers._is_ready | now - worker.last_heard < self._suspect_seconds => True
22 router:EngineLink._watch | self._last_heard + self._lost_seconds => self._last_heard + 1000 * self._lost_seconds
22 router:EngineLink.run | asyncio.sleep(backoff_seconds * self._rng.uniform(0.5, 1.0)) => asyncio.sleep(0.001)
23 router:EngineLink._watch | self._last_heard + self._lost_seconds => self._last_heard + (0.1 if self._open else 1.0)
  router:EngineLink._watch | asyncio.sleep(max(left_seconds, LEAST_SLEEP_SECONDS)) => asyncio.sleep(0.01)
24 router:candidate_of | worker.speed.slowness => 1.0
26 router:DEADLY | 2 => 3
26 router:Quarantine.check | sha256(prompt).digest() in self._until => False
27 worker:StepCommit.commit | token in (FAILED_TOKEN, NO_CHOICE) \
=> token in (FAILED_TOKEN, NO_CHOICE) and (self._tables.confirm(sequence, row.start) or True)
27 worker:Sampler.start | \
tokens_SN.masked_fill_(~usable_S[:, None], NO_CHOICE).masked_fill_(~finite_S[:, None], FAILED_TOKEN) => None
35 worker:IndexPublisher._renew | self._berth = None => pass
  worker:IndexPublisher._publish | self._berth = None => self._on_its_way = None
37 router:_Shard.ask | patient_timeout(self._config.timeout_seconds) => patient_timeout(60.0)
38 worker:IndexPublisher._register | self._republish() => self._num_registrations or self._republish()
39 worker:IndexPublisher.run | self._note(error) => raise self._note(error) or error
40 worker:IndexPublisher._note | self._num_errors += 1 => pass
43 worker:IndexPublisher.run | self._note(error) => self._on_its_way = self._note(error)
45 worker:Routes.cancel_all | self.cancel(link, handle, None, engine) \
=> [self.cancel(route.link, route.handle, None, engine) for route in tuple(self._routes.values())]
46 router:RouterServer._drain | await registry.until_idle() => None
46 router:RouterServer._drain | await health_service.enter_graceful_shutdown() => None
47 router:RequestRegistry.hold | key in self._records => False
47 worker:Routes.add | route.link.requests[route.handle] = request_id \
=> route.link.requests[route.handle] = request_id; \
self._routes |= {k: Route(route.link, route.handle, "") for k, o in self._routes.items() if o.request_id == request_id}
48 worker:Engine.__init__ | time.monotonic => time.time
48 router:EngineLink.__init__ | time.monotonic => time.time
  router:Fleet.__init__ | time.monotonic => time.time
49 worker:WorkerServer._write_pool_map | OSError => FileExistsError
60 worker:take_pull | engine.end_pull(pull, result.num_blocks) => engine.end_pull(pull, len(pull.slots))
61 worker:Connection._seconds_left | self.deadline - time.monotonic() => 3600.0
64 worker:refusal_of | request.incarnation != facts.incarnation => False
66 worker:Lender._loan | self._end_loan(loan) => request.first_block or loan
71 router:Placer.look_up | self.prefix_lookup.shard_of(names, stride_blocks) \
=> max(range(self.prefix_lookup.num_shards), key=self.index_watch.is_cut_off)
72 worker:RankLeader._lose | self._end_ranks() => None
  worker:RankLeader._lose | self.on_lost(reason) => None
73 worker:Watch._look_at | self._silent_seconds[index] > self._longest_silence(index) => False
73 worker:RankProcesses.kill | child.kill() => child.terminate()
74 worker:RankProcesses.check_all_run | child.poll() => None
75 worker:_Rank._lose | not self._has_stopped => False
76 worker:take_pull | engine.end_pull(pull, result.num_blocks) \
=> result.num_blocks and engine.end_pull(pull, result.num_blocks)
  worker:Pulls.release_late | now >= pull.deadline + LATE_SECONDS => False
77 worker:Connection._seconds_left | self.deadline - time.monotonic() => 3600.0
  worker:Pulls.release_late | now >= pull.deadline + LATE_SECONDS => False
78 worker:take_pull | engine.end_pull(pull, result.num_blocks) \
=> result.num_blocks and engine.end_pull(pull, result.num_blocks)
  worker:Pulls.release_late | now >= pull.deadline + LATE_SECONDS => False
79 router:place | may_serve or everyone => may_serve
80 router:Attempt._refused | self.was_preempted, self.was_handed_over = True, self.brought_tokens \
=> self.has_failed = True
81 worker:Engine._sequences | request.preemptions is not None => False
83 router:_AnswerFile.__init__ | os.ftruncate(self._descriptor, self._num_bytes) => None
83 router:_AnswerFile._read | self.custom_ids.add(custom_id) => None
84 router:Store.become_owner | fcntl.LOCK_EX => fcntl.LOCK_SH
85 router:EngineLink._watch | self._clock() - now - left_seconds > PAUSE_SECONDS => False
"""
