"""The examples of configs/deploy hold together, and vLLM takes every argument in them.

They are parsed here, never run: that takes a container engine, a cluster, and images from elsewhere.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import setup_steps
from vllm_h2o.errors import RefusedError
from vllm_h2o.settings import KVPolicySettings

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "configs" / "deploy"
DOCUMENT = REPOSITORY / "docs" / "deploy.md"
DOCKERFILE, COMPOSE, COMPOSE_GPU = FOLDER / "Dockerfile", FOLDER / "compose.yaml", FOLDER / "compose.gpu.yaml"
SERVER = "chat"
"""What the server is called in the examples."""

NOT_VLLMS = {"HF_HOME", "VLLM_H2O_CACHE"}
"""Environment variables that others read."""

UNITS = {"s": 1, "m": 60, "gb": 2**30, "Gi": 2**30}
KEY_OF_TESTS = "a-key-for-this-test"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def amount(text: str) -> int:
    """Seconds or bytes of ``90s``, ``10m``, ``4gb``, ``10Gi``."""
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


# --- what the files say --------------------------------------------------------------------------


@dataclass(frozen=True)
class Container:
    """One that runs ``vllm serve``.

    Attributes:
        words: the command line behind ``vllm serve``.
        environment: with an empty text for what comes from elsewhere, as the key does.
        files: what is mounted, by path in the container.
    """

    command: list[str]
    words: list[str]
    environment: dict[str, str]
    files: dict[str, str]

    def option(self, name: str) -> str:
        """The value of ``--name=value``."""
        (value,) = [word.split("=", 1)[1] for word in self.words if word.startswith(f"--{name}=")]
        return value

    @property
    def settings_text(self) -> str:
        return self.files[self.words[self.words.index("--config") + 1]]

    def engine_words(self, folder: Path) -> list[str]:
        """The words without the model, with the mounted settings where this process can read them."""
        path = folder / "serve.yaml"
        path.write_text(self.settings_text, encoding="utf-8")
        words = list(self.words)
        words[words.index("--config") + 1] = str(path)
        assert not words[0].startswith("-"), "the model is the first word"
        return words[1:]


def compose_service(*paths: Path) -> dict[str, Any]:
    """The server's entry in the files, each on top of the ones before, as far as they differ here."""
    service: dict[str, Any] = {}
    for path in paths:
        other = read(path)["services"][SERVER]
        volumes = {target_of(volume): volume for volume in service.get("volumes", [])}
        volumes |= {target_of(volume): volume for volume in other.get("volumes", [])}
        environment = {**service.get("environment", {}), **other.get("environment", {})}
        build = {**service.get("build", {}), **other.get("build", {})}
        merged = {"volumes": list(volumes.values()), "environment": environment, "build": build}
        service = {**service, **other, **merged}
    return service


def target_of(volume: str) -> str:
    return volume.split(":")[1]


def compose_container(*paths: Path) -> Container:
    service = compose_service(*paths)
    files = {}
    for volume in service["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            files[target] = (FOLDER / source).read_text(encoding="utf-8")
    # `${NAME:?message}` is for whoever starts it to give.
    given = {name: "" if "${" in value else value for name, value in service["environment"].items()}
    return Container(service["entrypoint"], service["command"], given, files)


KUBERNETES: dict[str, dict[str, Any]] = {
    each["kind"]: each
    for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
}
POD: dict[str, Any] = KUBERNETES["Deployment"]["spec"]["template"]
(POD_CONTAINER,) = POD["spec"]["containers"]


def kubernetes_container() -> Container:
    mounts = {mount["name"]: mount["mountPath"] for mount in POD_CONTAINER["volumeMounts"]}
    files = {
        f"{mounts[volume['name']]}/{name}": text
        for volume in POD["spec"]["volumes"]
        if "configMap" in volume
        for name, text in KUBERNETES["ConfigMap"]["data"].items()
    }
    environment = {entry["name"]: entry.get("value", "") for entry in POD_CONTAINER["env"]}
    return Container(POD_CONTAINER["command"], POD_CONTAINER["args"], environment, files)


CONTAINERS = {
    "compose": compose_container(COMPOSE),
    "compose-gpu": compose_container(COMPOSE, COMPOSE_GPU),
    "kubernetes": kubernetes_container(),
}
each_container = pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)


