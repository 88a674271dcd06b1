"""Load a checkpoint on the CPU, make its decoder, and print the peak memory of that. Run by test_weights.

It runs in a process of its own, because memory left by other tests would hide a second copy. Only private memory
counts: the file is mapped, and the system can drop its page cache at any time.
"""

import sys
import threading
from pathlib import Path

import torch
from blockyard.kernels.selection import choose_backend
from blockyard.worker.model.config import load_config
from blockyard.worker.model.decoder import Decoder
from blockyard.worker.model.weights import load_weights

SAMPLE_SECONDS = 0.001
CPU = torch.device("cpu")


def private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


class PeakMemory(threading.Thread):
    """Samples until it is stopped: a second copy would be there for far longer than a sample."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self.most_bytes = max(self.most_bytes, private_bytes())

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return max(self.most_bytes, private_bytes())


def main(folder: Path) -> None:
    config, backend = load_config(folder), choose_backend(CPU)
    # Whatever the first use of each operation costs once.
    backend.linear(torch.ones(1, 512), backend.pack_linear(torch.ones(512, 512)))
    before = private_bytes()
    peak = PeakMemory()
    peak.start()
    weights = load_weights(folder, config, dtype=torch.float32, device=CPU)
    loaded = private_bytes() - before
    decoder = Decoder(config, weights, backend)
    print(loaded, peak.stop() - before, private_bytes() - before)
    del decoder


if __name__ == "__main__":
    main(Path(sys.argv[1]))
