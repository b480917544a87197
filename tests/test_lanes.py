"""Work in lanes: in order within each, on as many cores as torch may use, and with the first error."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
import torch

import glu_probe as gp
from glu_probe.lanes import LANES, every_core, in_lanes, only_lanes

from .support import random_layer


@pytest.fixture(params=[1, 2, 5, 20])
def threads(request):
    """So many cores for torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_a_lane_takes_its_items_in_order(threads):
    taken: dict[int, list[int]] = {lane: [] for lane in range(LANES)}
    running = set()

    def work(lane: int, item: int) -> None:
        assert lane not in running
        running.add(lane)
        time.sleep(0.0005 * (item % 3))
        taken[lane].append(item)
        running.remove(lane)

    in_lanes(work, iter(range(100)))
    assert taken == {lane: list(range(lane, 100, LANES)) for lane in range(LANES)}


def test_as_many_cores_as_torch_may_use(threads):
    """Each is kept until all are there, or would be; within, torch has one."""
    most = min(threads, LANES)
    gate, seen = threading.Barrier(most), set()

    def work(_lane: int, _item: int) -> None:
        gate.wait(timeout=30)
        seen.add(threading.get_ident())
        assert torch.get_num_threads() == 1

    in_lanes(work, range(most * 4))
    assert len(seen) == most
    assert torch.get_num_threads() == threads


def test_items_are_taken_as_there_is_a_core_for_them(threads):
    """What they hold has to fit into memory."""
    taken, done, lock = 0, 0, threading.Lock()

    def items():
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield taken

    def work(_lane: int, _item: int) -> None:
        nonlocal done
        with lock:
            assert taken - done <= min(threads, LANES) + 2
            done += 1

    in_lanes(work, items())
    assert taken == 50


def test_the_first_error_comes_out_and_nothing_goes_on(threads):
    begun = []

    def work(_lane: int, item: int) -> None:
        begun.append(item)
        if item in (5, 6):
            time.sleep(0.01 if item == 5 else 0)
            raise ValueError(item)

    with pytest.raises(ValueError, match="5"):
        in_lanes(work, range(1000))
    count = len(begun)
    assert count < 40
    time.sleep(0.02)
    assert len(begun) == count
    in_lanes(lambda _lane, _item: None, range(20))  # the pool has survived


def test_an_error_of_the_items_comes_out_too(threads):
    def items():
        yield 1
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        in_lanes(lambda _lane, _item: None, items())


def test_only_lanes_have_several_cores(threads):
    inside = set()
    with only_lanes():
        assert torch.get_num_threads() == 1
        in_lanes(lambda _lane, _item: (time.sleep(0.002), inside.add(threading.get_ident())), range(64))
        with every_core():
            assert torch.get_num_threads() == threads
            with only_lanes():
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    assert (len(inside) > 1) == (threads > 1)


def test_other_threads_keep_their_cores(threads):
    """A notebook's own thread is not slowed down by one that measures."""
    seen = []
    with only_lanes():
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [threads]


@pytest.mark.parametrize("exact", [False, True])
def test_the_number_of_cores_changes_no_bit(exact):
    layer, before, found = random_layer(d_mlp=3000, d_model=40), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found.append(gp.measure_layer(layer, exact=exact))
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        assert all((one.neurons[name] == found[0].neurons[name]).all() for name in one.neurons if name != "class")
        # eigenvalue problems and large products are torch's, and differ in their last bits
        assert one.scalars == (pytest.approx(found[0].scalars, rel=1e-12, nan_ok=True) if exact else found[0].scalars)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        in_lanes(lambda _lane, _item: None, range(10))
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply_async(_lanes_in_child).get(timeout=60) == 10
    finally:
        torch.set_num_threads(before)


def _lanes_in_child() -> int:
    done = []
    torch.set_num_threads(2)
    in_lanes(lambda _lane, item: done.append(item), range(10))
    return len(done)
