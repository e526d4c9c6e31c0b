"""Seeded bugs of the servers and the data plane, one to three lines each, that whole clusters have to notice.

Written down before any of them was tried. What each break is about is the plausible mistake: a wake-up that is lost, a
close that is forgotten, a timer that is not armed, an error that is swallowed, a state that is not reset. They stand in
files that only whole clusters run (`tandem simulate --whole`): threads, sockets, processes, the loops around machines.
"""

from dataclasses import dataclass

from lines import Edit


@dataclass(frozen=True)
class WholeBreak(Edit):
    mistake: str


READER, PULLER, LENDER = "transfer/reader.py", "transfer/puller.py", "transfer/lender.py"
OWNER, SOCK = "transfer/owner.py", "transfer/sock.py"
LINKS, PEERS, DRIVER = "server/node/links.py", "server/node/peers.py", "server/node/driver.py"
CLIENT, SAMPLE = "server/api/client.py", "server/api/sample.py"
LIVE, BOOTSTRAP = "server/api/live_requests.py", "server/api/bootstrap_questions.py"
SHELL, POOL, PIPE = "server/router/shell.py", "server/http_pool.py", "server/router/answer.py"

TRANSFER = (
    WholeBreak(
        "leaving_thread_calls_nobody",
        READER,
        "self._call_for_help()  # it will not ask what may begin now that its job has ended",
        "pass",
        "lost wake-up: the thread that ends a pull leaves, and the pulls that wait for its place sleep on",
    ),
    WholeBreak(
        "pull_calls_nobody",
        READER,
        "self._puller.pull(command, time.monotonic_ns())\n            self._call_for_help()\n",
        "self._puller.pull(command, time.monotonic_ns())\n",
        "lost wake-up: a new pull waits until a thread looks for another reason",
    ),
    WholeBreak(
        "cancelled_pull_is_not_flushed",
        READER,
        "self._puller.cancel(command)\n        self._flush_later()\n",
        "self._puller.cancel(command)\n",
        "what the machine has reported stays in the outbox",
    ),
    WholeBreak(
        "busy_threads_count_as_free",
        READER,
        "            self._num_free -= 1\n",
        "",
        "a counter that is not taken back: nobody makes a thread, for one seems to wait",
    ),
    WholeBreak(
        "failed_pull_is_swallowed",
        READER,
        "            self._puller.failed(job, failure, time.monotonic_ns())\n",
        '            log.info("a pull failed: %s", failure)\n',
        "an error is logged and told to nobody",
    ),
    WholeBreak(
        "refused_dial_stays_open",
        READER,
        "        except BaseException:\n            link.close()\n            raise\n        with self._lock:",
        "        except BaseException:\n            raise\n        with self._lock:",
        "forgotten close on the way out by an error",
    ),
    WholeBreak(
        "partial_send_begins_at_the_wrong_byte",
        "transfer/link.py",
        "        moved -= len(piece)\n",
        "",
        "wrong arithmetic after the kernel took only a part",
    ),
    WholeBreak(
        "served_link_stays_open",
        OWNER,
        "meet a closed descriptor\n            link.close()\n",
        "meet a closed descriptor\n",
        "forgotten close at the end of a connection's thread",
    ),
    WholeBreak(
        "lease_ends_only_with_success",
        OWNER,
        "                self._lender.end_lease(grant, known, time.monotonic_ns(), is_sent=is_sent)",
        "                is_sent and self._lender.end_lease(grant, known, time.monotonic_ns(), is_sent=is_sent)",
        "what was taken is not given back when sending fails",
    ),
    WholeBreak(
        "end_of_a_lease_is_not_flushed",
        OWNER,
        "is_sent=is_sent)\n            self._outbox.flush()\n",
        "is_sent=is_sent)\n",
        "the report of the last reader's end waits for another report",
    ),
    WholeBreak(
        "revocation_is_not_flushed",
        SOCK,
        "self._owner.revoke(command.request, command.attempt)\n        self._flush_later()\n",
        "self._owner.revoke(command.request, command.attempt)\n",
        "the report that nobody reads waits for another report",
    ),
    WholeBreak(
        "digests_are_not_flushed",
        SOCK,
        "map(pack_digests, digests)))\n        self._outbox.flush()\n",
        "map(pack_digests, digests)))\n",
        "published pages are not told of until something else is",
    ),
    WholeBreak(
        "drained_is_said_while_readers_are_there",
        LENDER,
        "        if grant.readers:\n            return\n        key",
        "        key",
        "pages are free while they are still being sent",
    ),
    WholeBreak(
        "last_lease_does_not_say_drained",
        LENDER,
        "        if grant.is_revoked:\n            self._say_if_drained(grant)\n        elif",
        "        if grant.is_revoked:\n            pass\n        elif",
        "a revocation that had to wait for a reader is never answered",
    ),
    WholeBreak(
        "cancelled_pull_is_drained_while_bytes_land",
        PULLER,
        "attempt.owes_drained = True  # the end of its last job says it\n        else:\n            self._report(",
        "attempt.owes_drained = True\n        if True:\n            self._report(",
        "destination pages are free while a thread still receives into them",
    ),
    WholeBreak(
        "link_is_lost_after_the_last_page",
        PULLER,
        "        else:\n            self._keep_idle(pull, job.link)\n            self._forget_if_done(pull.attempt)",
        "        else:\n            self._forget_if_done(pull.attempt)",
        "a connection is neither kept nor closed",
    ),
    WholeBreak(
        "broken_pull_is_not_tried_again",
        PULLER,
        "  # it broke behind the last page\n            return\n        self._wait(pull, now)\n",
        "  # it broke behind the last page\n            return\n",
        "a retry that is missing: the pull is neither queued again nor failed",
    ),
    WholeBreak(
        "cancelled_pull_keeps_its_turn",
        PULLER,
        "                self._wait_no_more(pull)\n        if attempt.is_armed:",
        "                pass\n        if attempt.is_armed:",
        "who is gone stays in the queue",
    ),
    WholeBreak(
        "every_command_takes_a_turn",
        PULLER,
        "            if is_new:\n                self._wait(pull, now)",
        "            if True:\n                self._wait(pull, now)",
        "two jobs for one attempt: it is queued while its job is out",
    ),
    WholeBreak(
        "last_page_is_not_reported",
        PULLER,
        "and (is_last or now - job.reported_at >= LANDED_REPORT_INTERVAL_NS):",
        "and now - job.reported_at >= LANDED_REPORT_INTERVAL_NS:",
        "a report that is thinned out, its last one too",
    ),
    WholeBreak(
        "next_command_is_checked_by_the_offer_before",
        PULLER,
        "pull.offer, pull.may_retry = None, True",
        "pull.may_retry = True",
        "a state is not reset between two commands",
    ),
    WholeBreak(
        "resumed_pull_begins_at_its_first_page",
        PULLER,
        "        start = pull.landed - command.first_wanted\n",
        "        start = 0\n",
        "what was there before the connection broke is counted twice",
    ),
    WholeBreak(
        "forgotten_peer_keeps_its_links",
        PULLER,
        "        if known is not None:\n            self._close_idle(known)\n",
        "        if known is not None:\n            known.idle.clear()\n",
        "forgotten close of what was idle",
    ),
    WholeBreak(
        "cancelled_pull_never_leaves",
        PULLER,
        "self._leaving.pop(attempt.key, None) is None:",
        "attempt.key not in self._leaving:",
        "an entry that is not taken out of its table",
    ),
    WholeBreak(
        "end_of_a_cancelled_job_says_nothing",
        PULLER,
        "        if pull.attempt.is_over or self._is_closed:\n            self._say_if_drained(pull.attempt)\n",
        "        if pull.attempt.is_over or self._is_closed:\n            pass\n",
        "who waits for the end of a job that fails is not told",
    ),
    WholeBreak(
        "outbox_looks_once",
        "transfer/outbox.py",
        "while self._events and self._speaking.acquire(blocking=False):",
        "if self._events and self._speaking.acquire(blocking=False):",
        "lost wake-up: an event that comes between the last look and the release of the lock",
    ),
    WholeBreak(
        "admitted_link_does_not_block",
        "transfer/listener.py",
        "            links.prepare(link, timeout_s=self._io_timeout_s)\n",
        "",
        "a socket that is handed to a thread without being set up for it",
    ),
    WholeBreak(
        "peer_that_answers_calls_nobody",
        READER,
        "                    self._call_for_help()  # a peer that answers may have another job\n",
        "",
        "lost wake-up: the second pull from a peer waits for the first",
    ),
)

