"""`tandem serve MODEL`: one server, unified, prefill or decode."""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from tandem.cli.failure import CommandFailed
from tandem.cli.flags import add_flags, config_of
from tandem.cli.model_source import find_model
from tandem.config import ServerConfig
from tandem.engine.generation_config import read_sampling_defaults
from tandem.engine.model_config import ModelError, read_config, read_json
from tandem.sampling import SamplingDefaults
from tandem.server import logs
from tandem.server.api.facts import ModelFacts
from tandem.server.exposure import open_to_others
from tandem.server.processes import STOP_SIGNALS, ServerFailure, bind_listeners
from tandem.server.start import serve, with_ports

logger = logging.getLogger("tandem.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory or hub name; tandem/mini is bundled")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end_at_once)  # until the API process drains, which is soon
    config = config_of(args)
    model_dir = find_model(config.model)
    model = read_facts(model_dir, config)
    logs.set_up(config.log_format, process="api")
    if model.sampling_defaults != SamplingDefaults():
        logger.info("for requests that do not say, generation_config.json does: %s", model.sampling_defaults)
    try:
        listeners = bind_listeners(config)
        for warning in (open_to_others(config), more_workers_than_cores(config)):
            if warning is not None:
                logger.warning(warning)
        try:
            serve(with_ports(config, listeners), listeners, model)
        finally:
            listeners.close()
    except ServerFailure as failure:
        raise CommandFailed(str(failure)) from failure
    return 0


def end_at_once(number: int, _frame: object) -> None:
    """For a signal before there is anything to drain; the kernel ends the children with us.

    Why not an exception: where it is raised, in a finalizer or a callback, it may be swallowed, and nobody ends.
    """
    os.write(sys.stderr.fileno(), b"tandem: interrupted\n")
    os._exit(1)


def more_workers_than_cores(config: ServerConfig) -> str | None:
    """The sentence for the log, if there is reason for one."""
    num_cores = len(os.sched_getaffinity(0))
    if config.num_workers <= num_cores:
        return None
    sizes = f"--tp-size {config.tp_size} x --pp-size {config.pp_size} x --dp-size {config.dp_size}"
    return (
        f"{config.num_workers} workers ({sizes}) share {num_cores} cores: "
        "they wait for each other and are slower than fewer"
    )


def read_facts(model_dir: Path, config: ServerConfig) -> ModelFacts:
    """What is wrong with a directory is found before anything starts. Raises CommandFailed."""
    try:
        raw = read_json(model_dir / "config.json")
        model = read_config(model_dir)
        takes_models = config.sampling_defaults == "model"
        defaults = read_sampling_defaults(model_dir) if takes_models else SamplingDefaults()
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    context = model.max_context if config.context_length is None else config.context_length
    if not 1 <= context <= model.max_context:
        raise CommandFailed(
            f"--context-length {context} is not between 1 and the model's {model.max_context} tokens; leave it out",
            is_wrong_usage=True,
        )
    return ModelFacts(
        model_path=str(model_dir.resolve()),
        architectures=[model.architecture],
        model_type=str(raw.get("model_type", "")),
        context_length=context,
        page_size=config.page_size,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_ids),
        dtype=config.dtype if config.dtype != "auto" else str(model.stored_dtype or "auto"),
        sampling_defaults=defaults,
    )
