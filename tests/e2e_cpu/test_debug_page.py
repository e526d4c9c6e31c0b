"""`/debug/pd` in a browser: what a pair does is seen while it does it, and records open without a server."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, HEIGHT, WIDTH, Page, Picture, browser
from cluster import Cluster, Server, cluster, eventually

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt install chromium)")

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
ROWS = "document.querySelectorAll('#rows tr').length"
FIRST = "[...document.querySelectorAll('#rows tr:first-child td')].map((cell) => cell.textContent)"
BARS = "[...document.querySelectorAll('#rows tr:first-child .bar i')].map((part) => part.title.split(' ')[0])"


def count_in(lane: str) -> str:
    return f"Number(document.querySelector('#lane-{lane} b').textContent)"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="module")
def pair(record: Path) -> Iterator[Cluster]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with cluster(prefills=1, decodes=1, flags=["--flight-record", str(record)]) as it:
        yield it


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as it:
        yield it
        assert it.errors == []


Screenshot = Callable[[str], None]


@pytest.fixture
def screenshot(page: Page, tmp_path: Path) -> Screenshot:
    """Takes one, of that name, and checks that it shows something. TANDEM_SCREENSHOTS: a folder to keep it in."""

    def take(name: str) -> None:
        eventually(lambda: is_whole(page.screenshot(tmp_path / name)))
        if folder := os.environ.get("TANDEM_SCREENSHOTS"):
            shutil.copy(tmp_path / name, folder)

    def is_whole(picture: Picture) -> bool:
        """A page that grows meanwhile is taken once more."""
        height = page.run("document.documentElement.scrollHeight")
        assert not picture.may_be_of_one_color
        return (picture.width, picture.height) == (WIDTH, max(HEIGHT, height))

    return take


def test_nothing_to_see_is_a_picture_of_one_color(page: Page, tmp_path: Path) -> None:
    assert page.screenshot(tmp_path / "blank.png").may_be_of_one_color


def router_of(pair: Cluster) -> Server:
    assert pair.router is not None
    return pair.router


def test_a_request_is_seen_in_its_lane_and_then_with_its_stages(
    pair: Cluster, page: Page, screenshot: Screenshot
) -> None:
    router = router_of(pair)
    page.open(f"{router.url}/debug/pd")
    page.eventually("document.querySelector('#who').textContent.includes('prefill')")
    streams = [
        router.stream(f"{n} {PROMPT}", max_new_tokens=4000, rid=f"<b>{n}", sampling_params={"ignore_eos": True})
        for n in range(3)
    ]
    page.eventually(f"{count_in('decode')} === 3")
    assert page.run("document.querySelector('#lane-decode .chip').textContent").startswith("<b>"), "never markup"
    page.eventually("document.querySelectorAll('#chart polyline').length === 4")
    screenshot("live.png")
    for stream in streams:
        stream.close()
    page.eventually(f"{count_in('decode')} === 0")
    router.generate(PROMPT, max_new_tokens=3, rid="mine")
    page.eventually(f"{ROWS} && {FIRST}[0] === 'mine'")
    row = page.run(FIRST)
    assert (row[1], row[5]) == ("remote", "3")
    stages = page.run(BARS)
    assert {"decode_transferred", "edge_receive"} <= set(stages)
    screenshot("recent.png")
    assert all(url.startswith(router.url) or url == "about:blank" for url in page.requests), "nothing from elsewhere"


def test_a_server_shows_itself_alone(pair: Cluster, page: Page) -> None:
    decode = pair.decodes[0]
    router_of(pair).generate(PROMPT, max_new_tokens=2, rid="seen on decode")
    page.open(f"{decode.url}/debug/pd")
    page.eventually(f"{ROWS} && {FIRST}[0] === 'seen on decode'")
    assert page.run("document.querySelector('#who').textContent").startswith("decode")


def test_a_flight_record_is_opened(pair: Cluster, page: Page, record: Path) -> None:
    router = router_of(pair)
    router.generate(PROMPT, max_new_tokens=5, rid="flown")

    def flown() -> list[Path]:
        pages = {path: path.read_bytes() for path in record.glob("*.tandem")}
        return [path for path, raw in pages.items() if b"FinishRequest" in raw.partition(b"flown")[2]]

    eventually(lambda: len(flown()) == 2)
    page.open(f"{router.url}/debug/pd")
    for path in flown():  # one of each half
        page.choose_file("#file", path)
        page.eventually(f"document.querySelector('#who').textContent.includes('a flight record: {path.name}')")
        page.eventually(f"{ROWS} && [...document.querySelectorAll('#rows td.name')].some((it) => it.title === 'flown')")
        assert page.run(BARS)
    page.run("document.querySelector('#back').click()")
    page.eventually("document.querySelector('#who').textContent.includes('prefill')")


def test_a_file_whose_reading_ends_after_the_reader_went_back_is_not_shown(
    pair: Cluster, page: Page, tmp_path: Path
) -> None:
    page.open(f"{router_of(pair).url}/debug/pd")
    page.run("""
        const read = Blob.prototype.arrayBuffer, held = new Promise((release) => { window.release = release; });
        Blob.prototype.arrayBuffer = async function () {
          await held;
          const bytes = await read.call(this);
          window.isRead = true;
          return bytes;
        }""")
    (tmp_path / "file").write_bytes(b"hello")
    page.choose_file("#file", tmp_path / "file")
    page.run("document.querySelector('#back').click(); window.release()")
    page.eventually("window.isRead")
    page.eventually("document.querySelector('#who').textContent.includes('prefill')")
    assert page.run("document.querySelector('#trouble').textContent") == ""


def test_the_trace_of_a_simulation_is_opened_and_looked_at_from_its_start(
    pair: Cluster, page: Page, screenshot: Screenshot, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "tandem.cli.main", "simulate", "--seed", "5", "--trace"]
    trace = tmp_path / "trace.txt"
    trace.write_bytes(subprocess.run(words, stdout=subprocess.PIPE, timeout=300, check=True).stdout)
    page.open(f"{router_of(pair).url}/debug/pd")
    page.choose_file("#file", trace)
    page.eventually(f"{ROWS} > 10")
    screenshot("trace.png")
    begun = "Math.round(10000 * (timeline.halves[8].from + 0.001 - timeline.first) / (timeline.last - timeline.first))"
    page.run(f"byId('at').value = {begun}; showTimeline()")
    screenshot("trace-begun.png")
    times = "timeline.halves.flatMap((half) => half.moves.map(([t]) => t))"
    lanes = f"{times}.flatMap((t) => pairsAt(timeline.halves, t).map((pair) => pair.lane))"
    assert sorted(page.run(f"[...new Set({lanes})]")) == [0, 1, 2, 3], "requests were in every lane"
    page.run("byId('at').value = 0; showTimeline()")
    assert page.run(ROWS) == 0, "nobody has ended yet"


def test_what_is_no_record_is_said_to_be_none(pair: Cluster, page: Page, tmp_path: Path) -> None:
    page.open(f"{router_of(pair).url}/debug/pd")
    for content in (b"hello", bytes(range(256))):
        (tmp_path / "file").write_bytes(content)
        page.choose_file("#file", tmp_path / "file")
        page.eventually("document.querySelector('#trouble').textContent.includes('is no flight record')")
        page.run("document.querySelector('#trouble').textContent = ''; document.querySelector('#file').value = ''")
