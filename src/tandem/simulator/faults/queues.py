"""Orders of queues: in some seeds one side or both have a policy, or what requests say of their priority counts.

Some requests of every seed say one, of 0 to 2.
"""

from random import Random

from msgspec import structs

from tandem.core.settings import NodeSettings, PrioritySettings, SchedulePolicy

ONE_IN, THAT = 6, 3  # none of the seeds that had found something before is among them


def draws_queues(seed: int) -> bool:
    return seed // 2 % ONE_IN == THAT


def draw_queues(seed: int, prefill: NodeSettings, decode: NodeSettings) -> tuple[NodeSettings, NodeSettings]:
    random = Random(f"queues {seed}")
    priorities = PrioritySettings(random.random() < 0.3, preemption_threshold=random.choice((0, 0, 1)))
    return _with_queue(prefill, priorities, random), _with_queue(decode, priorities, random)


def _with_queue(settings: NodeSettings, priorities: PrioritySettings, random: Random) -> NodeSettings:
    policy = random.choice(tuple(SchedulePolicy))
    counts = random.random() < 0.7
    return structs.replace(settings, schedule_policy=policy, priorities=priorities if counts else None)
