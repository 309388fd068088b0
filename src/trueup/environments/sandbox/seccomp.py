"""System calls that a sandboxed program may not make, as a compiled filter.

Namespaces already take away files, processes and network. The filter closes what they leave open:
sockets that ignore the network namespace (vsock, netlink, kernel crypto), memory that no file
system's size bounds, and kernel interfaces with a history of escapes.
"""

from __future__ import annotations

import errno
import functools
import socket
import tempfile

_DENIED = (
    # memory beyond the sized file systems
    "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open",
    # tracing, other processes' memory, kernel keyrings
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd",
    "keyctl", "add_key", "request_key",
    # large kernel interfaces
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "fanotify_init", "name_to_handle_at", "open_by_handle_at",
    # namespaces and mounts
    "unshare", "setns", "mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen",
    "fsmount", "fsconfig", "mount_setattr",
    # the machine
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot",
    "swapon", "swapoff", "acct", "quotactl", "syslog",
)  # fmt: skip


@functools.cache
def bpf_filter() -> bytes | None:
    """The filter as a BPF program for `bwrap --seccomp`; None without pyseccomp or libseccomp."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError):  # RuntimeError: the binding is there, the library is not
        return None
    filter_ = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(errno.EPERM)
    for name in _DENIED:
        filter_.add_rule(refuse, name)
    filter_.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.NE, int(socket.AF_UNIX)))
    with tempfile.TemporaryFile() as file:
        filter_.export_bpf(file)
        file.seek(0)
        return file.read()
