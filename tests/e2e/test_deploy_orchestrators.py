"""deploy/kubernetes and deploy/compose: read whole, every field known, what refers to something finds it, the times fit
each other, the flags are the server's, and the paths that probes ask are answered by a live server as they expect."""

import json
import os
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import REAL, ROOT, Server  # noqa: E402

try:
    import yaml
except ImportError:
    yaml = None

LAYOUTS = ("replicas", "tensor-parallel")

# The fields used, by kind: a dict names them, a list holds items of one form, a type ends it, ANY is free.
ANY = object()
LABELS = {str: str}
PROBE = {"httpGet": {"path": str, "port": str}, "periodSeconds": int, "timeoutSeconds": int, "failureThreshold": int}
CONTAINER = {
    "name": str,
    "image": str,
    "args": [str],
    "env": [{"name": str, "value": str}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": {"requests": ANY, "limits": ANY},
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "lifecycle": {"preStop": {"exec": {"command": [str]}}},
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "capabilities": {"drop": [str]},
    },
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}
VOLUME = {
    "name": str,
    "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
    "secret": {"secretName": str, "defaultMode": int},
    "emptyDir": {"medium": str, "sizeLimit": str},
}
POD = {
    "automountServiceAccountToken": bool,
    "enableServiceLinks": bool,
    "terminationGracePeriodSeconds": int,
    "tolerations": [{"key": str, "operator": str, "effect": str}],
    "topologySpreadConstraints": [
        {"maxSkew": int, "topologyKey": str, "whenUnsatisfiable": str, "labelSelector": {"matchLabels": LABELS}}
    ],
    "securityContext": {
        "runAsNonRoot": bool,
        "runAsUser": int,
        "runAsGroup": int,
        "fsGroup": int,
        "seccompProfile": {"type": str},
    },
    "containers": [CONTAINER],
    "volumes": [VOLUME],
}
HEAD = {"apiVersion": str, "kind": str, "metadata": {"name": str, "labels": LABELS, "annotations": LABELS}}
KINDS = {
    ("apps/v1", "Deployment"): {
        "replicas": int,
        "selector": {"matchLabels": LABELS},
        "strategy": {"type": str, "rollingUpdate": {"maxSurge": int, "maxUnavailable": int}},
        "template": {"metadata": {"labels": LABELS, "annotations": LABELS}, "spec": POD},
    },
    ("v1", "Service"): {"selector": LABELS, "ports": [{"name": str, "port": int, "targetPort": str}]},
    ("policy/v1", "PodDisruptionBudget"): {"maxUnavailable": int, "selector": {"matchLabels": LABELS}},
    ("v1", "PersistentVolumeClaim"): {"accessModes": [str], "resources": {"requests": {"storage": str}}},
}
COMPOSE = {
    "image": str,
    "build": {"context": str, "dockerfile": str, "target": str},
    "profiles": [str],
    "command": [str],
    "ports": [str],
    "environment": LABELS,
    "secrets": [str],
    "volumes": [str],
    "shm_size": str,
    "ulimits": {"nofile": int, "memlock": int, "core": int},
    "read_only": bool,
    "tmpfs": [str],
    "cap_drop": [str],
    "security_opt": [str],
    "restart": str,
    "stop_grace_period": str,
    "healthcheck": {"test": [str], "interval": str, "timeout": str, "retries": int, "start_period": str},
    "logging": {"driver": str},
    "deploy": {"resources": {"reservations": {"devices": [{"driver": str, "count": int, "capabilities": [str]}]}}},
}


def unknown(value, form, where=""):
    """Fields that the form does not know and values of another type."""
    if form is ANY:
        return
    if isinstance(form, list):
        if not isinstance(value, list):
            yield where + ": no list"
            return
        for i, item in enumerate(value):
            yield from unknown(item, form[0], "%s[%d]" % (where, i))
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            yield where + ": no mapping"
            return
        for key, item in value.items():
            if key not in form and str not in form:
                yield "%s.%s: no such field" % (where, key)
            else:
                yield from unknown(item, form.get(key, form.get(str)), "%s.%s" % (where, key))
    elif type(value) is not form:
        yield "%s: %r is no %s" % (where, value, form.__name__)


def sizes(arguments):
    """(data, tensor) parallel sizes."""
    found = dict(re.findall(r"--(data|tensor)-parallel-size=(\d+)", " ".join(arguments)))
    return int(found.get("data", 1)), int(found.get("tensor", 1))