NODE = (
    WholeBreak(
        "workers_are_not_told_of_a_lost_peer",
        DRIVER,
        "            self.workers.send(wire.Disconnect(event.peer))\n",
        "            pass\n",
        "a local peer keeps what belongs to somebody who is gone",
    ),
    WholeBreak(
        "node_sleeps_over_its_timers",
        DRIVER,
        "happened = inbox.drain(until=wake_at)",
        "happened = inbox.drain(until=None)",
        "a timer that is not armed",
    ),
    WholeBreak(
        "node_steps_only_for_events",
        DRIVER,
        "if happened or (wake_at is not None and now >= wake_at):",
        "if happened:",
        "a timer that fires and is not heard",
    ),
    WholeBreak(
        "peers_are_not_flushed",
        DRIVER,
        "        if self._peers is not None:\n            self._peers.flush()\n",
        "",
        "messages wait in a buffer for another reason to write",
    ),
    WholeBreak(
        "peer_is_not_heard",
        LINKS,
        "                link.heard_ns = now\n",
        "",
        "the time of the last word is that of the first",
    ),
    WholeBreak(
        "who_has_nothing_to_say_says_nothing",
        LINKS,
        "            self._say(link, PeerPing(), now)\n",
        "            link.said_ns = now\n",
        "the heartbeat is not sent",
    ),
    WholeBreak(
        "closed_link_is_not_hung_up",
        LINKS,
        "        link.is_open = False\n        self.transport.hang_up(link)\n",
        "        link.is_open = False\n",
        "forgotten close below the machine",
    ),
    WholeBreak(
        "hung_up_socket_stays_open",
        PEERS,
        "            self.poller.unwatch(wire.sock)\n            wire.sock.close()\n",
        "            self.poller.unwatch(wire.sock)\n",
        "forgotten close of the socket itself",
    ),
    WholeBreak(
        "listener_never_listens_again",
        "server/node/listener.py",
        "                self.resume_at = Nanos(self.clock() + PAUSE_NS)\n",
        "",
        "a pause without an end",
    ),
    WholeBreak(
        "returned_peer_is_still_given_up",
        LINKS,
        "        peer.lost_at = peer.retry_at = None\n",
        "        peer.retry_at = None\n",
        "a state is not reset on reconnect",
    ),
    WholeBreak(
        "broken_connection_is_not_redialled",
        LINKS,
        "            peer.retry_at = Nanos(now + peer.retry_ns)\n",
        "",
        "a retry that is missing",
    ),
    WholeBreak(
        "last_frame_waits_for_the_next",
        "server/frames.py",
        "if len(self._buffer) >= stop else None",
        "if len(self._buffer) > stop else None",
        "off by one in a bound",
    ),
    WholeBreak(
        "two_threads_write_at_once",
        "server/channel.py",
        "            with self._sending:  # sealed frames are numbered in the order in which they are sent\n",
        "            if data is not None:\n",
        "a lock that is not taken",
    ),
    WholeBreak(
        "end_of_a_channel_is_not_told",
        "server/channel.py",
        "        self._transport = None\n        self._closed(",
        "        self._transport = None\n        str(",
        "nobody hears that the other end is gone",
    ),
    WholeBreak(
        "worker_stays_when_its_node_goes",
        "server/worker.py",
        "        finally:\n            self._work.put(None)\n",
        "        finally:\n            pass\n",
        "the thread that reads ends, the one that works waits for ever",
    ),
    WholeBreak(
        "identified_dialler_stays_unidentified",
        LINKS,
        "        del self.unidentified[link]\n",
        "",
        "an entry that is not taken out of its table, and whose time runs out",
    ),
)

