"""Shards read from a real S3 server and from nginx, while connections and the server break.

The rows must be those of a run over the same shards on the disk, one by one.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.fixtures import make_photo_shard
from scripts.cluster.fault_proxy import Fault, FaultProxy
from scripts.cluster.nginx import Nginx
from scripts.cluster.result import Result
from scripts.cluster.seaweed import ADMIN, READER, Seaweed
from tests.commands import captionjob, start

NUM_SHARDS = 6
SAMPLES = 60
BUCKET = "shards"
SLOW_BYTES = 40_000  # a second, of each connection: two seconds a shard
PATIENCE = {
    "CAPTIONJOB_STALL_SECONDS": "2",
    "CAPTIONJOB_MAX_WAIT_SECONDS": "5",
    "CAPTIONJOB_ATTEMPTS": "12",
    "NO_PROXY": "*",
}
Rows = dict[tuple[str, int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Bench:
    """Shards on a disk, and the rows that an untroubled run makes of them."""

    folder: Path
    wanted: Rows

    @classmethod
    def make(cls, folder: Path) -> Bench:
        """Make the shards and caption them from the disk."""
        shards = folder / "shards"
        shards.mkdir(parents=True, exist_ok=True)
        for number in range(NUM_SHARDS):
            make_photo_shard(shards / f"{number}.tar", SAMPLES, seed=1000 * number)
        done = captionjob(*words(str(shards), "local"), cwd=folder)
        if done.returncode:
            raise RuntimeError(f"the untroubled run failed: {done.stderr}")
        return cls(folder, rows_of(folder / "local"))

    @property
    def shards(self) -> list[Path]:
        """The files."""
        return sorted((self.folder / "shards").iterdir())

    def faults(self, out: str) -> list[str]:
        """Hold the rows of `out` against the wanted ones."""
        found = rows_of(self.folder / out)
        lost = self.wanted.keys() - found.keys()
        other = [key for key, row in found.items() if self.wanted.get(key) != row]
        return [
            f"{len(keys)} rows {name}, such as {min(keys)}"
            for name, keys in (("lost", lost), ("other", other))
            if keys
        ]

    def run(
        self, name: str, out: str, pattern: str, environment: Mapping[str, str], *more: str
    ) -> Result:
        """Run to the end, and say what the rows are like."""
        began = time.monotonic()
        done = captionjob(*words(pattern, out), *more, cwd=self.folder, extra=environment)
        return self.result(name, out, done.returncode, done.stderr, began)

    def result(self, name: str, out: str, code: int, said: str, began: float) -> Result:
        """Return the result of a run that ended."""
        found = self.faults(out)
        found += [f"exit code {code}: {said.strip().splitlines()[-1]}"] if code else []
        found += ["a traceback"] if "Traceback" in said else []
        found += ["a secret was told"] if tells_secret(said, self.folder / out) else []
        retries = said.count("again: ")
        return Result(
            name=name,
            is_ok=not found,
            rows=len(rows_of(self.folder / out)),
            retries=retries,
            seconds=time.monotonic() - began,
            seconds_lost=0.0,
            detail="; ".join(found) or f"{retries} requests made again, rows as from the disk",
        )


def s3_in(workdir: Path, *, binary: Path | None = None) -> Result:
    """Read shards from S3 through everything that can break; the parts' results made one."""
    return _together("shards from S3", s3_runs(workdir, binary))


def http_in(workdir: Path) -> Result:
    """Read shards from nginx through a proxy that hurts; the parts' results made one."""
    return _together("shards from HTTP", http_runs(workdir))


def hurts(size: int) -> list[Fault | None]:
    """Return a plan under which each way to break comes early, in the middle and near the end."""
    third, half, late = size // 3, size // 2, size - 5000
    return [
        *(Fault("fin", 100), Fault("rst", third), Fault("stall", half)),
        *(Fault("fin", half), Fault("rst", 100), Fault("stall", 2000)),
        *(Fault("fin", late), Fault("rst", half), Fault("stall", third)),
    ]