def instructions() -> Iterator[tuple[str, list[str]]]:
    """Of the Dockerfile: the instruction, and its words."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, rest = line.split(maxsplit=1)
            yield name, shlex.split(rest.strip("[]").replace(",", " ") if rest.startswith("[") else rest)


# --- vLLM takes the arguments --------------------------------------------------------------------


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Leave no policy active in this process."""
    yield
    from vllm_h2o.engine import backend

    backend.deactivate()


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("name", ["compose", "kubernetes"])
def test_vllm_makes_the_policy_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.command_line import engine_config
    from vllm_h2o.config import KVPolicyConfig

    container = CONTAINERS[name]
    for variable, value in container.environment.items():
        monkeypatch.setenv(variable, value)
    config = engine_config(*container.engine_words(tmp_path))
    policy = KVPolicyConfig.from_additional_config(config.additional_config)
    assert policy is not None
    written = yaml.safe_load(container.settings_text)
    assert policy.evicts
    assert (policy.name, policy.budget_tokens) == (written["kv-policy"], written["kv-budget"])
    assert policy.prompt_budget_tokens == written["kv-prompt-budget"]
    assert policy.pinned_tokens == written["kv-pin-tokens"]
    assert config.shutdown_timeout == int(container.option("shutdown-timeout")) > 0
    assert config.model_config.enforce_eager


@pytest.mark.usefixtures("_as_before")
def test_only_the_machine_is_wrong_with_the_gpu_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.command_line import engine_config, parse
    from vllm_h2o.engine.cli import with_flags
    from vllm_h2o.engine.gpu.refusals import OPT_IN
    from vllm_h2o.kernels.triton import MAX_BLOCK_SIZE

    container = CONTAINERS["compose-gpu"]
    words = container.engine_words(tmp_path)
    # vLLM's own configuration on a CPU can't be made with the model runner that GPUs need.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    with pytest.raises(RefusedError) as error:
        engine_config(*words)
    assert [refusal.what for refusal in error.value.refusals] == ["Triton kernels on CPU"]

    arguments = parse(*words)
    settings = KVPolicySettings.from_additional_config(with_flags(arguments.additional_config, arguments))
    assert settings.kernels == OPT_IN
    assert settings.prompt_budget is None, "GPUs don't take one"
    assert container.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    block_size = arguments.block_size
    assert block_size <= MAX_BLOCK_SIZE
    assert block_size & (block_size - 1) == 0
    config, notes = settings.resolve(
        max_model_len=arguments.max_model_len, block_size=block_size, max_in_flight_tokens=2048
    )
    assert config.evicts
    assert notes == []


@each_container
def test_the_server_listens_where_the_rest_expects_it(container: Container) -> None:
    from tests.command_line import parse

    arguments = parse(*(word for word in container.words if word.startswith(("--host=", "--port="))))
    assert arguments.port == 8000
    assert arguments.host == "0.0.0.0", "loopback of a container is reached from inside only"
    assert container.command == ["vllm", "serve"]


# --- environment variables -----------------------------------------------------------------------


@each_container
def test_every_variable_is_read_by_somebody(container: Container) -> None:
    from vllm.envs import environment_variables

    assert set(container.environment) - NOT_VLLMS <= set(environment_variables)
    ours = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "vllm_h2o").rglob("*.py"))
    assert "VLLM_H2O_CACHE" in container.environment
    assert '"VLLM_H2O_CACHE"' in ours


@each_container
def test_the_plugins_are_those_that_are_installed(container: Container) -> None:
    installed = {
        point.name
        for group in ("vllm.general_plugins", "vllm.endpoint_plugins")
        for point in entry_points(group=group)
        if point.dist is not None and point.dist.name == "vllm-h2o"
    }
    assert set(container.environment["VLLM_PLUGINS"].split(",")) == installed == {"h2o", "kv_policy"}


@each_container
def test_the_key_is_not_in_the_file(container: Container) -> None:
    assert container.environment["VLLM_API_KEY"] == ""
    assert not any(word.startswith("--api-key") for word in container.words)


# --- images --------------------------------------------------------------------------------------


def images() -> list[str]:
    from_files = [
        service["image"]
        for path in (COMPOSE, COMPOSE_GPU)
        for service in read(path)["services"].values()
        if "vllm" in service["image"]
    ]
    arguments = [words[0].split("=", 1)[1] for name, words in instructions() if name == "ARG"]
    gpu = read(COMPOSE_GPU)["services"][SERVER]["build"]["args"]["VLLM_IMAGE"]
    return [*from_files, *arguments, gpu, POD_CONTAINER["image"]]


@pytest.mark.parametrize("image", images())
def test_vllm_in_the_image_is_the_tested_one_and_supported(image: str) -> None:
    (version,) = re.findall(r":v?(\d+\.\d+\.\d+)", image)
    assert version == setup_steps.VLLM_VERSION
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    for extra in ("cpu", "cuda"):
        (requirement,) = map(Requirement, pyproject["project"]["optional-dependencies"][extra])
        assert version in requirement.specifier