API = (
    WholeBreak(
        "end_of_a_request_wakes_nobody",
        CLIENT,
        "        live.ended = terminal\n        live.generation.note(live)\n",
        "        live.ended = terminal\n",
        "lost wake-up at the end of an answer",
    ),
    WholeBreak(
        "scores_are_one_token_late",
        CLIENT,
        "(len(live.tokens) - 1 - len(live.extras))",
        "(len(live.tokens) - len(live.extras))",
        "off by one between tokens and what belongs to them",
    ),
    WholeBreak(
        "name_of_an_ended_request_is_kept",
        LIVE,
        "        for name in live.names:\n            drop(self._named, name, live.request.id)\n",
        "",
        "an entry that is not taken out of its table, and is looked up once more",
    ),
    WholeBreak(
        "client_that_reads_stays_blocked",
        LIVE,
        '        """It has taken what was written."""\n        self._blocked.pop(client, None)\n',
        '        """It has taken what was written."""\n',
        "a timer that is not disarmed",
    ),
    WholeBreak(
        "requests_of_a_lost_rank_are_not_ended",
        "server/api/process.py",
        '        self._client.lose(f"DP rank {dp_rank}: {reason}", dp_rank)\n',
        "",
        "nobody ends what ran on a rank that is gone",
    ),
    WholeBreak(
        "taken_tokens_are_taken_again",
        SAMPLE,
        "        live.tokens = []\n",
        "",
        "a buffer that is not emptied",
    ),
    WholeBreak(
        "news_are_told_once",
        CLIENT,
        "        for live in changed:\n            live.is_changed = False\n",
        "",
        "a mark that is not taken back",
    ),
    WholeBreak(
        "bootstrap_server_is_asked_once",
        BOOTSTRAP,
        "        del self._ranks[address]\n",
        "        pass\n",
        "a table says that a question is under way which has ended",
    ),
    WholeBreak(
        "rooms_are_asked_for_once",
        BOOTSTRAP,
        "            del self._rooms[address]\n",
        "            pass\n",
        "a table says that a question is under way which has ended",
    ),
    WholeBreak(
        "idle_server_never_says_so",
        CLIENT,
        "        if not self._live:\n            self._idle.set()\n",
        "",
        "a drain that always takes all of its time",
    ),
)

