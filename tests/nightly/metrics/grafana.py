"""Stand-in for Grafana, which no package registry has: it reports that it is healthy, and nothing else."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"database": "ok"}).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def healthy_grafana() -> Iterator[str]:
    """Its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Health)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
