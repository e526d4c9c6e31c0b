"""The way from the API process to the node of one DP rank: a channel that may be gone, or not be there yet."""

from tandem.core.values import Cause
from tandem.server import wire
from tandem.server.api.errors import Problem, Refusal
from tandem.server.channel import AsyncChannel, ChannelClosed, ChannelFull, MessageTooLong


class NodeLink:
    """The way to the node, for `NodeClient`."""

    def __init__(self) -> None:
        self.channel: AsyncChannel[wire.NodeToApi] | None = None

    def send(self, message: wire.ApiToNode) -> None:
        if self.channel is None:
            return  # no node was started yet
        try:
            if isinstance(message, wire.SubmitAll):
                self.channel.send(message, max_bytes=wire.MAX_SUBMIT_BYTES)
            else:
                self.channel.send_always(message)
        except ChannelClosed:
            pass  # whoever waits learns it from the end of the channel
        except ChannelFull as error:
            raise Refusal(Cause.QUEUE_FULL, str(error)) from None
        except MessageTooLong as error:
            raise Refusal(Problem.BODY_TOO_LARGE, f"all samples together make {error}") from None

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
