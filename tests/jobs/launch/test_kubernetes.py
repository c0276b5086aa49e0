"""The Kubernetes launcher prints a manifest that the API's schema takes, or says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jobs.launch.yaml_text import yaml_text
from jobs.stopping import EXIT_AGAIN
from tests.commands import REPOSITORY, captionjob

RUN = ("--", "--shards", "/data/shards/*.tar", "--out", "/data/captions")
VERSIONS = ("1.31", "1.33", "1.36")  # of the API; the rules per index are in all of them
RICH = (
    *("--pvc=data:/data", "--pvc=photos:/photos:ro", "--secret=s3-keys", "--env=HF_HOME=/data/hf"),
    *("--node-selector=gpu.kind/name=a100", "--namespace=team", "--max-running=8", "--gpus=1"),
)


def manifest(here: Path, *options: str, run: tuple[str, ...] = RUN) -> dict[str, Any]:
    words = ("launch", "kubernetes", "--completions=64", "--image=registry/captionjob:1")
    done = captionjob(*words, *options, *run, cwd=here)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    assert isinstance(found, dict)
    return found


def container(found: dict[str, Any]) -> dict[str, Any]:
    (only,) = found["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("options", [("--pvc=data:/data",), RICH])
def test_the_schema_of_the_api_takes_the_manifest(tmp_path: Path, options: tuple[str, ...]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not there")
    found = manifest(tmp_path, *options)
    for version in VERSIONS:
        validate.validate(found, version, strict=True)
    found["spec"]["completions"] = "64"
    with pytest.raises(validate.ValidationError):
        validate.validate(found, VERSIONS[0], strict=True)


def test_exit_75_and_evictions_are_not_counted_and_a_wrong_request_fails_the_job(
    tmp_path: Path,
) -> None:
    spec = manifest(tmp_path, "--pvc=data:/data", "--retries=5")["spec"]
    rules = spec["podFailurePolicy"]["rules"]  # the first one that fits counts
    codes = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules[:2]}
    assert codes == {EXIT_AGAIN: "Ignore", 2: "FailJob"}
    assert rules[2]["action"] == "Ignore"
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["backoffLimitPerIndex"] == 5
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # or the policy would be refused
    name = container({"spec": spec})["name"]
    assert all(rule["onExitCodes"]["containerName"] == name for rule in rules[:2])


def test_each_worker_is_told_how_many_there_are_and_has_the_time_to_commit(tmp_path: Path) -> None:
    found = manifest(tmp_path, *RICH, run=(*RUN, "--grace-seconds=45"))
    spec = found["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 64, 8)
    env = {one["name"]: one["value"] for one in container(found)["env"]}
    assert env == {"CAPTIONJOB_WORLD_SIZE": "64", "HF_HOME": "/data/hf"}
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 45


def test_volumes_secrets_and_gpus_reach_the_container(tmp_path: Path) -> None:
    found = manifest(tmp_path, *RICH)
    one = container(found)
    mounts = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in found["spec"]["template"]["spec"]["volumes"]
    }
    assert claims[mounts["/data"]["name"]] == "data"
    assert claims[mounts["/photos"]["name"]] == "photos"
    assert mounts["/photos"]["readOnly"] is True
    assert one["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert one["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_rows_that_go_to_a_store_need_no_volume(tmp_path: Path) -> None:
    run = ("--", "--shards", "s3://bucket/*.tar", "--out", "s3://bucket/captions")
    spec = manifest(tmp_path, "--secret=s3-keys", run=run)["spec"]["template"]["spec"]
    assert "volumes" not in spec
    assert spec["containers"][0]["args"] == ["run", *run[1:]]


def test_a_prompt_reaches_the_worker_letter_by_letter(tmp_path: Path) -> None:
    """Kubernetes fills in $(NAME), and makes one $ of two."""
    prompt = 'Say "yes": $(HOME) $$ {json.title} naïve\n- # \x07 no'
    args = container(manifest(tmp_path, *RICH, run=(*RUN, "--prompt", prompt)))["args"]
    assert args[:-1] == ["run", *RUN[1:], "--prompt"]
    assert args[-1].replace("$$", "$") == prompt
    assert "$(" not in args[-1].replace("$$", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pvc=data:/elsewhere", *RUN], "--out '/data/captions' is in no --pvc"),
        (
            ["--pvc=data:/data:ro", *RUN],
            "--out '/data/captions' is in no --pvc that can be written",
        ),
        (["--pvc=data", *RUN], "--pvc is 'data'"),
        (["--pvc=data:/data", "--", *RUN[1:3], "--out", "out"], "--out 'out' is relative"),
        (["--pvc=data:/data", "--", "--shards=a.tar", *RUN[3:]], "--shards 'a.tar' is relative"),
        (["--pvc=data:/data", *RUN, "--world-size=3"], "--world-size goes with no launcher"),
        (["--pvc=data:/data", *RUN, "--slots=0"], "--slots is 0"),
        (["--name=Caption_Job", *RUN], "--name is 'Caption_Job'"),
        (["--memory=lots", *RUN], "--memory is 'lots'"),
        (["--image=a b", *RUN], "--image is 'a b'"),
        (["--env=AWS_SECRET_ACCESS_KEY=hush", *RUN], "a secret would stand in the manifest"),
        (["--env=A", *RUN], "--env is 'A'"),
        (["--node-selector=A", *RUN], "--node-selector is 'A'"),
    ],
)
def test_a_wrong_request_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    start = ("launch", "kubernetes", "--completions=4", "--image=captionjob")
    done = captionjob(*start, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert not done.stdout
    assert message in done.stderr
    assert "hush" not in done.stderr
    assert done.stderr.count("\n") == 1


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
DATA = st.recursive(
    TEXT | st.integers() | st.booleans(),
    lambda inner: (
        st.lists(inner, min_size=1)
        | st.dictionaries(st.from_regex(r"[a-z][a-z./-]{0,9}k", fullmatch=True), inner, min_size=1)
    ),
)


@given(DATA)
def test_a_reader_of_yaml_gets_back_what_was_written(data: Any) -> None:
    assert yaml.safe_load(yaml_text(data)) == data


def test_the_container_file_installs_this_package_and_runs_its_command() -> None:
    lines = (REPOSITORY / "scripts" / "Containerfile").read_text().splitlines()
    words = " ".join(line.rstrip("\\").strip() for line in lines if not line.startswith("#"))
    for name in ("constraints.txt", "pyproject.toml", "pipeline", "jobs", "README.md", "LICENSE"):
        assert name in words
        assert (REPOSITORY / name).exists()
    assert 'ENTRYPOINT ["captionjob"]' in words
    assert "USER 1000" in words
