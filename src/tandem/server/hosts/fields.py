"""What a host tells of itself when it joins: the flags, environment and model that all hosts of a server need alike."""

import hashlib
from pathlib import Path

from tandem import __version__
from tandem.config import ServerConfig, flags
from tandem.environment import HEARTBEAT_INTERVAL, HEARTBEAT_MAX_FAILURE, environment_number

# Of one host only: where it is and listens, who may read its files, what it writes down, and how many cores it has.
OF_ONE_HOST = frozenset(
    {"host", "port", "disaggregation_bootstrap_port", "node_rank", "dist_init_addr"}
    | {"api_key", "api_key_file", "admin_api_key", "admin_api_key_file", "cluster_secret_file"}
    | {"chat_template"}  # chats are rendered where clients speak
    | {"log_format", "flight_record", "flight_record_max_bytes", "fault_records", "cpu_threads"}
)


def fields_of(config: ServerConfig, model_dir: Path) -> dict[str, str]:
    """By names for people. Weights are compared when they are loaded; here only their files. Raises OSError."""
    told = {name: str(getattr(config, field.name)) for name, field in flags() if field.name not in OF_ONE_HOST}
    for variable in (HEARTBEAT_INTERVAL, HEARTBEAT_MAX_FAILURE):
        told[f"TANDEM_{variable.name}"] = f"{environment_number(variable):g}"
    return told | {
        "the version of tandem": __version__,
        "config.json of the model": hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest()[:16],
        "the weight files of the model": _weight_files(model_dir),
    }


def _weight_files(model_dir: Path) -> str:
    sizes = sorted(f"{path.name} {path.stat().st_size}" for path in model_dir.glob("*.safetensors"))
    return f"{len(sizes)} files, {hashlib.sha256(chr(10).join(sizes).encode()).hexdigest()[:16]}"