def test_the_image_that_is_run_is_the_one_that_is_built() -> None:
    assert compose_service(COMPOSE)["image"] == POD_CONTAINER["image"]
    default = dict(words[0].split("=", 1) for name, words in instructions() if name == "ARG")
    gpu = compose_service(COMPOSE, COMPOSE_GPU)["build"]["args"]
    assert set(gpu) == set(default) == {"VLLM_IMAGE"}
    assert gpu != default


def test_the_stages_of_the_dockerfile_follow_each_other() -> None:
    stages: set[str] = set()
    sources: list[str] = []
    for name, words in instructions():
        if name == "FROM":
            stages |= {words[2]} if len(words) == 3 else set()
        elif name == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        elif name == "COPY":
            sources += words[:-1]
    assert sources
    build = compose_service(COMPOSE)["build"]
    context = (FOLDER / build["context"]).resolve()
    assert (context, context / build["dockerfile"]) == (REPOSITORY, DOCKERFILE)
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored, "it is a list of what may be copied"
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert f"!{source}" in ignored
    *_, (last, words) = instructions()
    assert (last, words) == ("ENTRYPOINT", ["vllm", "serve"])


def test_what_the_dockerfile_copies_makes_a_complete_wheel(tmp_path: Path) -> None:
    for name, words in instructions():
        if name == "COPY" and not words[0].startswith("--"):
            for source in words[:-1]:
                path = REPOSITORY / source
                if path.is_dir():
                    shutil.copytree(
                        path, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__", "*.so")
                    )
                else:
                    shutil.copy(path, tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", "wheels", "."], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    packed = set(zipfile.ZipFile(wheel).namelist())
    package = REPOSITORY / "vllm_h2o"
    files = {
        path.relative_to(REPOSITORY).as_posix()
        for path in package.rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".html") and "__pycache__" not in path.parts
    }
    assert files <= packed
    assert any(name.endswith("entry_points.txt") for name in packed)


# --- compose -------------------------------------------------------------------------------------


def test_volumes_of_compose_are_declared_or_there() -> None:
    declared = set(read(COMPOSE)["volumes"])
    used = set()
    for path in (COMPOSE, COMPOSE_GPU):
        for service in read(path)["services"].values():
            for volume in service["volumes"]:
                source = volume.split(":")[0]
                if source.startswith("."):
                    assert (FOLDER / source).exists(), source
                    assert volume.endswith(":ro")
                else:
                    used.add(source)
    assert used == declared


def test_compose_reaches_the_server_at_its_port() -> None:
    service, container = compose_service(COMPOSE), CONTAINERS["compose"]
    port = container.option("port")
    published = dict(entry.rsplit(":", 1)[::-1] for entry in service["ports"])
    assert published[port].startswith("127.0.0.1:"), "not to the world by default"
    (url,) = re.findall(r"http://\S+?(?=')", " ".join(service["healthcheck"]["test"]))
    assert url == f"http://127.0.0.1:{port}/health"
    assert amount(service["stop_grace_period"]) > int(container.option("shutdown-timeout"))


