"""Mutants of rows 44 to 49: routers, and what the machine does to processes."""

from .mutant import mutant

MUTANTS = (
    mutant(
        45,
        "the end of one router's stream ends all routers' requests",
        "routers.py::test_of_two_routers_the_death_of_one_touches_the_other_in_nothing",
        (
            "worker/session.py",
            "        for handle in tuple(link.requests):\n            self._cancel(link, handle, None, engine)\n",
            "        for key, route in tuple(self._routes.items()):\n"
            "            self._cancel(route.link, route.handle, None, engine)\n",
        ),
    ),
    mutant(
        46,
        "a router that ends does not wait for its streams",
        "routers.py::test_a_router_told_to_end_finishes_its_streams_first",
        ("router/server.py", "                await parts.registry.until_idle()\n", "                pass\n"),
    ),
    mutant(
        46,
        "a router that ends does not say so",
        "routers.py::test_a_router_told_to_end_finishes_its_streams_first",
        ("router/server.py", "        await health_service.enter_graceful_shutdown()\n", ""),
    ),
    mutant(
        47,
        "an id that runs may run again",
        "routers.py::test_one_id_twice_is_refused_by_one_router_and_never_mixed_by_two",
        (
            "router/requests.py",
            "        if key in self._records:\n            raise DuplicateRequest",
            "        if False:\n            raise DuplicateRequest",
        ),
    ),
    mutant(
        47,
        "a worker knows requests by their clients' ids",
        "routers.py::test_one_id_twice_is_refused_by_one_router_and_never_mixed_by_two",
        (
            "worker/session.py",
            "        link.requests[submit.handle] = request_id\n",
            "        for key, route in tuple(self._routes.items()):\n"
            "            if route.request_id == submit.request_id: self._routes[key] = Route(link, submit.handle, '')\n"
            "        link.requests[submit.handle] = request_id\n",
        ),
    ),
    mutant(
        48,
        "a worker's deadlines are of the wall clock",
        "machine.py::test_a_wall_clock_that_jumps_changes_nothing",
        (
            "worker/engine.py",
            "        clock: Callable[[], float] = time.monotonic,\n",
            "        clock: Callable[[], float] = time.time,\n",
        ),
    ),
    mutant(
        48,
        "silence is measured by the wall clock",
        "machine.py::test_a_wall_clock_that_jumps_changes_nothing",
        (
            "router/engine_link.py",
            "        clock: Callable[[], float] = time.monotonic,\n",
            "        clock: Callable[[], float] = time.time,\n",
        ),
        (
            "router/fleet.py",
            "        clock: Callable[[], float] = time.monotonic,\n",
            "        clock: Callable[[], float] = time.time,\n",
        ),
    ),
    mutant(
        49,
        "a worker cannot do without its map's folder",
        "machine.py::test_a_full_disk_and_a_folder_that_is_gone_fail_no_request",
        (
            "worker/server.py",
            "            except OSError as error:\n                if not complained:",
            "            except FileExistsError as error:\n                if not complained:",
        ),
    ),
)
