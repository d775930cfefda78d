"""A bare HTTP client for tests: what goes over the wire, and nothing else."""

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from slime.utils.engine_answers import loads_of

POOL = ThreadPoolExecutor(16)
JSON = {"Content-Type": "application/json"}


def call(url, path, body=None, method=None, timeout=60):
    """Status and answer (parsed where it is JSON). A body that is bytes goes as it is."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    request = urllib.request.Request(url + path, data, JSON, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return _read(response.status, response)
    except urllib.error.HTTPError as error:
        with error:
            return _read(error.code, error)


def ok(url, path, body=None, **options):
    """The answer of a call that must succeed."""
    status, answer = call(url, path, body, **options)
    assert status == 200, answer
    return answer


def later(url, path, body):
    """`ok` on a thread: a future."""
    return POOL.submit(ok, url, path, body)


def events(url, path, body):
    """The `data:` payloads of a stream, as text."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().decode().split("\n\n")
    assert lines[-1] == ""
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [line.removeprefix("data: ") for line in lines[:-1]]


def send_and_hang_up(url, path, body, until):
    """Send a request, wait until `until()` is true, and close the connection without reading."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    connection.request("POST", path, json.dumps(body).encode(), JSON)
    wait_for(until)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def wait_for(condition, seconds=20):
    """Poll until `condition()` is true; fails when it never is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def load(url):
    """The one entry of /v1/loads, or of what older servers have instead."""
    status, answer = call(url, "/v1/loads")
    return loads_of(answer if status == 200 else ok(url, "/get_load"))[0]


def running(url):
    """Requests that run."""
    return load(url)["num_running_reqs"]


def _read(status, response):
    content = response.read()
    is_json = response.headers.get_content_type() == "application/json"
    return status, json.loads(content) if is_json else content.decode()