def s3_runs(workdir: Path, binary: Path | None = None) -> Iterator[Result]:
    """Untroubled; connections broken; the server killed and back; a wrong secret."""
    bench = Bench.make(workdir)
    pattern = f"s3://{BUCKET}/{{0..{NUM_SHARDS - 1}}}.tar"
    with Seaweed(workdir, binary=binary) as store:
        store.make_bucket(BUCKET)
        client = store.client()
        for path in bench.shards:
            client.put_object(Bucket=BUCKET, Key=path.name, Body=path.read_bytes())
        size = bench.shards[0].stat().st_size
        reader = {**store.environment(READER), **PATIENCE}
        calm = bench.run("S3, untroubled", "s3", f"s3://{BUCKET}/", reader)
        yield calm
        with FaultProxy(("127.0.0.1", store.port), hurts(size)) as proxy:
            hurt = {**reader, "AWS_ENDPOINT_URL": proxy.endpoint}
            result = bench.run("S3, cuts, resets, stalls", "s3-hurt", pattern, hurt)
            yield _with_faults(result, proxy, calm)
        yield _killed(bench, store, pattern, reader)
        yield _wrong_secret(bench, store, pattern)


def http_runs(workdir: Path) -> Iterator[Result]:
    """Untroubled; connections broken; the same with a spool; a slow server, without and with."""
    bench = Bench.make(workdir)
    with Nginx(workdir / "nginx", workdir / "shards") as server:
        names = f"{{0..{NUM_SHARDS - 1}}}.tar"
        calm = bench.run("HTTP, untroubled", "http", f"{server.url}/{names}", PATIENCE)
        yield calm
        plan = hurts(bench.shards[0].stat().st_size)
        with FaultProxy(("127.0.0.1", server.port), plan) as proxy:
            url = f"{proxy.endpoint}/{names}?X-Amz-Signature={ADMIN.secret}"
            result = bench.run("HTTP, cuts, resets, stalls", "http-hurt", url, PATIENCE)
            yield _with_faults(result, proxy, calm)
        with FaultProxy(("127.0.0.1", server.port), plan) as proxy:
            url = f"{proxy.endpoint}/{names}?X-Amz-Signature={ADMIN.secret}"
            spool = ("--spool", str(workdir / "spool"))
            result = bench.run("HTTP, the same with --spool", "http-spool", url, PATIENCE, *spool)
            yield _with_faults(result, proxy, calm)
        yield from _slow(bench, server, names, workdir)


def _slow(bench: Bench, server: Nginx, names: str, workdir: Path) -> Iterator[Result]:
    """Read from a server that gives each connection little, as the weights load for a while too."""
    target = ("127.0.0.1", server.port)
    with FaultProxy(target, bytes_per_second=SLOW_BYTES) as proxy:
        url, load = f"{proxy.endpoint}/{names}", ("--model", "scripted:load=3")
        plain = bench.run("HTTP, a slow server", "http-slow", url, PATIENCE, *load)
        yield plain
        spool = ("--spool", str(workdir / "spool"))
        name = "HTTP, a slow server with --spool"
        result = bench.run(name, "http-slow-spool", url, PATIENCE, *load, *spool)
        gained = f"{plain.seconds:.1f} s without a spool, {result.seconds:.1f} s with one"
        is_ok = result.is_ok and result.seconds < plain.seconds
        yield replace(result, is_ok=is_ok, detail=f"{gained}; {result.detail}")


