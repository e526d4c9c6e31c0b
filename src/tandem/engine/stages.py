"""One forward pass through the stages of a pipeline."""

from torch import Tensor

from tandem.engine.models.base import Step
from tandem.engine.parallel import Pipeline
from tandem.engine.weights import LoadedModel


def behind_all_layers(model: LoadedModel, pipeline: Pipeline, step: Step) -> Tensor | None:
    """This stage's part of it: hidden states [n, hidden] of all rows on the last stage, None on those before, which
    have handed theirs on. Raises WorkerGone.
    """
    stage, hidden = pipeline.stage, None
    if stage.rank > 0:
        hidden = pipeline.receive_hidden(len(step.batch.token_ids), model.config.hidden_size, model.dtype)
    hidden = model.module.forward(step, hidden)
    if stage.rank == stage.size - 1:
        return hidden
    pipeline.send_hidden(hidden)
    return None
