"""What `config.json` says of an encoder of BERT's kind, beside the sizes that all models have.

computed    hidden_act, type_vocab_size, layer_norm_eps, and of a cross-encoder its one label and what its score is
            put through
refused     unless they say what is computed anyway: `UNSUPPORTED`; classifiers of several labels, whose scores are
            no measure of how well two texts fit
silent      training and bookkeeping, as of the others (`model_config.py`), and the names of labels
"""

from dataclasses import dataclass

from tandem.engine.documents import Fields, ModelError
from tandem.logtext import shown

MOST_TYPES = 1 << 10
MOST_LABELS = 1 << 16
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # how torch approximates it
# What a score is put through, as sentence-transformers names it in either field; unless named, a sigmoid.
SCORE_FIELD = "sbert_ce_default_activation_function"
IDENTITY, SIGMOID = "Identity", "Sigmoid"
UNSUPPORTED = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "embedding_size": (None,),
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    type_vocab_size: int
    approximates_gelu: str  # as torch has it: none or tanh
    scores: bool  # it is a cross-encoder: of two texts in one prompt it says one number
    score_is_sigmoid: bool = False  # of the classifier's number; else that number itself


def read_encoder(config: Fields, *, scores: bool) -> EncoderConfig:
    """scores: the architecture has a classifier. Raises ModelError."""
    for name, harmless in UNSUPPORTED.items():
        if config.values.get(name) not in harmless:
            raise ModelError(
                f"config.json: {name} is {shown(config.values[name])}, which is not supported; choose another "
                "checkpoint"
            )
    activation = config.text("hidden_act", default="gelu")
    if activation not in ACTIVATIONS:
        raise config.wrong("hidden_act", f"{' or '.join(ACTIVATIONS)} is needed")
    if scores:
        _refuse_classes(config)
    return EncoderConfig(
        type_vocab_size=config.integer("type_vocab_size", most=MOST_TYPES, default=2),
        approximates_gelu=ACTIVATIONS[activation],
        scores=scores,
        score_is_sigmoid=scores and _score_activation(config) == SIGMOID,
    )


def _refuse_classes(config: Fields) -> None:
    labels = config.values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.integer("num_labels", most=MOST_LABELS, default=2)
    if count != 1:
        raise ModelError(
            f"config.json: the classifier has {count} labels, and only cross-encoders with one, which is the score of "
            "two texts, are supported; choose another checkpoint"
        )


def _score_activation(config: Fields) -> str:
    section = config.section("sentence_transformers")
    named = config.text(SCORE_FIELD, default="")
    if section is not None:
        named = section.text("activation_fn", default=named)
    if not named:
        return SIGMOID
    name = named.rpartition(".")[2]
    if name not in (IDENTITY, SIGMOID):
        raise config.wrong(SCORE_FIELD, f"{IDENTITY} or {SIGMOID} is needed")
    return name
