"""Real servers, one of each version for the whole session."""

import pytest

from tests.sglang.install import is_installed
from tests.sglang.model import write_model
from tests.sglang.servers import VERSIONS, start_server


def pytest_collection_modifyitems(items):
    """Without SGLang its tests skip; all of them are slow."""
    here = [item for item in items if item.path.parent.name == "sglang"]
    for item in here:
        item.add_marker(pytest.mark.slow)
        if not is_installed():
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: run `make sglang`"))


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory):
    """What all shared servers serve: see model.py."""
    return write_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def sglang_server(sglang_model, tmp_path_factory):
    """A function that gives the running server of a version; it is started when first asked for."""
    servers = {}

    def server(version):
        if version not in servers:
            log_file = tmp_path_factory.mktemp("log") / f"{version}.log"
            servers[version] = start_server(version, sglang_model, log_file)
        return servers[version]

    yield server
    for process in servers.values():
        process.stop(1.0)


@pytest.fixture(params=VERSIONS)
def server(request, sglang_server):
    """The running server of each version."""
    return sglang_server(request.param)