def test_prometheus_finds_the_server_and_its_rules() -> None:
    services = read(COMPOSE)["services"]
    prometheus = services["prometheus"]
    (config,) = [word.split("=", 1)[1] for word in prometheus["command"] if word.startswith("--config.file")]
    folders = {target_of(volume): volume.split(":")[0] for volume in prometheus["volumes"]}
    folder, name = config.rsplit("/", 1)
    path = FOLDER / folders[folder] / name
    written = read(path)
    targets = [
        target
        for job in written["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]
    assert targets == [f"127.0.0.1:{CONTAINERS['compose'].option('port')}"]
    # Loopback is the server's, and so is the port that is published for Prometheus.
    assert prometheus["network_mode"] == f"service:{SERVER}"
    assert "ports" not in prometheus
    assert "127.0.0.1:9090:9090" in services[SERVER]["ports"]
    assert prometheus["depends_on"][SERVER]["condition"] == "service_healthy"
    for rules in written["rule_files"]:
        assert (path.parent / rules).is_file()


def test_memory_of_compose_holds_the_cache() -> None:
    service = compose_service(COMPOSE)
    cache = int(service["environment"]["VLLM_CPU_KVCACHE_SPACE"]) * 2**30
    assert amount(service["mem_limit"]) >= cache + amount(service["shm_size"])


@pytest.mark.parametrize("files", [[COMPOSE], [COMPOSE, COMPOSE_GPU]], ids=["cpu", "gpu"])
def test_docker_compose_reads_them(files: list[Path]) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("there is no `docker compose` here")
    arguments = [word for path in files for word in ("-f", str(path))]
    done = subprocess.run(
        [docker, "compose", *arguments, "config", "-q"],
        env={**os.environ, "VLLM_API_KEY": KEY_OF_TESTS}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# --- Kubernetes ----------------------------------------------------------------------------------


def test_the_configuration_is_that_of_the_chat_example() -> None:
    assert yaml.safe_load(CONTAINERS["kubernetes"].settings_text) == read(
        REPOSITORY / "configs" / "serve-chat.yaml"
    )


def test_labels_select_the_pods() -> None:
    labels = POD["metadata"]["labels"].items()
    assert KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert KUBERNETES["Service"]["spec"]["selector"].items() <= labels


def test_ports_and_probes_lead_to_the_server() -> None:
    port = int(CONTAINERS["kubernetes"].option("port"))
    named = {entry["name"]: entry["containerPort"] for entry in POD_CONTAINER["ports"]}
    assert list(named.values()) == [port]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = POD_CONTAINER[probe]["httpGet"]
        assert (asked["path"], named[asked["port"]]) == ("/health", port)
    (entry,) = KUBERNETES["Service"]["spec"]["ports"]
    assert named[entry["targetPort"]] == port
    annotations = POD["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }


def test_mounts_are_of_declared_volumes() -> None:
    declared = [volume["name"] for volume in POD["spec"]["volumes"]]
    mounted = [mount["name"] for mount in POD_CONTAINER["volumeMounts"]]
    assert sorted(declared) == sorted(mounted) == sorted(set(mounted))
    paths = [mount["mountPath"] for mount in POD_CONTAINER["volumeMounts"]]
    assert len(set(paths)) == len(paths)
    (config,) = [volume["configMap"] for volume in POD["spec"]["volumes"] if "configMap" in volume]
    assert config["name"] == KUBERNETES["ConfigMap"]["metadata"]["name"]
    environment = CONTAINERS["kubernetes"].environment
    for name in ("HF_HOME", "VLLM_H2O_CACHE"):
        assert any(environment[name].startswith(f"{path}/") for path in paths), "kept on a volume"


def test_the_key_comes_from_a_secret_that_is_not_here() -> None:
    (entry,) = [entry for entry in POD_CONTAINER["env"] if entry["name"] == "VLLM_API_KEY"]
    secret = entry["valueFrom"]["secretKeyRef"]
    command = f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=..."
    for path in (FOLDER / "kubernetes.yaml", DOCUMENT):
        assert command in path.read_text(encoding="utf-8")
    assert "Secret" not in KUBERNETES


def test_pods_start_and_stop_in_order() -> None:
    startup = POD_CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
    last_words = POD_CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    timeout = int(CONTAINERS["kubernetes"].option("shutdown-timeout"))
    assert POD["spec"]["terminationGracePeriodSeconds"] >= last_words + timeout + 10
    strategy = KUBERNETES["Deployment"]["spec"]["strategy"]
    assert strategy["type"] == "RollingUpdate"
    assert strategy["rollingUpdate"]["maxUnavailable"] == 0 < strategy["rollingUpdate"]["maxSurge"]


def test_services_set_no_variables() -> None:
    """Those of a service called vllm would be settings of vLLM's."""
    assert POD["spec"]["enableServiceLinks"] is False


def test_a_pod_gets_what_it_asks_for_and_its_memory_holds_the_cache() -> None:
    resources = POD_CONTAINER["resources"]
    assert resources["requests"] == resources["limits"]
    assert int(resources["limits"]["cpu"]) >= 2, "whole cores; one is the front end's"
    cache = int(CONTAINERS["kubernetes"].environment["VLLM_CPU_KVCACHE_SPACE"]) * 2**30
    (shared,) = [
        volume["emptyDir"]["sizeLimit"]
        for volume in POD["spec"]["volumes"]
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    ]
    assert amount(resources["limits"]["memory"]) >= cache + amount(shared)


# --- the document --------------------------------------------------------------------------------


def test_the_document_names_the_files_that_are_there() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for path in FOLDER.iterdir():
        assert path.name.removesuffix(".dockerignore") in text
    for name in re.findall(r"(?:configs|tests|scripts|docs)/[\w./-]*\w", text):
        assert (REPOSITORY / name).exists(), name
    for name in re.findall(r"\]\(([^)#]+)", text):
        assert (DOCUMENT.parent / name).exists(), name
    assert "parsed, not run" in text
