"""What the processes of one server say to each other."""

from collections.abc import Mapping

from engine import Run, Target
from examples import examples_of
from mutators import framed, mutate_msgpack

from tandem.server import wire
from tandem.server.channel import FrameDecoder, MalformedFrame, frame

UNIONS = (wire.ApiToNode, wire.NodeToApi, wire.NodeToWorker, wire.WorkerToNode)


def seeds() -> Mapping[str, bytes]:
    return {name: frame(example) * 2 for union in UNIONS for name, example in examples_of(union).items()}


def process_frames() -> Run:
    def run(data: bytes) -> None:
        refusals = 0
        for union in UNIONS:
            frames: FrameDecoder[object] = FrameDecoder(union, max_frame_bytes=1 << 20)
            try:
                for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                    list(frames.feed(piece))
            except MalformedFrame:
                refusals += 1
        if refusals == len(UNIONS):
            raise MalformedFrame

    return run


TARGETS = (
    Target("process_frames", process_frames, framed(mutate_msgpack), 20_000, answers=(MalformedFrame,), seeds=seeds),
)