ROUTER = (
    WholeBreak(
        "failed_stream_has_no_end",
        SHELL,
        "            decode.pipe.end(outcome if isinstance(outcome, Fail) else None, call.give_up_message)\n",
        "            pass\n",
        "who reads a stream is not told of its failure",
    ),
    WholeBreak(
        "pipe_wakes_no_reader",
        PIPE,
        "        self._size += len(chunk)\n        self._has_changed.set()\n",
        "        self._size += len(chunk)\n",
        "lost wake-up between a writer and a reader",
    ),
    WholeBreak(
        "remaining_time_is_in_seconds",
        SHELL,
        "str(max(1, sent.timeout_ns // MILLISECOND))",
        "str(max(1, sent.timeout_ns // SECOND))",
        "a wrong unit",
    ),
    WholeBreak(
        "connection_in_use_is_given_back",
        POOL,
        "if connection.is_idle() and len(idle) < IDLE_MAX:",
        "if len(idle) < IDLE_MAX:",
        "a connection that was left in the middle of an answer is used again",
    ),
    WholeBreak(
        "broken_connection_is_swallowed",
        SHELL,
        "            self._hear(connection, upstream.fail(HalfFailure.BROKEN, detail, silent_ns=connection.silent_ns))"
        "\n",
        '            log.warning("%s: %s", connection.worker.url, error)\n',
        "an error is logged and told to nobody",
    ),
    WholeBreak(
        "rejected_half_is_not_told",
        SHELL,
        "            self._hear(connection, upstream.reject(is_retryable=is_retryable))\n",
        "",
        "a refusal is read to its end and told to nobody",
    ),
)

