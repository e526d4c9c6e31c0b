"""What a chaos run prints, and what it promises."""

from collections import Counter
from collections.abc import Sequence

from arena import Arena
from clients import Ask, Outcome

NOT_COUNTED = (Outcome.LEFT, Outcome.ORDERED)  # ended by whoever asked
NEVER = (Outcome.LATE, Outcome.WRONG, Outcome.MISTAKE, Outcome.UNNAMED)


def share(asks: Sequence[Ask]) -> float:
    """Successes among the requests that nobody ended by order."""
    counted = [ask for ask in asks if ask.outcome not in NOT_COUNTED]
    return sum(ask.outcome is Outcome.SUCCESS for ask in counted) / max(1, len(counted))


def causes(asks: Sequence[Ask]) -> Counter[str]:
    return Counter(f"{ask.code} at {ask.stage or '-'}" for ask in asks if ask.outcome is Outcome.FAILED)


def page(it: Arena, asks: Sequence[Ask], *, of: str, seed: int, seconds: float) -> str:
    outcomes = Counter(str(ask.outcome) for ask in asks)
    paths = Counter(ask.path for ask in asks if ask.outcome is Outcome.SUCCESS)
    times = sorted(ask.seconds for ask in asks if ask.outcome is Outcome.SUCCESS)
    recoveries = [f"{role} {max(found):.2f} s at most of {len(found)}" for role, found in it.recoveries.items()]
    lines = [
        f"chaos: {of}, seed {seed}, {seconds:.0f} s, {len(asks)} requests, {len(it.faults)} faults",
        f"  faults      {as_words(Counter(it.count()))}",
        f"  outcomes    {as_words(outcomes)}; {share(asks):.2%} succeed",
        f"  paths       {as_words(paths)}",
        f"  causes      {as_words(causes(asks)) or 'none'}",
        f"  recovery    {', '.join(recoveries)}",
        f"  return      restarted servers used {max(it.returns, default=0):.2f} s after they were ready, at most",
    ]
    if times:
        lines.append(f"  seconds     median {times[len(times) // 2]:.2f}, 99th {times[len(times) * 99 // 100]:.2f}")
    return "\n".join(lines)


def as_words(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counter.most_common())


def details(it: Arena, asks: Sequence[Ask]) -> str:
    """All faults, and the story of every request that neither succeeded nor was ended by order."""
    odd = [ask for ask in asks if ask.outcome not in (Outcome.SUCCESS, *NOT_COUNTED)]
    stories = [f"{ask.began - it.began:6.1f} s  {ask.story()}" for ask in odd]
    return "\n".join(["faults:", *(str(fault) for fault in it.faults), "requests:", *stories])
