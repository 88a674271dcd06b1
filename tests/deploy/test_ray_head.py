"""A head comes up beside another one: ports that are taken are left alone."""

import socket
from contextlib import suppress

from blockyard.deploy.ray_head import DASHBOARD_PORT, _dashboard_port


def test_the_dashboard_moves_where_its_port_is_taken() -> None:
    with socket.socket() as occupant:
        occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of a dashboard
        with suppress(OSError):  # taken by somebody else: as good
            occupant.bind(("127.0.0.1", DASHBOARD_PORT))
            occupant.listen()
        assert _dashboard_port() != DASHBOARD_PORT