WHOLE_BREAKS = (*TRANSFER, *NODE, *API, *ROUTER)

# Which seed has noticed it, or which world of `directed.py`.
KILLED_BY: dict[str, int | str] = {
    "admitted_link_does_not_block": 13,
    "bootstrap_server_is_asked_once": 360,
    "broken_connection_is_not_redialled": 2263,
    "broken_pull_is_not_tried_again": 65,
    "busy_threads_count_as_free": 85,
    "cancelled_pull_is_drained_while_bytes_land": 1330,
    "cancelled_pull_keeps_its_turn": 0,
    "cancelled_pull_never_leaves": 51,
    "closed_link_is_not_hung_up": 32,
    "digests_are_not_flushed": 85,
    "drained_is_said_while_readers_are_there": 1330,
    "end_of_a_cancelled_job_says_nothing": 51,
    "end_of_a_channel_is_not_told": 1141,
    "end_of_a_lease_is_not_flushed": 1330,
    "end_of_a_request_wakes_nobody": 85,
    "every_command_takes_a_turn": 2056,
    "failed_pull_is_swallowed": 31,
    "failed_stream_has_no_end": 363,
    "forgotten_peer_keeps_its_links": 3,
    "hung_up_socket_stays_open": 510,
    "identified_dialler_stays_unidentified": 32,
    "idle_server_never_says_so": 85,
    "last_frame_waits_for_the_next": 85,
    "last_lease_does_not_say_drained": 1330,
    "last_page_is_not_reported": 97,
    "lease_ends_only_with_success": 1330,
    "link_is_lost_after_the_last_page": 4,
    "name_of_an_ended_request_is_kept": 510,
    "news_are_told_once": 85,
    "next_command_is_checked_by_the_offer_before": 7,
    "node_sleeps_over_its_timers": 3,
    "node_steps_only_for_events": 3,
    "partial_send_begins_at_the_wrong_byte": 660,
    "peer_is_not_heard": 32,
    "peers_are_not_flushed": 85,
    "pipe_wakes_no_reader": 103,
    "pull_calls_nobody": 85,
    "refused_dial_stays_open": 226,
    "rejected_half_is_not_told": 143,
    "remaining_time_is_in_seconds": 85,
    "requests_of_a_lost_rank_are_not_ended": "second_rank_is_killed",
    "resumed_pull_begins_at_its_first_page": 96,
    "returned_peer_is_still_given_up": 2263,
    "revocation_is_not_flushed": 85,
    "rooms_are_asked_for_once": 360,
    "scores_are_one_token_late": 85,
    "served_link_stays_open": 1,
    "taken_tokens_are_taken_again": 85,
    "two_threads_write_at_once": 85,
    "who_has_nothing_to_say_says_nothing": 32,
    "worker_stays_when_its_node_goes": 85,
    "workers_are_not_told_of_a_lost_peer": 23,
}

# Those that no seed has noticed, and why.
SURVIVORS = {
    "broken_connection_is_swallowed": "needs a cut between router and server under a patient request of 20 s, "
    "while nothing else goes wrong that would excuse its wait",
    "cancelled_pull_is_not_flushed": "another report follows within a few milliseconds, and is told with it",
    "client_that_reads_stays_blocked": "needs an answer whose last write is 5 s before its end: a prefill whose decode "
    "reserves no pages for so long, with nothing wrong",
    "connection_in_use_is_given_back": "needs a router that leaves an answer half read, and asks the same server again "
    "within 2 s",
    "leaving_thread_calls_nobody": "needs more pulls than threads that stay, and one that is due as a thread leaves",
    "listener_never_listens_again": "needs a dial to the one node that has no descriptor left, in that moment",
    "outbox_looks_once": "needs an event between a thread's last look and its release of a lock, and no other after it",
    "peer_that_answers_calls_nobody": "needs a second pull that comes when a dial has stalled for 250 ms, before it "
    "is answered",
}
