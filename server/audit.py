"""`grout audit`: every place of the serving path that the ownership rules do not check (O9)."""

# What serving imports is what is audited.
import grout.engine  # noqa: F401
import server.serve  # noqa: F401
import tilert

__all__ = ["audit"]


def audit() -> int:
    """Print the opt-outs of everything that serving imports; returns 1 if a kernel is unsafe."""
    found = tilert.audit()
    for one in found:
        print(one)
    unsafe = sum(one.kind == "unsafe kernel" for one in found)
    print(f"{unsafe} unsafe kernels, {len(found) - unsafe} index proofs")
    return 1 if unsafe else 0
