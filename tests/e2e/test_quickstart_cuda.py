"""Which way to a CUDA compiler deploy/quickstart takes, with made-up drivers, toolkits and package indexes. Standard
library only; nothing is fetched."""

import os
import stat
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# What deploy/quickstart has when it calls cuda_choose; `driver` stands for what the host would say.
SHELL = """
set -euo pipefail
root=%(root)s cache=%(folder)s/cache
say() { printf '[%%s] %%s\\n' "$1" "$2"; }
die() { printf 'quickstart: %%s\\n' "$1" >&2; exit "${2:-1}"; }
packages_install() { echo "packages: $*"; }
. %(root)s/deploy/cuda
cuda_driver() { [ -n "%(driver)s" ] && echo "%(driver)s"; }
cuda_choose
printf 'flags: %%s\\n' "${cuda_flags[*]}"
"""

# A package installer that leaves what the wheels hold; QS_FAIL: it breaks half way.
PIP = """#!/bin/bash
echo "pip $*" >>"$QS_LOG"
while [ $# -gt 0 ]; do [ "$1" = --target ] && target=$2; shift; done
mkdir -p "$target/nvidia/cu13/bin" "$target/nvidia/cu13/lib"
[ -z "${QS_FAIL:-}" ] || exit 1
cd "$target/nvidia/cu13"
touch bin/nvcc lib/libcudart.so.13 lib/libcublasLt.so.13
"""


def program(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)


def read(path):
    with open(path) as f:
        return f.read()


class QuickstartCuda(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="quickstart-")
        self.folder = self.temporary.name
        self.log = os.path.join(self.folder, "pip.log")
        program(os.path.join(self.folder, "bin/python3"), PIP)

    def tearDown(self):
        self.temporary.cleanup()

    def choose(self, driver="", way="auto", nvcc=None, capability=None, **env):
        """(exit code, output) of cuda_choose on a host with that driver and an nvcc of that version."""
        hidden = "/nonexistent"
        if nvcc:
            hidden = os.path.join(self.folder, "toolkit/nvcc")
            program(hidden, "#!/bin/sh\necho 'Cuda compilation tools, release %s, V%s.1'\n" % (nvcc, nvcc))
        if capability:
            program(os.path.join(self.folder, "bin/nvidia-smi"), "#!/bin/sh\necho %s\n" % capability)
        script = SHELL % {"root": ROOT, "folder": self.folder, "driver": driver}
        environment = {
            "PATH": self.folder + "/bin:/usr/bin:/bin",
            "QS_LOG": self.log,
            "QUICKSTART_CUDA": way,
            "CUDACXX": hidden,
            **env,
        }
        if not nvcc:  # the toolkit of this very machine must not count
            script = script.replace("cuda_choose\n", "cuda_toolkit() { return 1; }\ncuda_choose\n", 1)
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def fetched(self):
        return len(read(self.log).splitlines()) if os.path.exists(self.log) else 0

    def test_no_driver(self):
        code, out = self.choose(nvcc="13.0")
        self.assertEqual((code, out), (0, "flags: -DQUIRE_CUDA=OFF\n"))

    def test_driver_and_toolkit(self):
        code, out = self.choose(driver="550", nvcc="12.4", capability="9.0")
        self.assertEqual(code, 0)
        flags = "flags: -DQUIRE_CUDA=ON -DCMAKE_CUDA_COMPILER=%s/toolkit/nvcc -DQUIRE_CUDA_ARCHS=90a\n"
        self.assertIn(flags % self.folder, out)
        self.assertIn("packages: cuda\n", out)
        self.assertEqual(self.fetched(), 0)

    def test_architectures(self):
        both = "90a;80-virtual"
        for lines, archs in (("9.0\n9.0", "90a"), ("8.0\n8.6", both), ("9.0\n8.0", both), ("[N/A]", both)):
            code, out = self.choose(driver="580", nvcc="13.0", capability="'%s'" % lines)
            self.assertEqual(code, 0)
            self.assertTrue(out.endswith("-DQUIRE_CUDA_ARCHS=%s\n" % archs), (lines, out))

    def test_toolkit_too_old(self):
        code, out = self.choose(driver="580", nvcc="11.8", CUDA_HOME="/nonexistent")
        self.assertEqual(code, 0)
        self.assertIn("-DCMAKE_CUDA_COMPILER=%s/cache/cuda/nvidia/cu13/bin/nvcc" % self.folder, out)

    def test_driver_alone(self):
        code, out = self.choose(driver="580", capability="8.9")
        self.assertEqual(code, 0)
        flags = "-DCMAKE_CUDA_COMPILER=%s/cache/cuda/nvidia/cu13/bin/nvcc -DQUIRE_CUDA_ARCHS=80-virtual"
        self.assertIn(flags % self.folder, out)
        home = self.folder + "/cache/cuda/nvidia/cu13"
        for name in ("lib64/libcudart.so", "lib64/libcublasLt.so"):  # as a toolkit has them
            self.assertTrue(os.path.exists(os.path.join(home, name)), name)
        wanted = read(self.folder + "/cache/cuda/packages")
        self.assertIn("nvidia-cuda-nvcc==13.0", wanted)
        self.assertEqual(wanted.count("--hash=sha256:"), 2 * wanted.count("=="))
        self.choose(driver="580")
        self.assertEqual(self.fetched(), 1)  # the second time it is there

    def test_fetch_that_breaks(self):
        code, out = self.choose(driver="580", QS_FAIL="1")
        self.assertEqual(code, 1)
        self.assertIn("QUICKSTART_CUDA=none", out)
        self.assertFalse(os.path.exists(self.folder + "/cache/cuda"))
        code, out = self.choose(driver="580")
        self.assertEqual(code, 0)
        self.assertEqual(self.fetched(), 2)

    def test_driver_too_old(self):
        code, out = self.choose(driver="550")
        self.assertEqual(code, 0)
        self.assertIn("the NVIDIA driver 550 is older than 580", out)
        self.assertIn("flags: -DQUIRE_CUDA=OFF\n", out)

    def test_told_what_to_take(self):
        self.assertIn("flags: -DQUIRE_CUDA=OFF", self.choose(driver="580", way="none")[1])
        self.assertIn("-DQUIRE_CUDA=ON", self.choose(way="pypi")[1])
        code, out = self.choose(driver="580", way="toolkit")
        self.assertEqual(code, 2)
        self.assertIn("there is no nvcc of 12.4 or later", out)
        code, out = self.choose(way="yes")
        self.assertEqual(code, 2)
        self.assertIn("not 'yes'", out)


if __name__ == "__main__":
    unittest.main(verbosity=2)
