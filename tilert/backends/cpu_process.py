"""Settings of the whole process that the cpu backend depends on."""

import ctypes
from functools import cache

from threadpoolctl import threadpool_limits

__all__ = ["prepare"]

# From malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# The largest that glibc takes for the second.
_MAPPED_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20
_ARENAS = 2


@cache
def prepare() -> None:
    """Sets BLAS to one thread, and the C allocator to keep what temporaries leave.

    Called once, when the first kernel is compiled for the cpu; users of NumPy in the same process
    are affected from then on:

    - `np.matmul` and the like use one core: the backend has threads of its own (`cpu_pool`). BLAS
      libraries have no setting for single calls, and one changed around every call would affect
      other threads all the same.
    - With glibc, up to 128 MiB that were freed stay with the process, and only arrays of 32 MiB and
      more are mapped one by one. By default a temporary of some hundred kilobytes goes back to the
      kernel when it is freed, and page faults for the next take longer than filling it.
    - With glibc, threads share two arenas. By default there are up to eight a core, and each keeps
      the most that its threads ever needed; Python's threads allocate one at a time anyway.
    """
    threadpool_limits(limits=1, user_api="blas")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # Not glibc.
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_ARENA_MAX, _ARENAS)
