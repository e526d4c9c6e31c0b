"""What a checkpoint's `generation_config.json` says about sampling, for requests that say nothing themselves.

Taken are the five numbers that SGLang takes. do_sample is not read, as by other servers: a temperature is one, whether
transformers would use it or not. At which tokens an answer ends is read in `eos.py`, always.
"""

from pathlib import Path

from tandem.engine.documents import Fields, read_json
from tandem.sampling import SamplingDefaults

NAME = "generation_config.json"
MOST_TOP_K = (1 << 31) - 1


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Those of no checkpoint in particular where the file, or a field, is absent. Raises ModelError for numbers that no
    request could ask for.
    """
    given = Fields(NAME, read_json(model_dir / NAME, optional=True))
    usual = SamplingDefaults()
    return SamplingDefaults(
        temperature=given.number("temperature", least=0, most=100, default=usual.temperature),
        top_k=max(given.integer("top_k", least=-1, most=MOST_TOP_K, default=usual.top_k), 0),
        top_p=given.number("top_p", least=1e-6, most=1, default=usual.top_p),
        min_p=given.number("min_p", least=0, most=1, default=usual.min_p),
        repetition_penalty=given.number("repetition_penalty", least=1e-6, most=2, default=usual.repetition_penalty),
    )
