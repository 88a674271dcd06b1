"""The chaos proxy does to a connection what it says."""

import socket

import pytest

from .chaos_proxy import ChaosProxyThread


def test_bytes_pass_until_a_black_hole_and_its_healing_resets_who_spoke_in_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with ChaosProxyThread(f"{host}:{port}") as proxy:
            address = ("127.0.0.1", int(proxy.address.rpartition(":")[2]))
            with socket.create_connection(address, 60.0) as client:
                served, _ = server.accept()
                client.sendall(b"hello")
                assert served.recv(5) == b"hello"
                assert (proxy.num_accepted, proxy.num_open) == (1, 1)
                proxy.black_hole()
                served.sendall(b"lost")
                client.settimeout(0.15)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                proxy.heal()
                client.settimeout(60.0)
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
                served.close()
