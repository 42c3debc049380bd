"""The processor time slice of a thread, read back from the kernel."""

import ctypes
import os
import platform
import struct
import sys
import threading
from typing import Any

import pytest

from loadgen.drive.shard import request_short_slices

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def time_slice_s():
    """The slice of the calling thread: `sched_runtime` (u64, ns) of sched_attr, at offset 24."""
    attributes = ctypes.create_string_buffer(48)
    number = SCHED_GETATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 48, 0) == 0
    return struct.unpack_from("=Q", attributes.raw, 24)[0] * 1e-9


def release():
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(
    sys.platform != "linux" or release() < (6, 12), reason="Linux sets slices per thread from 6.12"
)
def test_a_thread_gets_short_slices_by_request_and_other_threads_keep_theirs():
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("this process has a scheduling policy of its own")
    before_s, values = time_slice_s(), list[Any]()

    def request():
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        request_short_slices()
        values.extend([time_slice_s(), os.getpriority(os.PRIO_PROCESS, 0) == nice])

    thread = threading.Thread(target=request)
    thread.start()
    thread.join()
    assert values == [pytest.approx(100e-6), True]
    assert time_slice_s() == before_s


@pytest.mark.skipif(sys.platform != "linux", reason="policies of Linux")
def test_a_policy_that_was_chosen_is_kept():
    values: list[Any] = []

    def request():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before_s = time_slice_s()
        request_short_slices()
        values.extend([os.sched_getscheduler(0), time_slice_s() == before_s])

    thread = threading.Thread(target=request)
    thread.start()
    thread.join()
    assert values == [os.SCHED_BATCH, True]
