"""Who starts a member again, when, and when no more. Processes and readiness are fakes; time is a number."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.cli import supervisor, up
from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import Fleet, Member
from tandem.cli.supervisor import DELAYS_S, MAX_UNREADY, NO_MEANS_S, STEADY_S, Supervisor


class Process:
    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class FakeFleet(Fleet):
    refusal: OSError | None = None  # of the machine

    def restart(self, member: Member) -> None:
        if self.refusal is not None:
            raise self.refusal
        member.process = Process()  # type: ignore[assignment]


class Story:
    """One member, ready at 0 s."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.lines, self.gets_ready = 0.0, list[str](), True
        log = folder / "decode-0.log"
        log.write_text("tandem: error: no model there\n")
        self.member = Member("decode-0", (), Process(), 1, log, is_ready=True)  # type: ignore[arg-type]
        fleet = FakeFleet(folder, engines=1, members=[self.member])
        monkeypatch.setattr(supervisor, "is_ready", lambda port: self.gets_ready)
        self.it = Supervisor(fleet, self.lines.append, clock=lambda: self.now)

    @property
    def process(self) -> SimpleNamespace:
        return self.member.process  # type: ignore[return-value]

    def dies(self, code: int = -9) -> None:
        self.process.returncode = code
        self.it.look()

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.it.look()


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    return Story(tmp_path, monkeypatch)


def test_who_has_served_for_a_while_is_started_again_at_once(story: Story) -> None:
    for _ in range(3):
        story.after(STEADY_S)
        story.dies(3)
        story.after(0)
        assert story.process.poll() is None
        story.after(1.5)
    assert (
        story.lines
        == ["decode-0 ended with exit code 3; starting it again now", "decode-0 serves again after 1.5 s"] * 3
    )


def test_who_ends_soon_after_its_start_waits_longer_each_time(story: Story) -> None:
    story.after(STEADY_S)
    story.dies()
    story.after(0)
    for delay in (*DELAYS_S, DELAYS_S[-1]):
        story.after(1)
        story.dies()
        story.after(delay - 0.01) if delay else None
        assert delay == 0 or story.process.poll() is not None
        story.after(0.02)
        assert story.process.poll() is None
    story.after(1)
    story.after(STEADY_S)
    story.dies()
    story.after(0)
    assert story.process.poll() is None, "a life that served for a while begins the count anew"


def test_who_never_gets_ready_ends_the_fleet_with_its_own_words(story: Story) -> None:
    story.gets_ready = False
    story.dies()
    for _ in range(MAX_UNREADY - 1):
        story.after(max(DELAYS_S))
        story.dies(1)
    story.after(max(DELAYS_S))
    with pytest.raises(CommandFailed, match="decode-0: no model there"):
        story.dies(1)


def test_who_never_gets_ready_is_tried_on_while_another_of_its_kind_serves(story: Story) -> None:
    fleet = story.it._fleet
    fleet.members += [
        Member(name, (), Process(), 1, story.member.log, is_ready=True)  # type: ignore[arg-type]
        for name in ("decode-1", "prefill-0")
    ]
    story.it = Supervisor(fleet, story.lines.append, clock=lambda: story.now)
    story.gets_ready = False
    for _ in range(2 * MAX_UNREADY):
        story.dies(1)
        story.after(max(DELAYS_S))
    assert story.lines[-1] == f"decode-0 ended with exit code 1; starting it again in {max(DELAYS_S):.0f} s"
    fleet.members[1].process.returncode = -9  # nobody is left who decodes
    with pytest.raises(CommandFailed, match="decode-0: no model there"):
        story.dies(1)


