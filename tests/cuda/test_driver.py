"""The stand-in driver under the real cuda.bindings: it runs kernels, and notices what a GPU would only now and then."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu
from driver import fake_gpu
from emulator import PLUGINS, SIMT
from test_emulator import FaultParams, kernel

from llmc.compiler.cuda.nvrtc import compile_kernels

KERNELS = [kernel(case) for case in (0, 11, 16)]


def check(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, cu.cuGetErrorName(result[0])[1]
    return result[1] if len(result) > 1 else None


def status(result: tuple[Any, ...]) -> int:
    return int(result[0])


class Device:
    """What the tests need of a device."""

    def __init__(self, arch: str = "sm_90") -> None:
        check(cu.cuInit(0))
        check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(0))))))
        self.stream = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.images = compile_kernels(KERNELS, arch, folders=(PLUGINS, SIMT))
        self.x, self.table = (int(check(cu.cuMemAlloc(256))) for _ in range(2))

    def function(self, case: int) -> Any:
        module = check(cu.cuModuleLoadData(self.images[f"fault_{case}"]))
        return check(cu.cuModuleGetFunction(module, f"fault_{case}".encode()))

    def put(self, address: int, array: np.ndarray) -> None:
        self.source = array  # the copy reads it when it runs
        check(cu.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.stream))

    def launch(self, function: Any, shared: int = 256) -> int:
        params = FaultParams(self.x, self.table)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        sizes = (1, 1, 1, 64, 1, 1)
        return status(cu.cuLaunchKernel(function, *sizes, shared, self.stream, ctypes.addressof(pointers), 0))

    def read(self) -> tuple[int, np.ndarray]:
        out = np.zeros(64, np.int32)
        return status(cu.cuMemcpyDtoH(out.ctypes.data, self.x, 256)), out


@pytest.fixture
def gpu() -> Iterator[None]:
    with fake_gpu(KERNELS):
        yield


@pytest.mark.parametrize(("capability", "arch"), [(80, "sm_80"), (89, "sm_80"), (90, "sm_90"), (120, "sm_120")])
def test_a_kernel_runs_when_something_waits_for_it(capability: int, arch: str) -> None:
    with fake_gpu(KERNELS, capability=capability):
        device = Device(arch)
        device.put(device.table, np.arange(64, dtype=np.int32))
        assert device.launch(device.function(16)) == 0
        assert (device.read()[1] == -1).all(), "the stream of the copy does not wait for that of the kernel"
        check(cu.cuStreamSynchronize(device.stream))
        np.testing.assert_array_equal(device.read()[1], np.arange(64))


def test_a_cubin_of_another_chip_is_refused() -> None:
    with fake_gpu(KERNELS, capability=80):
        device = Device("sm_90")
        assert status(cu.cuModuleLoadData(device.images["fault_0"])) == 209
        assert status(cu.cuModuleLoadData(b"no cubin" * 20)) == 200


def test_a_kernel_that_is_not_in_the_module_is_not_found(gpu: None) -> None:
    device = Device()
    module = check(cu.cuModuleLoadData(device.images["fault_0"]))
    assert status(cu.cuModuleGetFunction(module, b"fault_16")) == 500


def test_much_shared_memory_needs_the_attribute(gpu: None) -> None:
    device = Device()
    function, which = device.function(0), cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert device.launch(function, 50 * 1024) == 1
    assert status(cu.cuFuncSetAttribute(function, which, 228 * 1024)) == 1
    check(cu.cuFuncSetAttribute(function, which, 50 * 1024))
    assert device.launch(function, 50 * 1024) == 0


def test_a_fault_of_a_kernel_stays(gpu: None, capfd: pytest.CaptureFixture[str]) -> None:
    device = Device()
    assert device.launch(device.function(11)) == 0
    assert status(cu.cuStreamSynchronize(device.stream)) == 700
    assert device.read()[0] == 700
    assert "[bounds] fault_11" in capfd.readouterr().err


def test_an_upload_from_pageable_memory_is_not_there_for_other_streams(gpu: None) -> None:
    device = Device()
    table = np.arange(64, dtype=np.int32)
    check(cu.cuMemcpyHtoD(device.table, table.ctypes.data, 256))
    device.launch(device.function(16))
    check(cu.cuStreamSynchronize(device.stream))
    assert (device.read()[1] == -1).all()


def test_a_graph_replays_what_was_captured_with_its_parameters(gpu: None) -> None:
    device, mode = Device(), cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    function = device.function(16)
    check(cu.cuStreamBeginCapture(device.stream, mode))
    assert device.launch(function) == 0
    assert status(cu.cuStreamSynchronize(device.stream)) == 900
    assert status(cu.cuMemAlloc(16)) == 900
    assert device.read()[0] == 906
    graph = check(cu.cuStreamEndCapture(device.stream))
    executable = check(cu.cuGraphInstantiate(graph, 0))
    check(cu.cuGraphDestroy(graph))
    for start in (5, 70):
        table = np.arange(start, start + 64, dtype=np.int32)
        device.put(device.table, table)
        check(cu.cuGraphLaunch(executable, device.stream))
        check(cu.cuStreamSynchronize(device.stream))
        np.testing.assert_array_equal(device.read()[1], table)


def test_memory_ends_and_wild_copies_are_refused() -> None:
    with fake_gpu(KERNELS, memory=1 << 20):
        device = Device()
        assert status(cu.cuMemAlloc(2 << 20)) == 2
        assert cu.cuMemGetInfo()[1:] == ((1 << 20) - 512, 1 << 20)
        out = np.zeros(100, np.int32)
        assert status(cu.cuMemcpyDtoH(out.ctypes.data, device.x, 400)) == 1


def test_no_device_and_the_version_of_the_driver() -> None:
    with fake_gpu([], devices=0):
        assert status(cu.cuInit(0)) == 100
    with fake_gpu([], driver=12040):
        check(cu.cuInit(0))
        assert check(cu.cuDriverGetVersion()) == 12040


def test_events_and_host_functions_come_in_order(gpu: None) -> None:
    device = Device()
    event, other = check(cu.cuEventCreate(0)), check(cu.cuStreamCreate(1))
    device.put(device.table, np.arange(64, dtype=np.int32))
    device.launch(device.function(16))
    check(cu.cuEventRecord(event, device.stream))
    check(cu.cuStreamWaitEvent(other, event, 0))
    out = np.zeros(64, np.int32)
    check(cu.cuMemcpyDtoHAsync(out.ctypes.data, device.x, 256, other))
    assert (out == 0).all()
    check(cu.cuStreamSynchronize(other))
    np.testing.assert_array_equal(out, np.arange(64))
    assert status(cu.cuEventQuery(event)) == 0
