"""Whether an address stays on this machine, where nobody but its users can listen. Pure.

Names are not looked up: what is not known to be loopback is not.
"""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Of a host without port; brackets round an IPv6 address do no harm."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """Of "host:port", also as gRPC writes it ("ipv4:127.0.0.1:50051", "dns:///localhost:50051")."""
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    return address.rpartition(":")[0] or address
