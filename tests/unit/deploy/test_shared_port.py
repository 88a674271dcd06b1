"""The port that a cluster's routers share belongs to no other process."""

import socket

import pytest
from blockyard.deploy.machine.shared_port import reserved_port
from blockyard.deploy.settings.wanted_cluster import UpOptions
from blockyard.deploy.supervision.replicas import Replica, router_config
from blockyard.router.config import RouterConfig
from blockyard.worker.config import EngineConfig

HOST = "127.0.0.1"


def test_a_port_is_held_until_those_who_share_it_listen() -> None:
    with reserved_port(HOST, 0) as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, port))
        sharers = [socket.create_server((HOST, port), reuse_port=True) for _ in range(2)]
    for sharer in sharers:
        sharer.close()


@pytest.mark.parametrize("shares", [True, False])
def test_a_port_that_somebody_listens_on_is_refused_even_if_he_would_share_it(shares: bool) -> None:
    with socket.create_server((HOST, 0), reuse_port=shares) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"share port {port}"), reserved_port(HOST, port):
            pass


def test_a_port_that_was_just_in_use_is_free() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    with reserved_port(HOST, port) as reserved:
        assert reserved == port


def test_ports_side_by_side_end_where_ports_end() -> None:
    engine = EngineConfig(model="m")
    with pytest.raises(
        ValueError, match=r"3 routers .* from 65534 on would need ports up to 65536: 65535 is the"
    ):
        UpOptions(engine=engine, num_routers=3, separate_ports=True, router_port=65534)
    UpOptions(engine=engine, num_routers=2, separate_ports=True, router_port=65534)
    UpOptions(engine=engine, num_routers=3, separate_ports=True)
    UpOptions(engine=engine, num_routers=3, router_port=65535)


@pytest.mark.parametrize(
    ("port", "reuse_port", "address", "expected"),
    [
        (7000, True, "", 7000),
        (7000, False, "", 7002),
        (0, False, "", 0),
        (7000, False, "127.0.0.1:7002", 7002),
        (0, False, "127.0.0.1:4321", 4321),
        (7000, True, "127.0.0.1:7000", 7000),
    ],
)
def test_routers_share_a_port_or_stand_side_by_side_and_come_back_where_they_were(
    port: int, reuse_port: bool, address: str, expected: int
) -> None:
    replica = Replica(name="router-2", kind="router", address=address)
    router = RouterConfig(model="m", port=port, reuse_port=reuse_port)
    assert (router_config(router, replica).port, router_config(router, replica).http_port) == (expected, None)
    replica = Replica(name="router-2", kind="router", address="127.0.0.1:1", http_address=address)
    gateway = RouterConfig(model="m", http_port=port, reuse_port=reuse_port)
    assert router_config(gateway, replica).http_port == expected
