"""What a model of block diffusion has to say: whole sequences computed anew for every pass, without a cache."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.engine.draws import gumbel_noise, noise_key

NEAR_TIE = 1e-4  # of two scores, or two logarithms of shares
Draw = Callable[[Tensor, int], int]  # scores of a position, that position


class NearTie(AssertionError):
    """Another machine might decide otherwise: the test wants another prompt."""


def greedy(scores: Tensor, position: int) -> int:
    best, second = scores.topk(2).values.tolist()
    if best - second < NEAR_TIE:
        raise NearTie(f"two tokens at position {position}")
    return int(scores.argmax())


def drawn(seed: int, temperature: float) -> Draw:
    def draw(scores: Tensor, position: int) -> int:
        noise = gumbel_noise(noise_key(seed, position), np.arange(len(scores)))
        return greedy(scores / temperature + torch.from_numpy(noise), position)

    return draw


@torch.no_grad()
def scores_of(model: PreTrainedModel, tokens: Sequence[int], block: int) -> Tensor:
    """[tokens, vocab]; a position sees its whole block and all before it."""
    at = torch.arange(len(tokens)) // block
    hidden = torch.zeros(len(tokens), len(tokens)).masked_fill_(at[None, :] > at[:, None], -math.inf)
    return model(torch.tensor([list(tokens)]), attention_mask=hidden[None, None], use_cache=False).logits[0].float()


def block_reference(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    *,
    block: int,
    mask_id: int,
    threshold: float,
    draw: Draw = greedy,
) -> tuple[list[int], list[int]]:
    """At least `count` tokens, to the end of a block; and how many passes each block took."""
    tokens, passes = list(prompt), list[int]()
    while len(tokens) - len(prompt) < count:
        unknown = list(range(len(tokens), len(tokens) // block * block + block))
        tokens += [mask_id] * len(unknown)
        passes.append(0)
        while unknown:
            scores = scores_of(model, tokens, block)
            scores[:, mask_id] = -math.inf
            found = {at: draw(scores[at], at) for at in unknown}
            share = {at: float(scores[at].double().log_softmax(0)[found[at]]) for at in unknown}
            order = sorted(unknown, key=lambda at: (-share[at], at))
            if len(order) > 1 and share[order[0]] - share[order[1]] < NEAR_TIE:
                raise NearTie(f"two positions of {order}")
            if any(abs(each - math.log(threshold)) < NEAR_TIE for each in share.values()):
                raise NearTie(f"the threshold, at one of {order}")
            for at in order:
                if at == order[0] or share[at] > math.log(threshold):
                    tokens[at] = found[at]
                    unknown.remove(at)
            passes[-1] += 1
    return tokens[len(prompt) :], passes
