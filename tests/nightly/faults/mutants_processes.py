"""Mutants of rows 44 to 49 and 83 to 85: routers, and what the machine does to processes."""

from .mutant import mutant

MUTANTS = (
    mutant(
        45,
        "the end of one router's stream ends all routers' requests",
        "routers.py::test_of_two_routers_the_death_of_one_touches_the_other_in_nothing",
        (
            "worker:Routes.cancel_all",
            """
            for handle in tuple(link.requests):
                self.cancel(link, handle, None, engine)
            """,
            """
            for route in tuple(self._routes.values()):
                self.cancel(route.link, route.handle, None, engine)
            """,
        ),
    ),
    mutant(
        46,
        "a router that ends does not wait for its streams",
        "routers.py::test_a_router_told_to_end_finishes_its_streams_first",
        ("router:RouterServer._drain", "await registry.until_idle()", "None"),
    ),
    mutant(
        46,
        "a router that ends does not say so",
        "routers.py::test_a_router_told_to_end_finishes_its_streams_first",
        ("router:RouterServer._drain", "await health_service.enter_graceful_shutdown()", "None"),
    ),
    mutant(
        47,
        "an id that runs may run again",
        "routers.py::test_one_id_twice_is_refused_by_one_router_and_never_mixed_by_two",
        ("router:RequestRegistry.hold", "key in self._records", "False"),
    ),
    mutant(
        47,
        "a worker knows requests by their clients' ids",
        "routers.py::test_one_id_twice_is_refused_by_one_router_and_never_mixed_by_two",
        (
            "worker:Routes.add",
            "route.link.requests[route.handle] = request_id",
            """
            for key, other in tuple(self._routes.items()):
                if other.request_id == route.request_id:
                    self._routes[key] = Route(route.link, route.handle, "")
            route.link.requests[route.handle] = request_id
            """,
        ),
    ),
    mutant(
        48,
        "a worker's deadlines are of the wall clock",
        "machine.py::test_a_wall_clock_that_jumps_changes_nothing",
        ("worker:Engine.__init__", "time.monotonic", "time.time"),
    ),
    mutant(
        48,
        "silence is measured by the wall clock",
        "machine.py::test_a_wall_clock_that_jumps_changes_nothing",
        ("router:EngineLink.__init__", "time.monotonic", "time.time"),
        ("router:Fleet.__init__", "time.monotonic", "time.time"),
    ),
    mutant(
        49,
        "a worker cannot do without its map's folder",
        "machine.py::test_a_full_disk_and_a_folder_that_is_gone_fail_no_request",
        ("worker:WorkerServer._write_pool_map", "OSError", "FileExistsError"),
    ),
    mutant(
        83,
        "an unfinished line stays in a file of answers",
        "batches.py::test_a_batch_whose_router_is_killed_again_and_again_answers_each_line_once",
        ("router:_AnswerFile.__init__", "os.ftruncate(self._descriptor, self._num_bytes)", "None"),
    ),
    mutant(
        83,
        "a router that starts does not know which lines have an answer",
        "batches.py::test_a_batch_whose_router_is_killed_again_and_again_answers_each_line_once",
        ("router:_AnswerFile._read", "self.custom_ids.add(custom_id)", "None"),
    ),
    mutant(
        84,
        "two routers run the batches of a folder",
        "batches.py::test_another_router_of_the_folder_goes_on_with_a_batch",
        ("router:Store.become_owner", "fcntl.LOCK_EX", "fcntl.LOCK_SH"),
    ),
    mutant(
        85,
        "a router takes its own pause for the workers' silence",
        "routers.py::test_a_router_that_stands_still_for_seconds_moves_no_request",
        ("router:EngineLink._watch", "self._clock() - now - left_seconds > PAUSE_SECONDS", "False"),
    ),
)
