"""`python -m bench.transfer_paths`: CPU time of a transfer between two processes of one machine, by path.

Both processes run the code of worker/transfer/ over blocks of Qwen3-0.6B. The first transfer of each path warms up. The
last rows tell what is in them: checksums, and the one copy that shared memory would need.
"""

import argparse
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable

import torch
from blockyard.proto.security.peer_sockets import SESSION_NAME, peer_contexts
from blockyard.proto.v1.session_pb2 import PullRequest
from blockyard.worker.memory.checksums import crc32
from blockyard.worker.memory.host_blocks import HostBlocks
from blockyard.worker.memory.transferable import TorchMemory
from blockyard.worker.sequences.identifiers import BlockId, HostSlot
from blockyard.worker.simulated.memory import SIMULATED
from blockyard.worker.transfer.neighbours import Neighbours
from blockyard.worker.transfer.wire import Connection

LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_SIZE = 28, 8, 16, 128
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_SIZE * 2
NUM_BLOCKS = (100 << 20) // BLOCK_BYTES
PATIENCE_SECONDS = 120.0
PATHS = ("TCP with TLS", "TCP", "Unix socket")
CONTEXT = peer_contexts(None, secret="bench", cluster="bench")
assert CONTEXT is not None


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory() -> TorchMemory:
    blocks_N2KPD = torch.ones((LAYERS * NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_SIZE), dtype=torch.bfloat16)
    return TorchMemory(blocks_N2KPD, LAYERS, HostBlocks(blocks_N2KPD, LAYERS, NUM_BLOCKS), SIMULATED)


def send(path: str, listener: socket.socket, rounds: int, report: int) -> None:
    """Send all blocks once a round, and write the CPU seconds of each round."""
    source = memory()
    sock, _ = listener.accept()
    if path == "TCP with TLS":
        assert CONTEXT is not None
        sock = CONTEXT(True).wrap_socket(sock, server_side=True)
    connection = Connection(sock)
    for _ in range(rounds):
        connection.deadline = time.monotonic() + PATIENCE_SECONDS
        connection.receive(PullRequest, 100)
        before = cpu_seconds()
        for block in range(NUM_BLOCKS):
            connection.send_block(block, source.block(BlockId(block)))
        os.write(report, f"{cpu_seconds() - before}\n".encode())


def receive(path: str, connect: Callable[[], socket.socket], rounds: int) -> list[float]:
    """Return the CPU seconds of each round."""
    destination = memory()
    sock = connect()
    if path == "TCP with TLS":
        assert CONTEXT is not None
        sock = CONTEXT(False).wrap_socket(sock, server_hostname=SESSION_NAME)
    connection, seconds = Connection(sock), []
    connection.is_wanted = lambda: True
    for _ in range(rounds):
        connection.deadline = time.monotonic() + PATIENCE_SECONDS
        before = cpu_seconds()
        connection.send(PullRequest(trial_bytes=1))
        for block in range(NUM_BLOCKS):
            connection.receive_block(block, destination.slot(HostSlot(block)))
        seconds.append(cpu_seconds() - before)
    return seconds


def measure(path: str, rounds: int) -> tuple[float, float]:
    """Return the median CPU seconds of the source and of the destination."""
    neighbours = Neighbours("bench", "bench")
    incarnation = str(os.getpid())
    is_near = path == "Unix socket"
    listener = neighbours.listen(incarnation, 1) if is_near else socket.create_server(("127.0.0.1", 0))

    def connect() -> socket.socket:
        if not is_near:
            return socket.create_connection(listener.getsockname())
        sock = neighbours.connect(incarnation, 1, PATIENCE_SECONDS)
        assert sock is not None
        return sock

    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            send(path, listener, rounds, write)
        finally:
            os._exit(0)
    os.close(write)
    received = receive(path, connect, rounds)
    with os.fdopen(read) as report:
        sent = [float(line) for line in report]
    os.waitpid(child, 0)
    listener.close()
    return statistics.median(sent[1:]), statistics.median(received[1:])


def measure_alone(rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of a checksum of all blocks, and of a copy of them."""
    one, other = memory(), memory()

    def check() -> None:
        for block in range(NUM_BLOCKS):
            crc32(one.slot(HostSlot(block)))

    def copy() -> None:
        for block in range(NUM_BLOCKS):
            other.slot(HostSlot(block))[:] = one.slot(HostSlot(block))

    def seconds(run: Callable[[], None]) -> float:
        before = cpu_seconds()
        run()
        return cpu_seconds() - before

    return {
        "CRC-32, once": statistics.median([seconds(check) for _ in range(rounds + 1)][1:]),
        "one copy": statistics.median([seconds(copy) for _ in range(rounds + 1)][1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds: int = parser.parse_args().rounds + 1
    torch.set_num_threads(1)
    print(f"CPU ms for {NUM_BLOCKS} blocks of {BLOCK_BYTES:,} bytes (source, destination, sum)")
    for path in PATHS:
        sent, received = (1e3 * seconds for seconds in measure(path, rounds))
        print(f"{path:14} {sent:6.0f} {received:6.0f} {sent + received:6.0f}")
    for name, seconds in measure_alone(rounds).items():
        print(f"{name:14} {1e3 * seconds:20.0f}")


if __name__ == "__main__":
    main()
