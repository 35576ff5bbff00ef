"""The store in which the processes of one machine meet: a new one for each start of them."""

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from evenstep.cli.processes import loopback_rendezvous


def store_of(place):
    address = place.bootstrap_store_info
    return TCPStore(address.master_addr, address.master_port, is_master=False)


def test_processes_that_are_started_again_find_nothing_of_the_earlier_ones():
    parameters = RendezvousParameters(loopback_rendezvous.BACKEND, "", "run", 1, 1)
    handler = loopback_rendezvous._make(parameters)
    first = handler.next_rendezvous()
    assert store_of(first).add("met", 1) == 1
    assert store_of(first).add("met", 1) == 2
    second = handler.next_rendezvous()
    assert store_of(second).add("met", 1) == 1
    assert store_of(second).add("met", 1) == 2
