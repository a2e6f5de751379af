"""The real SGLang package in this process, with the plugin loaded, on a machine without a GPU."""

from threading import Thread

import pytest
import stand_in_server

from nsa_backend.testing.process import start_process

start_process()


@pytest.fixture
def serving():
    """Returns a function that serves with a handler, in a thread of this process, and returns the port."""
    servers = []

    def start(handler: type[stand_in_server.Handler]) -> int:
        servers.append(stand_in_server.listening(0, handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1].server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