def flag(arguments, name):
    return next(a.split("=", 1)[1] for a in arguments if a.startswith("--%s=" % name))


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def image_ids():
    with open(os.path.join(ROOT, "deploy/container/Containerfile")) as f:
        return re.findall(r"^USER (\d+):(\d+)$", f.read(), re.M)


class Base(unittest.TestCase):
    def setUp(self):
        if yaml is None:
            self.skipTest("skipped: no PyYAML here")

    def check_flags(self, arguments):
        """The server takes them: all it says is that this model is not here."""
        self.assertFalse(arguments[0].startswith("-"), "the first is the model")
        if os.path.exists(REAL):
            command = [REAL, "serve", "/no/such/model", *arguments[1:], "--device", "cpu"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn("there is no file or folder /no/such/model", done.stderr)


class Kubernetes(Base):
    def load(self, name):
        with open(os.path.join(ROOT, "deploy/kubernetes", name + ".yaml")) as f:
            return {document["kind"]: document for document in yaml.safe_load_all(f)}

    def test_fields(self):
        for name in (*LAYOUTS, "common"):
            for document in self.load(name).values():
                form = {**HEAD, "spec": KINDS[document["apiVersion"], document["kind"]]}
                self.assertEqual(list(unknown(document, form, name + ":" + document["kind"])), [])

    def test_published_schemas(self):
        try:
            import kubernetes_validate
        except ImportError:
            self.skipTest("skipped: no kubernetes-validate here (tests/run --full fetches it)")
        for name in (*LAYOUTS, "common"):
            for document in self.load(name).values():
                kubernetes_validate.validate(document, "1.29", strict=True)
                document["spec"]["slector"] = {}
                with self.assertRaises(kubernetes_validate.ValidationError):
                    kubernetes_validate.validate(document, "1.29", strict=True)

    def test_fields_would_tell(self):
        document = self.load("replicas")["Deployment"]
        document["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
        document["spec"]["replicas"] = "2"
        form = {**HEAD, "spec": KINDS["apps/v1", "Deployment"]}
        self.assertEqual(len(list(unknown(document, form))), 2)

    def test_references(self):
        claim = self.load("common")["PersistentVolumeClaim"]["metadata"]["name"]
        for name in LAYOUTS:
            found = self.load(name)
            self.assertEqual(set(found), {"Deployment", "Service", "PodDisruptionBudget"})
            template = found["Deployment"]["spec"]["template"]
            labels = template["metadata"]["labels"]
            self.assertEqual(found["Deployment"]["spec"]["selector"]["matchLabels"], labels)
            self.assertEqual(found["Service"]["spec"]["selector"], labels)
            self.assertEqual(found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"], labels)
            pod = template["spec"]
            container = pod["containers"][0]
            ports = {p["name"]: p["containerPort"] for p in container["ports"]}
            self.assertIn(found["Service"]["spec"]["ports"][0]["targetPort"], ports)
            self.assertEqual(template["metadata"]["annotations"]["prometheus.io/port"], str(ports["http"]))
            volumes = {v["name"]: v for v in pod["volumes"]}
            self.assertEqual(set(volumes), {m["name"] for m in container["volumeMounts"]})
            self.assertEqual(volumes["models"]["persistentVolumeClaim"]["claimName"], claim)
            self.assertEqual(volumes["shm"]["emptyDir"]["medium"], "Memory")
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            self.assertEqual((mounts["/dev/shm"], mounts["/tmp"], mounts["/models"]), ("shm", "tmp", "models"))
            key_file = {e["name"]: e["value"] for e in container["env"]}["QUIRE_API_KEY_FILE"]
            self.assertEqual(mounts[os.path.dirname(key_file)], "keys")
            with open(os.path.join(ROOT, "deploy/kubernetes/common.yaml")) as f:
                made = "secret generic %s --from-literal=%s=" % (
                    volumes["keys"]["secret"]["secretName"], os.path.basename(key_file))
                self.assertIn(made, f.read())

    def test_layout_and_times(self):
        for name, layout in zip(LAYOUTS, ((2, 1), (1, 2))):
            pod = self.load(name)["Deployment"]["spec"]["template"]["spec"]
            container = pod["containers"][0]
            self.check_flags(container["args"])
            self.assertEqual(sizes(container["args"]), layout)
            for kind in ("requests", "limits"):
                self.assertEqual(container["resources"][kind]["nvidia.com/gpu"], layout[0] * layout[1])
            pause = container["lifecycle"]["preStop"]["exec"]["command"]
            self.assertEqual(pause[0], "sleep")
            stop = int(pause[1]) + int(flag(container["args"], "shutdown-timeout"))
            self.assertGreaterEqual(pod["terminationGracePeriodSeconds"], stop + 10)

    def test_safe(self):
        for name in LAYOUTS:
            pod = self.load(name)["Deployment"]["spec"]["template"]["spec"]
            context, container = pod["securityContext"], pod["containers"][0]["securityContext"]
            self.assertTrue(context["runAsNonRoot"] and container["readOnlyRootFilesystem"])
            self.assertEqual(context["seccompProfile"]["type"], "RuntimeDefault")
            self.assertEqual(container["capabilities"]["drop"], ["ALL"])
            self.assertFalse(container["allowPrivilegeEscalation"] or pod["automountServiceAccountToken"])
            ids = (str(context["runAsUser"]), str(context["runAsGroup"]))
            self.assertEqual(set(image_ids()), {ids}, "the user of the image")
            self.assertFalse(pod["enableServiceLinks"], "QUIRE_PORT would be tcp://…")

    def test_probes_on_a_live_server(self):
        with Server(env={"QUIRE_FAKE_LOAD_MS": "1000"}, wait=False) as server:
            for name in LAYOUTS:
                container = self.load(name)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
                paths = [container[k + "Probe"]["httpGet"]["path"] for k in ("startup", "readiness", "liveness")]
                self.assertEqual([server.get(p).status for p in paths], [503, 503, 200], "while it loads")
            server.wait_line('msg="ready"')
            self.assertEqual([server.get(p).status for p in paths], [200, 200, 200])
            annotation = self.load("replicas")["Deployment"]["spec"]["template"]["metadata"]["annotations"]
            self.assertIn(b"vllm:num_requests_running", server.get(annotation["prometheus.io/path"]).body)


class Compose(Base):
    PATH = os.path.join(ROOT, "deploy/compose/compose.yaml")

    def load(self):
        with open(self.PATH) as f:
            return yaml.safe_load(f)

    def test_fields(self):
        whole = self.load()
        self.assertEqual(set(whole), {"name", "x-quire", "services", "secrets", "volumes"})
        self.assertEqual(list(whole["services"]), [*LAYOUTS, "cpu"])
        for name, service in whole["services"].items():
            self.assertEqual(list(unknown(service, COMPOSE, name)), [])
            self.assertEqual(service["profiles"], [name])
            self.assertEqual([v.split(":")[0] for v in service["volumes"]], list(whole["volumes"]))
            self.assertEqual(service["secrets"], list(whole["secrets"]))
            self.assertEqual(service["environment"]["QUIRE_API_KEY_FILE"], "/run/secrets/" + service["secrets"][0])
            build = service["build"]
            recipe = os.path.join(os.path.dirname(self.PATH), build["context"], build["dockerfile"])
            with open(recipe) as f:
                self.assertRegex(f.read(), r"(?m)^FROM \S+ AS %s$" % build["target"])
            self.assertEqual(service["image"], "quire:" + build["target"])

    def test_layout_and_times(self):
        for name, layout in zip((*LAYOUTS, "cpu"), ((2, 1), (1, 2), (1, 1))):
            service = self.load()["services"][name]
            self.check_flags(service["command"])
            self.assertEqual(sizes(service["command"]), layout)
            stop = int(flag(service["command"], "shutdown-timeout"))
            self.assertGreaterEqual(seconds(service["stop_grace_period"]), stop + 10)
            if name == "cpu":
                self.assertNotIn("deploy", service)
                continue
            device = service["deploy"]["resources"]["reservations"]["devices"][0]
            self.assertEqual((device["driver"], device["count"]), ("nvidia", layout[0] * layout[1]))
            self.assertIn("gpu", device["capabilities"])

    def test_safe(self):
        for service in self.load()["services"].values():
            self.assertTrue(service["read_only"])
            self.assertEqual(service["cap_drop"], ["ALL"])
            self.assertEqual(service["security_opt"], ["no-new-privileges:true"])
            self.assertIn("/tmp", service["tmpfs"][0])
            self.assertEqual(service["healthcheck"]["test"][:2], ["CMD", "healthcheck"])
            self.assertGreaterEqual(service["ulimits"]["nofile"], 16384)

    def test_as_docker_reads_it(self):
        probe = shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True)
        if not probe or probe.returncode:
            self.skipTest("skipped: no docker compose here")
        for profile in (*LAYOUTS, "cpu"):
            command = ["docker", "compose", "-f", self.PATH, "--profile", profile, "config", "--format", "json"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(profile, json.loads(done.stdout)["services"])


if __name__ == "__main__":
    unittest.main()
