"""What compute-sanitizer's output is taken for (test/sanitize.py), and that it has tests to run."""

import subprocess
import sys

import pytest
import sanitize

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at rows_kernel+0x1a0 in kernels.py:34
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f0000000200 is out of bounds
=========         Host Frame: launch at somewhere+0x12
========= Invalid __global__ write of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)+0x50
=========     by thread (1,0,0) in block (0,0,0)
2 failed, 30 passed, 3 skipped in 12.34s
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel_cutlass___call___RowKernel_0+0x90 in kernels.py:9
=========     and Read access at kernel_cutlass___call___RowKernel_0+0xa0 in kernels.py:9 [4 hazards]
12 passed in 3.00s
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at gemvx::kernel<int, float>(T1)+0x1200
========= Uninitialized __global__ memory read of size 4 bytes
=========     at gemvx::kernel<int, float>(T1)+0x1210
========= Uninitialized __global__ memory read of size 4 bytes
=========     at row_grad_kernel+0x10
7 passed in 1.00s
========= ERROR SUMMARY: 3 errors
"""
CLEAN = "5 passed in 2.00s\n========= ERROR SUMMARY: 0 errors\n"
LOST = "1 passed in 1.00s\n========= ERROR SUMMARY: 4 errors (4 were not printed)\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (MEMCHECK, (30, 2, 1, {"void at::native::vectorized_elementwise_kernel": 1})),
        (RACECHECK, (12, 0, 1, {})),
        (INITCHECK, (7, 0, 1, {"gemvx::kernel": 2})),
        (CLEAN, (5, 0, 0, {})),
        (LOST, (1, 0, 4, {})),  # what has no name is taken for ours
    ],
    ids=["memcheck", "racecheck", "initcheck", "clean", "lost"],
)
def test_output_is_read(output, expected):
    found = sanitize.parsed(output)
    assert (found.passed, found.failed, found.errors, dict(found.elsewhere)) == expected


def test_a_tool_that_says_nothing_is_an_error():
    with pytest.raises(ValueError, match="said nothing"):
        sanitize.parsed("12 passed in 3.00s\n")


def test_there_are_tests_of_every_gpu_backend_to_run():
    command = ("-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-k", sanitize.SELECTED, *sanitize.TESTS)
    listed = subprocess.run([sys.executable, *command], cwd=sanitize.ROOT, capture_output=True, text=True, check=True).stdout
    for subject in ("ce-triton-cuda", "ce-cutedsl-cuda", "flce-triton-cuda", "flce-cutedsl-cuda"):
        assert listed.count(subject) >= 4, listed
    assert "in_place_writes" in listed
    assert len(listed.splitlines()) < 40, "small enough for a tool that slows everything down"
