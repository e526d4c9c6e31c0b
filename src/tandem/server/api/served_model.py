"""What an endpoint reads bodies with: the model that is served, as far as requests are concerned."""

from dataclasses import dataclass

from tandem.server.api.chat_form import ChatForm
from tandem.server.api.limits import ModelLimits
from tandem.server.api.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    limits: ModelLimits
    tokenizer: Tokenizer
    form: ChatForm  # of the answers to chats
