"""deploy/container: the rules that the recipe keeps to, and its health check before a live server. With
QUIRE_TEST_FULL=1 (tests/run --full) both targets are built by buildah on a Debian made by debootstrap, and served from
as a container has it: process 1, not root, nothing writable; cuda on the CPU too, there is no GPU to serve from."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import REAL, ROOT, Server, default_model  # noqa: E402

FOLDER = os.path.join(ROOT, "deploy/container")


def stages(text):
    """[(name, base, [(instruction, argument)])] of a Containerfile, and what stands before the first."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M)
    text = re.sub(r"\\\n", " ", text)
    before, out = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(None, 1)
        if word == "FROM":
            found = re.fullmatch(r"(\S+)(?: AS (\S+))?", rest)
            out.append((found.group(2), found.group(1), []))
        else:
            (out[-1][2] if out else before).append((word, rest))
    return before, out


def whole(out, name):
    """A stage's instructions with those of the stages it stands on."""
    for stage, base, instructions in out:
        if stage == name:
            return whole(out, base) + instructions
    return []


def problems(text):
    """What is wrong with it, by the rules of this house."""
    before, out = stages(text)
    known = {"FROM", "RUN", "COPY", "ENV", "ARG", "VOLUME", "WORKDIR", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "USER"}
    known |= {"ENTRYPOINT"}
    names = [name for name, _, _ in out]
    for word, rest in before + [i for _, _, instructions in out for i in instructions]:
        if word not in known:
            yield "%s is not used here" % word
        if word == "ENTRYPOINT" and not rest.startswith("["):
            yield "a shell would be process 1: " + rest
    for _, base, instructions in out:
        if base not in names and base != "${DEBIAN}":
            yield "another base: " + base
        for word, rest in instructions:
            installs = word == "RUN" and ("apt-get" in rest or "packages_install" in rest)
            if installs and "/var/lib/apt/lists" not in rest:
                yield "package lists stay in a layer: " + rest
            source = re.match(r"--from=(\S+)", rest) if word == "COPY" else None
            if source and source.group(1) not in names:
                yield "no stage is called " + source.group(1)
            for path in rest.split()[:-1] if word == "COPY" and not source else []:
                if not os.path.exists(os.path.join(ROOT, path)):
                    yield "there is no " + path
    if not before or not re.fullmatch(r"DEBIAN=\S+:[\w.-]+-slim", before[0][1]):
        yield "the base is a slim Debian of a named release"
    for target in ("cpu", "cuda"):
        words = whole(out, target)
        last = dict(words)
        if not re.fullmatch(r"[1-9]\d+:[1-9]\d+", last.get("USER", "")):
            yield target + " does not end as a user by number other than root"
        for word in ("HEALTHCHECK", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "EXPOSE"):
            if word not in last:
                yield "%s has no %s" % (target, word)
        if any(w == "RUN" and "install" in r and "install -d" not in r for w, r in words):
            yield target + " installs something at run time's base"
    if out[-1][0] != "cuda":
        yield "cuda is not the default target"


class Rules(unittest.TestCase):
    def read(self):
        with open(os.path.join(FOLDER, "Containerfile")) as f:
            return f.read()

    def test_kept(self):
        self.assertEqual(list(problems(self.read())), [])

    def test_would_tell(self):
        text = self.read()
        for old, new in (
            ("USER 10001:10001", ""),
            ("USER 10001:10001", "USER root"),
            ('["quire", "serve"]', "quire serve"),
            (" && rm -rf /var/lib/apt/lists/*", ""),
            ("HEALTHCHECK", "LABEL"),
            ("VOLUME /models\n", ""),
            ("--from=build-cpu", "--from=nowhere"),
            ("COPY engine engine", "COPY engines engine"),
            ("bookworm-slim", "latest"),
        ):
            self.assertIn(old, text)
            self.assertNotEqual(list(problems(text.replace(old, new))), [], old)

    def test_environment_is_known(self):
        if not os.path.exists(REAL):
            self.skipTest("skipped: build/quire is not here")
        known = subprocess.run([REAL, "serve", "--help"], capture_output=True, text=True).stdout
        for name in set(re.findall(r"\b(QUIRE_[A-Z_]+)=", self.read())):
            self.assertRegex(known, r"(?m)^ +%s$" % name)

    def test_only_what_is_needed_goes_in(self):
        with open(os.path.join(FOLDER, "Containerfile.dockerignore")) as f:
            let_in = {line[1:].strip() for line in f if line.startswith("!")}
        copies = [rest.split()[:-1] for word, rest in whole(stages(self.read())[1], "build") if word == "COPY"]
        copied = {path.split("/")[0] for paths in copies for path in paths}
        self.assertEqual(let_in, copied)


