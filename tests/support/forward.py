"""A port on the loopback in front of a Unix socket."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class _Handler(socketserver.BaseRequestHandler):
    server: "_Forward"

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as behind:
            behind.connect(str(self.server.path))
            back = threading.Thread(target=_pump, args=(behind, self.request), daemon=True)
            back.start()
            _pump(self.request, behind)
            back.join()


class _Forward(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.path = path


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until one end closes, then say so to the other."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return


@contextmanager
def forwarding(path: Path) -> Iterator[str]:
    """The URL behind which the socket answers."""
    with _Forward(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
