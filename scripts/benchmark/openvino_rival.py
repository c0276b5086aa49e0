"""OpenVINO by optimum-intel: the strongest rival on processors, in an environment of its own.

It wants older versions of transformers than captionjob's own, so the environment is built on
demand in the work folder, and a worker process there is asked batch by batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from scripts.benchmark.clock import clock_name
from scripts.benchmark.shapes import EOS_ID, NetworkShape
from scripts.benchmark.workload import Workload, left_padded, scaled_pixels, until_end

PACKAGES = ("optimum-intel[openvino]==2.2.*", "transformers==4.57.6")
WORKER = Path(__file__).with_name("openvino_worker.py")


class NotAvailable(Exception):  # noqa: N818
    """The rival cannot run here; the text says why, in one line."""


def environment(work: Path) -> Path:
    """Return the Python of OpenVINO's environment; build it the first time, in some minutes."""
    folder = work / "openvino-environment"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.is_file():
        return python
    print("installing OpenVINO into an environment of its own", file=sys.stderr, flush=True)
    version = torch.__version__.partition("+")[0]
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _do([sys.executable, "-m", "venv", "--clear", str(folder)])
    _do([*pip, "install", f"torch=={version}", *PACKAGES])
    # Wanted by processors alone, and of another build than torch it breaks every import.
    _do([*pip, "uninstall", "-y", "torchvision"])
    _do([str(python), "-c", "from optimum.intel import OVModelForVisualCausalLM"])
    stamp.touch()
    return python


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise NotAvailable(f"{' '.join(command[1:4])} failed: {last}")


class OpenVINO:
    """A worker process with the network loaded, shared by contenders."""

    def __init__(
        self,
        shape: NetworkShape,
        folder: Path,
        dtype: torch.dtype,
        work: Path,
        *,
        calibration: Workload | None = None,
    ) -> None:
        """Start the worker; with `calibration`, its 8-bit form. Raises NotAvailable."""
        kind = "f32" if dtype == torch.float32 else "bf16"
        self._shape = shape
        # Of this process alone: two runs may share a work folder.
        self._batch_file = work / f"openvino-batch-{os.getpid()}.npz"
        form = "int8" if calibration else "plain"
        exported = work / f"openvino-{form}-{folder.name}"
        command = [str(environment(work)), str(WORKER), str(folder), str(exported)]
        command += ["--precision", kind, "--threads", str(torch.get_num_threads())]
        command += ["--clock", clock_name()]
        if calibration:
            self._write(calibration)
            command += ["--int8", "--calibration", str(self._batch_file)]
        self._log = (work / f"openvino-{form}-{os.getpid()}.log").open("w")
        self._worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._read()

    def generate(self, batch: Workload) -> tuple[dict[int, tuple[int, ...]], float]:
        """Caption a static batch; returns tokens by request index, and the worker's seconds."""
        answer = self.ask("generate", batch)
        tokens = {
            request.ref.index: until_end(row, EOS_ID, batch.max_new_tokens)
            for request, row in zip(batch.requests, answer["tokens"], strict=True)
        }
        return tokens, answer["seconds"]

    def ask(self, what: str, batch: Workload) -> dict[str, Any]:
        """Let the worker `generate`, or run `vision` alone."""
        self._write(batch)
        asked = {
            "what": what,
            "batch": str(self._batch_file),
            "max_new_tokens": batch.max_new_tokens,
            "eos_id": EOS_ID,
        }
        self._pipe(self._worker.stdin).write(json.dumps(asked) + "\n")
        self._pipe(self._worker.stdin).flush()
        return self._read()

    def close(self) -> None:
        """End the worker."""
        self._pipe(self._worker.stdin).close()
        self._worker.wait()
        self._pipe(self._worker.stdout).close()
        self._log.close()
        self._batch_file.unlink(missing_ok=True)

    def _write(self, batch: Workload) -> None:
        ids, mask = left_padded(batch.requests, EOS_ID)
        pixels = scaled_pixels(self._shape, batch.requests)
        np.savez(self._batch_file, ids=ids.numpy(), mask=mask.numpy(), pixels=pixels.numpy())

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self._worker.stdout).readline()
        if not line:
            self._worker.wait()
            self._log.flush()
            lines = Path(self._log.name).read_text().strip().splitlines()
            raise NotAvailable(f"the worker ended: {lines[-1] if lines else 'no message'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "the worker was started with pipes"
        return pipe
