"""Tells whether an address is loopback, which only this machine can reach, or covers all interfaces. Pure.

Names are not looked up: but for `localhost`, a name does not count as loopback.
"""

from ipaddress import ip_address

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a host without port is loopback. Brackets around an IPv6 address do no harm."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(without_brackets(host)).is_loopback
    except ValueError:
        return False


def is_every_interface(host: str) -> bool:
    """Return whether a server bound to this host is reached by any address of its machine, as with :: or no host."""
    try:
        return not host or ip_address(without_brackets(host)).is_unspecified
    except ValueError:
        return False


def without_brackets(host: str) -> str:
    """Return the host as sockets take it: an IPv6 address has no brackets."""
    return host.removeprefix("[").removesuffix("]")


def with_brackets(host: str) -> str:
    """Return the host as addresses with a port have it: an IPv6 address is in brackets."""
    return f"[{without_brackets(host)}]" if ":" in host else host


def host_of(address: str) -> str:
    """Return the host of "host:port", also as gRPC writes it ("ipv4:127.0.0.1:50051", "dns:///localhost:50051")."""
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    return address.rpartition(":")[0] or address
