"""Runs a program under the limits of deploy/systemd/quire@.service that need no systemd to be set: a read-only tree
with /dev/shm its only writable place, its list of system calls, no memory that is both written and run, no new
privileges.

usage: unshare -rm python3 confine.py PROGRAM ARGUMENT...   (exit code 77: this kernel or system lacks something)"""

import ctypes
import errno
import os
import re
import struct
import subprocess
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 22, 38, 65
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K


def lacking(what):
    print("skipped: " + what, file=sys.stderr)
    sys.exit(77)


def unit_filter():
    """The sets that SystemCallFilter= names."""
    unit = os.path.join(os.path.dirname(__file__), "../../deploy/systemd/quire@.service")
    with open(unit) as f:
        return re.search(r"^SystemCallFilter=(.*)$", f.read(), re.M).group(1).split()


def names_of(sets):
    """The calls in these sets, as this system's systemd knows them."""
    found = set()
    for one in sets:
        listed = subprocess.run(["systemd-analyze", "syscall-filter", one], capture_output=True, text=True)
        for line in listed.stdout.splitlines()[1:]:
            word = line.strip()
            if word.startswith("@"):
                found |= names_of([word])
            elif word and not word.startswith("#"):
                found.add(word)
    return found


def numbers():
    for path in ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"):
        if os.path.exists(path):
            with open(path) as f:
                return {n: int(v) for n, v in re.findall(r"#define __NR_(\w+)\s+(\d+)", f.read())}
    return lacking("the numbers of the system calls are not here (x86-64 with libc6-dev)")


def filter_set(names):
    known = numbers()
    program = struct.pack("HBBI", LOAD, 0, 0, 0)
    for name in sorted(names & known.keys()):
        program += struct.pack("HBBI", EQUAL, 0, 1, known[name]) + struct.pack("HBBI", RETURN, 0, 0, ALLOW)
    program += struct.pack("HBBI", RETURN, 0, 0, ERRNO | errno.EPERM)
    code = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)), 16)
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or LIBC.prctl(PR_SET_SECCOMP, 2, head):
        lacking("this kernel takes no filter of system calls: " + os.strerror(ctypes.get_errno()))


def main():
    names = names_of(unit_filter())
    if "read" not in names:
        lacking("no systemd-analyze that knows the sets of system calls")
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", "/dev/shm"],
        ["mount", "-o", "remount,bind,ro", "/"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lacking("no mounts in a namespace here: " + done.stderr.strip())
    if LIBC.prctl(PR_SET_MDWE, 1, 0, 0, 0):
        lacking("this kernel (before 6.3) cannot deny memory that is written and run")
    filter_set(names)
    try:
        with open("/quire-must-not-be", "w"):
            sys.exit("the tree can be written to")
    except OSError:
        os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