class HealthCheck(unittest.TestCase):
    def check(self, port, *path):
        script = os.path.join(FOLDER, "healthcheck")
        environment = {**os.environ, "QUIRE_PORT": str(port)}
        return subprocess.run([script, *path], env=environment, capture_output=True, timeout=10).returncode

    def test_live_and_ready(self):
        with Server(env={"QUIRE_FAKE_LOAD_MS": "1500"}, wait=False) as server:
            self.assertEqual((self.check(server.port), self.check(server.port, "/health/ready")), (0, 1))
            server.wait_line('msg="ready"')
            self.assertEqual((self.check(server.port), self.check(server.port, "/health/ready")), (0, 0))

    def test_dead(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            self.assertEqual(self.check(silent.getsockname()[1]), 1)  # takes the connection, says nothing
            port = silent.getsockname()[1]
        self.assertEqual(self.check(port), 1)


class Image(unittest.TestCase):
    """The recipe itself, from FROM to a served token."""

    @classmethod
    def setUpClass(cls):
        if os.environ.get("QUIRE_TEST_FULL") != "1":
            raise unittest.SkipTest("skipped: minutes of building, only with tests/run --full")
        for program in ("buildah", "debootstrap", "unshare", "setpriv"):
            if not shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
                raise unittest.SkipTest("skipped: no %s here" % program)
        if os.geteuid() != 0:
            raise unittest.SkipTest("skipped: debootstrap wants root")
        cls.folder = tempfile.mkdtemp(prefix="quire-image-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, True)
        # What is mounted goes first: the containers' trees, then the store, which some versions mount on itself.
        cls.addClassCleanup(subprocess.run, ["umount", cls.folder + "/store/overlay"], capture_output=True)
        cls.addClassCleanup(cls.buildah, "rm", "--all")
        cls.make_base()

    @classmethod
    def buildah(cls, *arguments, seconds=60):
        command = ["buildah", "--root", cls.folder + "/store", "--runroot", cls.folder + "/run", *arguments]
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            raise AssertionError("%s\n%s\n%s" % (" ".join(arguments), done.stdout[-3000:], done.stderr[-3000:]))
        return done.stdout.strip()

    @classmethod
    def make_base(cls):
        """What stands in for the recipe's Debian: one made here, in its least form."""
        root = os.path.join(cls.folder, "root")
        made = ["debootstrap", "--variant=minbase", "bookworm", root]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, timeout=300)
        base = cls.buildah("from", "scratch")
        cls.buildah("add", "-q", base, root, "/", seconds=120)
        cls.buildah("commit", "-q", "--rm", base, "localhost/debian:bookworm-slim", seconds=120)

    def build(self, target, seconds):
        """The path of the built image's tree."""
        recipe = os.path.join(FOLDER, "Containerfile")
        arguments = ["--pull-never", "--format", "docker", "--build-arg", "DEBIAN=localhost/debian:bookworm-slim"]
        arguments += ["--ignorefile", recipe + ".dockerignore", "-f", recipe, "--target", target]
        if os.environ.get("PIP_CERT"):  # a network with a certificate of its own
            with open(os.path.join(self.folder, "pip.conf"), "w") as f:
                f.write("[global]\ncert = /etc/ssl/host.crt\n")
            arguments += ["-v", f.name + ":/etc/pip.conf:ro", "-v", os.environ["PIP_CERT"] + ":/etc/ssl/host.crt:ro"]
        self.buildah("bud", *arguments, "-t", "quire:" + target, ".", seconds=seconds)
        self.configuration("localhost/quire:" + target)
        return self.buildah("mount", self.buildah("from", "--pull-never", "localhost/quire:" + target))

    def configuration(self, image):
        config = json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]["config"]
        self.assertEqual(config["User"], "10001:10001")
        self.assertEqual(config["Entrypoint"], ["quire", "serve"])
        self.assertEqual(config["Healthcheck"]["Test"], ["CMD", "healthcheck"])
        self.assertEqual(list(config["Volumes"]), ["/models"])
        self.assertIn("QUIRE_HOST=0.0.0.0", config["Env"])

    def added_mb(self, tree):
        """What the recipe adds to Debian, whose slim image is 75 MB (the base made here is larger)."""
        found = subprocess.run(["du", "-sm", tree + "/usr/local"], capture_output=True, text=True, check=True)
        return int(found.stdout.split()[0])

    def test_cpu(self):
        tree = self.build("cpu", 1800)
        self.assertLess(self.added_mb(tree), 12, "a binary and five small libraries")
        self.serve(tree)

    def test_cuda(self):
        tree = self.build("cuda", 5400)
        added = self.added_mb(tree)
        print("target cuda adds %d MB" % added, file=sys.stderr)
        self.assertLess(added + 75, 2000)
        cache = subprocess.run(["chroot", tree, "ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
        for name in ("libcublasLt.so.13", "libnccl.so.2"):
            self.assertIn(name, cache)
        with open(tree + "/usr/local/bin/quire", "rb") as f:
            self.assertIn(b"ncclCommInitRank", f.read(), "compiled without NCCL")
        self.serve(tree)

    def serve(self, tree):
        """Process 1, user 10001, a read-only tree, /tmp and /dev/shm of memory, the model mounted: by hand."""
        script = """
            set -e
            mount --make-rprivate /
            mount --bind $0 $0
            mkdir -p $0/models/quire $0/dev/shm
            mount --bind $1 $0/models/quire
            mount -t proc proc $0/proc
            mount -t tmpfs tmpfs $0/tmp
            [ -e $0/dev/urandom ] || mknod -m 666 $0/dev/urandom c 1 9
            [ -e $0/dev/null ] || mknod -m 666 $0/dev/null c 1 3
            mount -t tmpfs tmpfs $0/dev/shm
            mount -o remount,bind,ro $0
            exec chroot $0 setpriv --reuid 10001 --regid 10001 --clear-groups --inh-caps=-all --bounding-set=-all \\
                --no-new-privs env -i PATH=/usr/local/bin:/usr/bin:/bin XDG_CACHE_HOME=/models HOME=/models \\
                QUIRE_PORT=$2 QUIRE_DEVICE=cpu \\
                sh -c 'if touch /x; then exit 9; fi; cd /models; exec quire serve --served-model-name default'
        """
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        model = default_model()
        if not model:
            self.skipTest("skipped: the default model is not here")
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, tree]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen([*command, os.path.dirname(model), str(port)], stderr=log)
            try:
                end = time.monotonic() + 20
                check, given = os.path.join(FOLDER, "healthcheck"), {**os.environ, "QUIRE_PORT": str(port)}
                while subprocess.run([check, "/health/ready"], env=given, capture_output=True).returncode:
                    log.seek(0)
                    self.assertTrue(process.poll() is None and time.monotonic() < end, log.read())
                    time.sleep(0.1)
                body = '{"model":"default","prompt":"One, two, three,","max_tokens":6,"temperature":0}'
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                self.assertIn("four", connection.getresponse().read().decode())
                connection.close()
                with open("/proc/%d/task/%d/children" % (process.pid, process.pid)) as f:
                    os.kill(int(f.read().split()[0]), signal.SIGTERM)
                self.assertEqual(process.wait(20), 0)
            finally:
                process.kill()
                process.wait()


if __name__ == "__main__":
    unittest.main()
