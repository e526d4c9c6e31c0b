"""`tandem serve MODEL`: one server, unified, prefill or decode."""

import argparse
import dataclasses
import logging
import os
import signal
import sys
from pathlib import Path

from tandem import cgroups
from tandem.cli.failure import CommandFailed
from tandem.cli.flags import add_flags, config_of
from tandem.cli.model_source import find_model
from tandem.config import ServerConfig, violations
from tandem.engine.generation_config import read_sampling_defaults
from tandem.engine.model_config import (
    ModelConfig,
    ModelError,
    check_heads,
    check_layers,
    page_tokens,
    read_config,
    read_json,
)
from tandem.environment import misspelt
from tandem.flag_roles import (
    STATES,
    TRANSFORMERS,
    impossible,
    impossible_with_blocks,
    without_effect,
    without_effect_on_encoders,
)
from tandem.sampling import SamplingDefaults
from tandem.server import fault_records, keys, logs
from tandem.server.api.limits import Task
from tandem.server.api.model_facts import ModelFacts
from tandem.server.exposure import open_to_others
from tandem.server.hosts.follower import follow
from tandem.server.processes import STOP_SIGNALS, ServerFailure, bind_listeners, cluster_secret
from tandem.server.start import serve, with_ports
from tandem.server.tracing import TracingRefused
from tandem.server.whole_pages import window_tokens, without_effect_on_windows

logger = logging.getLogger("tandem.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "Hugging Face directory, hub name or GGUF file; tandem/mini is bundled"
    parser.add_argument("model", metavar="MODEL", help=what)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end_at_once)  # until the API process drains, which is soon
    config = config_of(args)
    model_dir = find_model(config.model)
    model = read_facts(model_dir, config)
    config = for_task(config, model)
    if (complaint := fault_records.complaint(config.fault_records)) is not None:
        raise CommandFailed(complaint)
    logs.set_up(config.log_format, process="api" if config.node_rank == 0 else f"host {config.node_rank}")
    if model.library:
        logger.info("%s is not one of Tandem's own: %s computes its layers", model.architectures[0], model.library)
    if model.sampling_defaults != SamplingDefaults():
        logger.info("for requests that do not say, generation_config.json does: %s", model.sampling_defaults)
    try:
        if config.node_rank > 0:
            follow_leader(config, model_dir)
            return 0
        listeners = bind_listeners(config)
        for warning in (open_to_others(config), more_workers_than_cores(config), *misspelt()):
            if warning is not None:
                logger.warning(warning)
        try:
            serve(with_ports(config, listeners), listeners, model)
        finally:
            listeners.close()
    except (ServerFailure, TracingRefused) as failure:
        raise CommandFailed(str(failure)) from failure
    return 0


def follow_leader(config: ServerConfig, model_dir: Path) -> None:
    """As one of several hosts. Raises ServerFailure."""
    secret = cluster_secret(config)
    assert secret is not None, "a server on several hosts has one"
    keys.forget_environment()  # which the workers inherit
    if (warning := more_workers_than_cores(config)) is not None:
        logger.warning(warning)
    follow(config, model_dir, secret)


def end_at_once(number: int, _frame: object) -> None:
    """For a signal before there is anything to drain; the kernel ends the children with us.

    Why not an exception: where it is raised, in a finalizer or a callback, it may be swallowed, and nobody ends.
    """
    try:
        os.write(sys.stderr.fileno(), b"tandem: interrupted\n")
    finally:
        os._exit(1)  # also where nobody reads that


def more_workers_than_cores(config: ServerConfig) -> str | None:
    """The sentence for the log, if there is reason for one."""
    num_cores = cgroups.num_cores()
    if config.num_workers_here <= num_cores:
        return None
    sizes = config.sizes if config.nnodes == 1 else f"{config.sizes} / --nnodes {config.nnodes}"
    return (
        f"{config.num_workers_here} workers ({sizes}) share {num_cores} cores: "
        "they wait for each other and are slower than fewer"
    )


def for_task(config: ServerConfig, model: ModelFacts) -> ServerConfig:
    """As it is with what the model can do. Raises CommandFailed for flags that do not go with that."""
    makes_vectors = config.is_embedding or model.task is not Task.TOKENS
    config = dataclasses.replace(config, is_embedding=makes_vectors, page_size=model.page_size)
    complaints = [*violations(config), *without_effect(config)]
    if model.is_encoder:
        complaints += without_effect_on_encoders(config)
    else:
        complaints += without_effect_on_windows(config, model.window)
    if model.has_states:
        complaints += impossible(config, STATES)
    if model.library:
        complaints += impossible(config, TRANSFORMERS)
    complaints += impossible_with_blocks(config, model.block_tokens)
    if model.block_tokens > 1 and model.sampling_defaults.repetition_penalty != 1.0:
        complaints.append(
            "generation_config.json has a repetition_penalty, which models of block diffusion have not: "
            "give --sampling-defaults openai"
        )
    if complaints:
        raise CommandFailed("; ".join(complaints), is_wrong_usage=True)
    return config


def task_of(model: ModelConfig) -> Task:
    if model.pooling is None:
        return Task.TOKENS
    return Task.SCORES if model.encoder is not None and model.encoder.scores else Task.EMBEDDINGS


def read_chat_template(given: str | None) -> str:
    """What `--chat-template` names, or is, as vLLM has it. Raises CommandFailed."""
    if given is None or "{" in given:
        return given or ""
    try:
        path = Path(given).expanduser()
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # the last: of somebody whose home is not known
        raise CommandFailed(f"--chat-template {given} cannot be read: {error}") from error
    if path.suffix == ".json" or "{" not in text:  # SGLang's form of conversations, or a text that says nothing of them
        raise CommandFailed(f"--chat-template {given} is no Jinja template")
    return text


def read_facts(model_dir: Path, config: ServerConfig) -> ModelFacts:
    """What is wrong with a directory is found before anything starts. Raises CommandFailed."""
    try:
        raw = read_json(model_dir / "config.json")
        model = read_config(model_dir, is_embedding=config.is_embedding)
        check_heads(model.num_heads, 1 if config.enable_dp_attention else config.tp_size)
        check_layers(model.num_layers, config.pp_size)
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
        page_size=config.page_size if config.page_size is not None else page_tokens(model),
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_ids),
        dtype=config.dtype if config.dtype != "auto" else str(model.stored_dtype or "auto"),
        sampling_defaults=defaults,
        chat_template="" if config.node_rank else read_chat_template(config.chat_template),
        task=task_of(model),
        dimensions=model.hidden_size,
        is_encoder=model.encoder is not None,
        has_states=model.state_space is not None,
        library=model.transformers.library if model.transformers is not None else "",
        block_tokens=1 if model.blocks is None else model.blocks.block_tokens,
        window=window_tokens(model),
    )
