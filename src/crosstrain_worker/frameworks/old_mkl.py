"""Intel's MKL before 2020, which some frameworks bring along: on AMD's CPUs it takes its slowest code unless it is told otherwise."""

import os


def take_avx2_on_amd():
    """Before that MKL is loaded: 5 asks for the code of AVX2, 2.5 to 3 times as fast there. What the user has set stays."""
    if amd_with_avx2():
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")


def amd_with_avx2():
    """True on a CPU of AMD that has AVX2, by /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo") as source:
            first = source.read().split("\n\n")[0]
    except (IOError, OSError):
        return False
    return "AuthenticAMD" in first and " avx2 " in first