def _killed(bench: Bench, store: Seaweed, pattern: str, reader: Mapping[str, str]) -> Result:
    """Kill the server in the middle of a run, and start it again on the same data."""
    began = time.monotonic()
    slow = words(pattern, "s3-killed", model="scripted:latency=0.1")
    with _running(slow, bench.folder, {**reader, "CAPTIONJOB_ATTEMPTS": "20"}) as process:
        deadline = time.monotonic() + 60
        while not list((bench.folder / "s3-killed").glob("*.parquet")):
            if time.monotonic() > deadline or process.poll() is not None:
                break
            time.sleep(0.05)
        store.kill()
        down = time.monotonic()
        time.sleep(3)
        store.start()
        away = time.monotonic() - down
        _, said = process.communicate(timeout=180)
    result = bench.result("", "s3-killed", process.returncode, said, began)
    return replace(
        result,
        name=f"S3, server killed, back after {away:.0f} s",
        is_ok=result.is_ok and result.retries > 0,
        seconds_lost=away,
    )


def _wrong_secret(bench: Bench, store: Seaweed, pattern: str) -> Result:
    """Ask with a secret that is not the user's: one line, exit code 2, nothing written."""
    began = time.monotonic()
    wrong = {**store.environment(READER, secret="wrong-secret-0003"), **PATIENCE}
    done = captionjob(*words(pattern, "s3-wrong"), cwd=bench.folder, extra=wrong)
    lines = done.stderr.strip().splitlines()
    is_ok = (
        done.returncode == 2
        and len(lines) == 1
        and "wrong-secret" not in done.stderr
        and not (bench.folder / "s3-wrong").exists()
    )
    detail = lines[-1] if lines else "no message"
    return Result("S3, wrong secret", is_ok, 0, 0, time.monotonic() - began, 0.0, detail)


def _with_faults(result: Result, proxy: FaultProxy, calm: Result) -> Result:
    """Add how often the proxy struck; a run that was never hurt has proven nothing."""
    return replace(
        result,
        is_ok=result.is_ok and not proxy.plan and result.retries > 0,
        seconds_lost=max(0.0, result.seconds - calm.seconds),
        detail=f"{proxy.num_faults} connections broken; {result.detail}",
    )


def _together(name: str, parts: Iterator[Result]) -> Result:
    """Return one result for all parts: all rows, all retries, the first thing that went wrong."""
    results = []
    for one in parts:
        print(f"  {'ok' if one.is_ok else 'NOT OK'}: {one.name}: {one.detail}", flush=True)
        results.append(one)
    bad = [f"{one.name}: {one.detail}" for one in results if not one.is_ok]
    return Result(
        name=name,
        is_ok=not bad,
        rows=sum(one.rows for one in results),
        retries=sum(one.retries for one in results),
        seconds=sum(one.seconds for one in results),
        seconds_lost=sum(one.seconds_lost for one in results),
        detail="; ".join(bad) or f"{len(results)} runs: " + ", ".join(one.name for one in results),
    )


@contextmanager
def _running(
    options: list[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    process = start(options, folder, environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def words(pattern: str, out: str, model: str = "scripted") -> list[str]:
    """Return the words of a run."""
    return [
        *("run", "--shards", pattern, "--out", out, "--model", model, "--keep", "txt"),
        *("--commit-rows", "16", "--commit-seconds", "1", "--slots", "8"),
    ]


def rows_of(out: Path) -> Rows:
    """Return all rows under final names by shard and index; the shard by its file's name alone."""
    rows: Rows = {}
    for path in sorted(out.glob("*.parquet")):
        for row in pq.read_table(path, partitioning=None).to_pylist():
            name = str(row["shard"]).rpartition("-")[0]
            key = (name, int(row["index"]))
            assert key not in rows, f"{key} twice"
            rows[key] = {**row, "shard": name}
    return rows


def tells_secret(said: str, out: Path) -> bool:
    """Whether a secret stands in what was said or written."""
    secrets = (ADMIN.secret, READER.secret)
    texts = [said, *(p.read_bytes().decode("latin-1") for p in out.rglob("*.*") if p.is_file())]
    return any(secret in text for secret in secrets for text in texts)
