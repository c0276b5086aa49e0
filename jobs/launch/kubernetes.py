"""A Kubernetes Indexed Job: one pod a worker, each with its index, started again as it ends.

    exit 75          stopped with all committed       a new pod, not counted
    DisruptionTarget evicted, preempted, drained      a new pod, not counted
    exit 2           the request is wrong             the whole job fails at once
    anything else    a crash, or shards that failed   a new pod, --retries times a worker

An index goes to one pod at a time, rarely to two; both then make the same rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from jobs.launch.run_words import RunWords, shell_line
from jobs.launch.yaml_text import Data, yaml_text
from jobs.ranks import WORLD_SIZE
from jobs.result import EXIT_REQUEST
from jobs.stopping import EXIT_AGAIN
from pipeline.errors import RequestError

MARGIN_SECONDS = 10  # beyond a worker's own grace, before it is killed
GROUP = 1000  # of the user in our image, so that it may write to a volume
CONTAINER = "captionjob"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?")  # room for -INDEX and a suffix in 63
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")
_VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*):(/[^:]+)(:ro)?")
_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]*)=([A-Za-z0-9._-]*)")


@dataclass(frozen=True, slots=True)
class Volume:
    """A persistent volume claim, and where the pods see it."""

    claim: str
    path: str
    is_read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Read `NAME:/path` or `NAME:/path:ro`."""
        match = _VOLUME.fullmatch(text)
        if match is None:
            raise RequestError(f"--pvc is {text!r}; wanted NAME:/path or NAME:/path:ro")
        return cls(match[1], match[2], bool(match[3]))

    def holds(self, path: str) -> bool:
        """True if a path lies in the volume."""
        return PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """What is asked of the cluster."""

    completions: int
    image: str
    name: str = "captionjob"
    namespace: str | None = None
    max_running: int | None = None
    gpus: int = 0
    cpus: str = "4"
    memory: str = "16Gi"
    volumes: tuple[Volume, ...] = ()
    secrets: tuple[str, ...] = ()  # whose keys become variables, such as AWS_ACCESS_KEY_ID
    env: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    retries: int = 3

    def __post_init__(self) -> None:
        for option, value in (
            ("--name", self.name),
            ("--namespace", self.namespace),
            *(("--secret", secret) for secret in self.secrets),
        ):
            if value is not None and not _NAME.fullmatch(value):
                raise RequestError(f"{option} is {value!r}; wanted a-z, 0-9 and -, 53 at most")
        for option, value in (("--cpus", self.cpus), ("--memory", self.memory)):
            if not _QUANTITY.fullmatch(value):
                raise RequestError(f"{option} is {value!r}; wanted a quantity such as 4 or 16Gi")
        if not self.image or not self.image.isprintable() or " " in self.image:
            raise RequestError(f"--image is {self.image!r}; wanted a name such as HOST/NAME:TAG")
        for text in self.node_selector:
            if not _LABEL.fullmatch(text):
                raise RequestError(f"--node-selector is {text!r}; wanted LABEL=VALUE")
        for text in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", text):
                raise RequestError(f"--env is {text!r}; wanted NAME=VALUE")
            if re.search("SECRET|PASSWORD|TOKEN", text.partition("=")[0], re.IGNORECASE):
                raise RequestError(
                    f"--env {text.partition('=')[0]}: a secret would stand in the manifest for "
                    "all to read; wanted --secret NAME of a Kubernetes Secret that holds it"
                )


def kubernetes_manifest(settings: KubernetesSettings, run: RunWords) -> str:
    """Return the manifest of the job, with the commands to use it as comments.

    Raises RequestError for a path that no pod would see, or that would end with the pod.
    """
    run.need_absolute("a pod")
    out = str(run.options["out"])
    writable = (volume for volume in settings.volumes if not volume.is_read_only)
    if "://" not in out and not any(volume.holds(out) for volume in writable):
        raise RequestError(
            f"--out {out!r} is in no --pvc that can be written: its rows would end with their pod"
        )
    namespace = f" -n {settings.namespace}" if settings.namespace else ""
    verify = shell_line(["captionjob", "verify", *run.verify_words]).replace("\n", " ")
    comments = (
        f"kubectl apply{namespace} -f FILE",
        f"kubectl wait{namespace} --for=condition=Complete --timeout=-1s job/{settings.name}",
        f"{verify}    # where OUT is seen",
        "Apply it again (after kubectl delete) to go on: what is committed is not made again.",
    )
    return "".join(f"# {line}\n" for line in comments) + yaml_text(_job(settings, run))


def _job(settings: KubernetesSettings, run: RunWords) -> Data:
    labels: dict[str, Data] = {"app.kubernetes.io/name": settings.name}
    metadata: dict[str, Data] = {"name": settings.name, "labels": labels}
    if settings.namespace:
        metadata["namespace"] = settings.namespace
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": settings.completions,
            "parallelism": min(settings.completions, settings.max_running or settings.completions),
            "backoffLimitPerIndex": settings.retries,
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {"metadata": {"labels": labels}, "spec": _pod(settings, run)},
        },
    }


def _failure_rules() -> list[Data]:
    def on_exit(code: int, action: str) -> Data:
        codes: Data = {"containerName": CONTAINER, "operator": "In", "values": [code]}
        return {"action": action, "onExitCodes": codes}

    disruption: Data = [{"type": "DisruptionTarget", "status": "True"}]
    return [
        on_exit(EXIT_AGAIN, "Ignore"),
        on_exit(EXIT_REQUEST, "FailJob"),
        {"action": "Ignore", "onPodConditions": disruption},
    ]


def _pod(settings: KubernetesSettings, run: RunWords) -> Data:
    grace = run.config.limits.grace_seconds
    pod: dict[str, Data] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(grace) + MARGIN_SECONDS,
        "securityContext": {"fsGroup": GROUP},
        "containers": [_container(settings, run)],
    }
    if settings.node_selector:
        pairs = (text.partition("=") for text in settings.node_selector)
        pod["nodeSelector"] = {key: value for key, _, value in pairs}
    if settings.volumes:
        pod["volumes"] = [
            {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}}
            for number, volume in enumerate(settings.volumes)
        ]
    return pod


def _container(settings: KubernetesSettings, run: RunWords) -> Data:
    size = {WORLD_SIZE: str(settings.completions)}
    env = size | {name: value for name, _, value in (text.partition("=") for text in settings.env)}
    needs: dict[str, Data] = {"cpu": settings.cpus, "memory": settings.memory}
    limits: dict[str, Data] = {"memory": settings.memory}
    if settings.gpus:
        limits["nvidia.com/gpu"] = settings.gpus
    container: dict[str, Data] = {
        "name": CONTAINER,
        "image": settings.image,
        "command": ["captionjob"],
        "args": [_literal(word) for word in ("run", *run.words)],
        "env": [{"name": name, "value": _literal(value)} for name, value in env.items()],
        "resources": {"requests": needs, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if settings.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in settings.secrets]
    if settings.volumes:
        container["volumeMounts"] = [
            {
                "name": f"volume-{number}",
                "mountPath": volume.path,
                **({"readOnly": True} if volume.is_read_only else {}),
            }
            for number, volume in enumerate(settings.volumes)
        ]
    return container


def _literal(text: str) -> str:
    """Keep `$(NAME)` in a prompt from being filled in: Kubernetes makes one $ of two."""
    return text.replace("$", "$$")
