"""Ports: free ones, and none twice on one machine."""

import dataclasses
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import EngineError
from slime.ray.ports import DIST_INIT_PORTS, FIRST_PORT, PortBook, first_free, is_free, own_address


def machine(taken):
    """The probe of a machine where these ports are taken."""

    def probe(start, count):
        port = start
        while any(port + offset in taken for offset in range(count)):
            port += 1
        return port if port + count <= 15300 else None

    return probe


requests = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 9)), max_size=20)


@given(st.sets(st.integers(15000, 15100)), requests)
def test_what_is_given_out_is_free_and_disjoint_on_each_machine(taken, wanted):
    book, given_out = PortBook(), {"a": [], "b": []}
    for name, count in wanted:
        port = book.take(name, count, machine(taken))
        given_out[name] += range(port, port + count)
    for ports in given_out.values():
        assert len(ports) == len(set(ports))
        assert not set(ports) & taken
        assert all(port >= FIRST_PORT for port in ports)


def test_engines_of_two_machines_may_have_the_same_ports_and_those_of_one_have_none():
    book = PortBook()
    ours, neighbour, other = (book.engine(name, machine(set()), data_parallel=2) for name in "aab")
    assert ours == other

    def all_of(ports):
        single = {value for name, value in dataclasses.asdict(ports).items() if name != "dist_init"}
        return single | set(range(ports.dist_init, ports.dist_init + DIST_INIT_PORTS + 2))

    assert len(all_of(ours)) == 3 + DIST_INIT_PORTS + 2
    assert not all_of(ours) & all_of(neighbour)


def test_a_machine_without_ports_is_named():
    book = PortBook(first=15290)
    with pytest.raises(EngineError, match="machine 10.0.0.9: has no 20 free ports in a row from 15290"):
        book.take("10.0.0.9", 20, machine(set()))


def test_engines_that_start_at_once_share_no_port():
    book, found, gate = PortBook(), [], threading.Barrier(8)

    def take():
        gate.wait()
        found.append(book.take("a", 3, machine(set())))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [15000 + 3 * number for number in range(8)]


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_with_a_listener_is_not_free_and_a_range_around_it_is_skipped(address):
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        found = first_free(port - 2, 4)
        assert found is None or found > port or found + 4 <= port
    assert is_free(port)


def test_a_port_of_an_ended_server_is_free_though_its_connections_linger():
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    connection, _ = server.accept()
    connection.close()
    server.close()
    client.close()
    assert is_free(port)


def test_there_is_no_port_beyond_the_last():
    assert first_free(65530, 10) is None


def test_the_own_address_can_be_listened_on():
    with socket.create_server((own_address(), 0)):
        pass