def test_who_ends_while_others_still_start_ends_the_wait_for_them(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cli.fleet.is_ready", lambda port: False)
    router = Member("router", (), Process(), 2, tmp_path / "router.log")  # type: ignore[arg-type]  # a process that can end
    both = FakeFleet(tmp_path, engines=1, members=[story.member, router])
    story.process.returncode = 1
    with pytest.raises(CommandFailed, match="decode-0: no model there"):
        both.wait_ready(timeout_s=60)


def test_the_cause_of_an_end_is_none_of_a_former_life(tmp_path: Path) -> None:
    once = (
        f"[ -e {tmp_path}/again ] && kill -9 $$; touch {tmp_path}/again; echo 'tandem: error: no model there'; exit 1"
    )
    with Fleet(tmp_path, engines=1) as fleet:
        member = fleet.start_program("decode-0", ("sh", "-c", once), port=1)
        for cause in ("no model there", "decode-0 was killed by signal SIGKILL"):
            member.process.wait()
            with pytest.raises(CommandFailed, match=cause):
                fleet.check_alive(member)
            fleet.restart(member)


def test_who_ends_is_started_again_where_its_log_was_tidied_up(tmp_path: Path) -> None:
    """As files are that are as old as the fleet, in the folder for temporary files."""
    with Fleet(tmp_path, engines=1) as fleet:
        member = fleet.start_program("decode-0", ("sh", "-c", "echo tandem: error: no model there"), port=1)
        member.process.wait()
        member.log.unlink()
        with pytest.raises(CommandFailed, match="decode-0 ended with exit code 0; its log is "):
            fleet.check_alive(member)
        fleet.restart(member)
        member.process.wait()
        assert member.cause_of_end() == "no model there"


def test_the_cause_of_an_end_is_found_behind_more_log_than_there_is_memory(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # none of it on the disk
    with log.open("ab") as file:
        file.write(b"\ntandem: error: no model there\n[12:00:00 node] what else it said\n")
    member = Member("decode-0", (), Process(), 1, log)  # type: ignore[arg-type]  # nothing is asked of it
    assert member.cause_of_end() == "no model there"


def test_a_log_that_grows_keeps_its_end_and_the_cause_of_an_end(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cli.fleet.MAX_LOG_BYTES", 1000)
    monkeypatch.setattr("tandem.cli.fleet.KEPT_LOG_BYTES", 100)
    story.member.log = tmp_path / "long.log"
    with story.member.log.open("ab", buffering=0) as written:  # as a member has it
        written.write(b"tandem: error: of a former life\n" * 31)
        story.member.life_at = written.tell() - 32
        story.it.look()
        assert written.tell() == story.member.log.stat().st_size == 31 * 32, "it is not too long"
        written.write(b"tandem: error: no model there\n")
        story.it.look()
        written.write(b"and more\n")
    lines = story.member.log.read_text().splitlines()
    assert lines == ["tandem: error: of a former life", "tandem: error: of a former life", *lines[-2:]]
    assert lines[-2:] == ["tandem: error: no model there", "and more"]
    assert story.member.life_at == 32
    assert story.member.cause_of_end() == "no model there"


@pytest.mark.parametrize("told_twice_while", ["it says so", "it drains"])
def test_who_is_told_again_while_it_drains_kills_what_is_left(
    told_twice_while: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the line that offers it has returned: somebody has read it by then."""
    happened: list[str] = []

    class Draining:
        def stop(self, *, timeout_s: float) -> bool:
            happened.append("stop")
            raise KeyboardInterrupt

        def kill(self) -> None:
            happened.append("kill")

    def say(line: str) -> None:
        if told_twice_while == "it says so":
            raise KeyboardInterrupt

    monkeypatch.setattr(up, "_say", say)
    with pytest.raises(CommandFailed, match="before it had drained"):
        up._drain(Draining())  # type: ignore[arg-type]  # what of a fleet it needs
    assert happened == (["kill"] if told_twice_while == "it says so" else ["stop", "kill"])


def test_who_cannot_be_started_for_lack_of_processes_is_tried_again(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeFleet, "refusal", BlockingIOError(11, "Resource temporarily unavailable"))
    story.after(STEADY_S)
    story.dies()
    story.after(0)
    story.after(NO_MEANS_S / 2)
    assert [line for line in story.lines if "cannot be started" in line] == [
        "decode-0 cannot be started: [Errno 11] Resource temporarily unavailable; trying again in 5 s"
    ]
    monkeypatch.setattr(FakeFleet, "refusal", None)
    story.after(NO_MEANS_S)
    assert story.process.poll() is None
